"""One run in memory: the checks before it, its rounds, evaluation, metrics, history and diagnostics."""
