"""Describe tensors to Hopper's copy engine, which fetches and stores boxes of them by their coordinates."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNED = 8  # channels: the copy engine wants strides of 16 bytes


def by_client(x: Tensor, clients: int) -> Tensor:
    """Return images [C * B, channels, H, W] with the channels last in memory as [C, B, H, W, channels]."""
    pixels = x.permute(0, 2, 3, 1)
    return pixels.reshape(clients, -1, *pixels.shape[1:])


def every_second(x: Tensor) -> list[Tensor]:
    """Return four images of every second row and column, from [0, 0], [0, 1], [1, 0] and [1, 1] on."""
    return [x[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)]


def count_boxes(x: Tensor, box: tuple[int, int, int]) -> int:
    """Return how many boxes of samples, rows and columns cover a client's images [C, B, H, W, channels]."""
    return math.prod(triton.cdiv(n, b) for n, b in zip(x.shape[1:4], box, strict=True))


def descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Describe a tensor that is fetched or stored in blocks; if its address or a stride is unaligned, describe a copy.

    A tensor to be stored must be aligned, because the copy would be stored instead.
    """
    strides = _strides(x)
    if any(stride % ALIGNED for stride in strides[:-1]) or strides[-1] != 1 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a dense tensor at an unaligned address
        strides = _strides(x)
    kind = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return TensorDescriptor(x, list(x.shape), strides, list(block), layout)


def _strides(x: Tensor) -> list[int]:
    """Return a tensor's strides; torch gives axes of length 1 any stride, here they have that of a dense tensor."""
    strides = list(x.stride())
    for axis in reversed(range(x.dim())):
        if x.shape[axis] == 1:
            strides[axis] = strides[axis + 1] * x.shape[axis + 1] if axis + 1 < x.dim() else 1
    return strides
