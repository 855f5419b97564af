"""Experiments: one TOML file, validated, run to a folder; comparisons of several algorithms."""
