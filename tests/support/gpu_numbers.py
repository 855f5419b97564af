"""Random numbers on a GPU, and errors relative to exact results."""

import torch


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)
