"""Data sources: one file for each, and what they share."""
