"""GPU kernels in Triton for the stacked engine: need an NVIDIA GPU and the `triton` that comes with torch there."""
