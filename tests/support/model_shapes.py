"""Every registered model with shapes that it must take, and inputs of a shape."""

from __future__ import annotations

import torch

SHAPES: dict[str, list[tuple[int, ...]]] = {  # every model x shapes it must take
    "mlp": [(1, 28, 28), (1, 8, 8), (13,)],
    "cnn": [(1, 28, 28), (3, 32, 32), (1, 16, 17)],
    "small_cnn": [(1, 8, 8), (1, 28, 28), (3, 2, 5)],
    "lenet": [(3, 32, 32), (1, 28, 28), (3, 64, 64), (3, 16, 16)],
    "cifar_cnn": [(3, 32, 32), (1, 28, 28), (1, 6, 7)],
    "cifar_cnn3": [(3, 32, 32), (1, 28, 28), (3, 18, 19)],
    "resnet9": [(3, 32, 32), (1, 28, 28), (1, 8, 8)],
    "resnet18": [(3, 32, 32), (3, 64, 64), (1, 28, 28)],
}  # of images and vectors; the transformer takes tokens


def batch(shape: tuple[int, ...], n: int = 4) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))
