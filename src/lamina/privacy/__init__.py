"""Differential privacy for clients without a run: accounting, correlated noise, and audits."""
