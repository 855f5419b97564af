"""What pytest must know before it collects."""

import importlib.util

# The GPU's kernels can only be imported where there is a Triton.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/lamina/engines/stacked/gpu/*"]
