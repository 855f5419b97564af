"""Convolutions of many clients in Triton: needs an NVIDIA GPU and the `triton` that comes with torch there."""
