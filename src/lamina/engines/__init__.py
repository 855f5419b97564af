"""Engines run an algorithm's round. All of them consume the same plan and give the same trajectory."""
