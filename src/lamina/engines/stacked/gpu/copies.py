"""Copies that torch makes slowly: with two axes swapped, and of one vector into many rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.gpu.launch import launch

SIDE = 64  # of the squares in which axes are swapped
BLOCK, ROWS = 4096, 16  # elements, and rows, that a program fills
ALIGNMENT = 16  # elements: rows are filled up to a multiple of it, so that stores are wide


@triton.jit
def _swap(x, y, first, second, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """y[n, j, i] = x[n, i, j], a square of i and j at a time."""
    n = tl.program_id(0).to(tl.int64) * first * second
    across = tl.cdiv(second, SIDE)
    i = tl.program_id(1) // across * SIDE + tl.arange(0, SIDE)
    j = tl.program_id(1) % across * SIDE + tl.arange(0, SIDE)
    mask = (i < first)[:, None] & (j < second)[None, :]
    square = tl.load(x + n + i[:, None] * second + j[None, :], mask=mask)
    tl.store(y + n + j[:, None] * first + i[None, :], tl.trans(square), mask=tl.trans(mask))


def _swapped(x: Tensor) -> Tensor:
    """Return contiguous x [N, A, B] as contiguous [N, B, A]."""
    samples, first, second = x.shape
    y = torch.empty(samples, second, first, dtype=x.dtype, device=x.device)
    launch(_swap, (samples, triton.cdiv(first, SIDE) * triton.cdiv(second, SIDE)), x, y, first, second, SIDE)
    return y


class _Flatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return _swapped(x.permute(0, 2, 3, 1).flatten(1, 2)).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        samples, channels, height, width = ctx.shape
        g = _swapped(gradients[0].contiguous().reshape(samples, channels, -1))
        return g.reshape(samples, height, width, channels).permute(0, 3, 1, 2)


def flatten(x: Tensor) -> Tensor:
    """Return images [N, channels, H, W] as [N, channels * H * W]."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return x.flatten(1)
    y: Tensor = _Flatten.apply(x)  # type: ignore[no-untyped-call]
    return y


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    vector, rows, rounded, count, size, pitch, rounded_pitch,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * ROWS
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(vector + i, mask=i < size, other=0.0)
    wide = i < (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    for row in range(first, tl.minimum(first + ROWS, count)):
        place = tl.cast(row, tl.int64)
        tl.store(rows + place * pitch + i, value, mask=wide)
        if ROUNDED:
            tl.store(rounded + place * rounded_pitch + i, value.to(tl.bfloat16), mask=wide)


def fill_rows(rows: Tensor, vector: Tensor, rounded: Tensor | None = None) -> None:
    """Copy a vector into all rows [rows, p] and, rounded to bfloat16, into those of another tensor.

    After a row there must be room up to a multiple of `ALIGNMENT`, which is set to zero.
    """
    also = rows if rounded is None else rounded
    grid = (triton.cdiv(len(vector), BLOCK), triton.cdiv(len(rows), ROWS))
    launch(
        _fill, grid, vector.contiguous(), rows, also, len(rows), len(vector), rows.stride(0), also.stride(0),
        rounded is not None, ROWS, BLOCK, ALIGNMENT, num_warps=8,
    )  # fmt: skip
