"""Max-pooling of adjacent windows, with the ReLU before or after it; images have their channels last in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.gpu.convolution import Pair, empty_images
from lamina.engines.stacked.gpu.launch import launch

BLOCK = 1024


@triton.jit
def _pool(  # type: ignore[no-untyped-def]
    x, y, place, size, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the maximum of every window and its place there; as in torch, the first of equal values, and any NaN.

    RELU: a maximum below zero is zero, and has no place: no pixel gets its gradient.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _corner(i, CHANNELS, HEIGHT, WIDTH, KH, KW)
    best = tl.load(x + first, mask=i < size)
    where = tl.zeros((BLOCK,), dtype=tl.int32)
    for j in tl.static_range(1, KH * KW):
        value = tl.load(x + first + (j // KW * WIDTH + j % KW) * CHANNELS, mask=i < size)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        where = tl.where(better, j, where)
    if RELU:
        where = tl.where(best <= 0, -1, where)
        best = tl.where(best <= 0, 0.0, best).to(best.dtype)
    tl.store(y + i, best, mask=i < size)
    tl.store(place + i, where.to(tl.int8), mask=i < size)


@triton.jit
def _pool_gradient(  # type: ignore[no-untyped-def]
    g, place, dx, size, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _corner(i, CHANNELS, HEIGHT, WIDTH, KH, KW)
    value = tl.load(g + i, mask=i < size)
    where = tl.load(place + i, mask=i < size).to(tl.int32)
    for j in tl.static_range(KH * KW):
        kept = tl.where(where == j, value, 0.0).to(value.dtype)
        tl.store(dx + first + (j // KW * WIDTH + j % KW) * CHANNELS, kept, mask=i < size)


@triton.jit
def _corner(  # type: ignore[no-untyped-def]
    i, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr
):
    """Return the offset of the first element in the window of output i."""
    pixel = i // CHANNELS
    sample = pixel // ((HEIGHT // KH) * (WIDTH // KW))
    row = pixel // (WIDTH // KW) % (HEIGHT // KH) * KH
    column = pixel % (WIDTH // KW) * KW
    return ((sample * HEIGHT + row) * WIDTH + column) * CHANNELS + i % CHANNELS


def max_pool(x: Tensor, kernel: Pair, relu: bool = False) -> tuple[Tensor, Tensor]:
    """Return the maxima of adjacent windows of x [N, channels, H, W], and the place of each in its window."""
    samples, channels, height, width = x.shape
    y = empty_images(x, samples, channels, height // kernel[0], width // kernel[1])
    place = torch.empty_like(y, dtype=torch.int8)
    launch(
        _pool, (triton.cdiv(y.numel(), BLOCK),), x, y, place, y.numel(),
        channels, height, width, *kernel, relu, BLOCK, num_warps=4,
    )  # fmt: skip
    return y, place


def max_pool_gradient(g: Tensor, place: Tensor, size: Pair, kernel: Pair) -> Tensor:
    """Return the gradient of the pooled images [N, channels, *size]; pixels outside all windows get zero."""
    dx = empty_images(g, *g.shape[:2], *size)
    if size[0] % kernel[0] or size[1] % kernel[1]:
        dx.zero_()
    launch(
        _pool_gradient, (triton.cdiv(g.numel(), BLOCK),), g, place, dx, g.numel(),
        g.shape[1], *size, *kernel, BLOCK, num_warps=4,
    )  # fmt: skip
    return dx
