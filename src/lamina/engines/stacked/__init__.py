"""The stacked engine: a whole cohort, or a whole grid of experiments, as one model."""
