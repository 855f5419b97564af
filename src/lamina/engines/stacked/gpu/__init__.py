"""GPU kernels of the stacked engine in Triton: they need an NVIDIA GPU and the `triton` that comes with torch."""
