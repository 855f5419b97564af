"""What every other package builds on: errors, text, random numbers, limits, paths. It knows nothing of learning."""
