"""Several runs: comparisons, tuning, claims, reproductions."""
