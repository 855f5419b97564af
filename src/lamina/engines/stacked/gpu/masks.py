"""Dropout from random streams in one kernel; the backward pass draws the same mask again instead of keeping it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.gpu.launch import launch

BLOCK = 1024


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    """As in `lamina.base.rng`."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    x, streams, y, counter, size, limit, scale, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply an element by `scale` if its random number, 32 bits of a hashed counter, is not below `limit`."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # the place in memory, where channels are last, as the number of the element in a client's tensor
    sample = place // (PIXELS * CHANNELS)
    element = sample * PIXELS * CHANNELS + place % CHANNELS * PIXELS + place // CHANNELS % PIXELS
    moved = tl.cast(counter, tl.int64).to(tl.uint64, bitcast=True) * 0x94D049BB133111EB
    stream = _mix((tl.load(streams + client).to(tl.uint64, bitcast=True) ^ moved) + 0x9E3779B97F4A7C15)  # `rng.fork`
    word = _mix(stream ^ (element // 2).to(tl.uint64, bitcast=True))  # `rng.words`
    half = (word >> (element % 2 * 32).to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    mask = place < size
    value = tl.load(x + client * size + place, mask=mask, other=0.0).to(tl.float32)
    kept = tl.where(half >= limit, value * scale, 0.0)
    tl.store(y + client * size + place, kept.to(y.dtype.element_ty), mask=mask)


class Dropout(torch.autograd.Function):
    """The kernel with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: Tensor, counter: int, limit: int, scale: float) -> Tensor:
        """See `drop`."""
        ctx.save_for_backward(streams)
        ctx.numbers = counter, limit, scale
        return _run(x, streams, counter, limit, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Drop the same elements of the gradient."""
        (streams,) = ctx.saved_tensors
        return _run(gradients[0], streams, *ctx.numbers), None, None, None, None


def _run(x: Tensor, streams: Tensor, counter: int, limit: int, scale: float) -> Tensor:
    channels = pixels = 1
    if x.dim() == 4 and not x.is_contiguous():
        x = x.contiguous(memory_format=torch.channels_last)
        channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    else:
        x = x.contiguous()
    y, size = torch.empty_like(x), x.numel() // len(streams)
    grid = (triton.cdiv(size, BLOCK), len(streams))
    launch(_drop, grid, x, streams, y, counter, size, limit, scale, channels, pixels, BLOCK)
    return y


def drop(x: Tensor, streams: Tensor, counter: int, limit: int, scale: float) -> Tensor:
    """Drop elements of x [C * B, ...] by random streams of the clients, and scale the rest.

    Args:
        x: what to drop elements of.
        streams: one per client [C].
        counter: forks the streams of this call off them (see `lamina.base.rng.fork`).
        limit: the smallest random number of an element that is kept.
        scale: factor of the elements that are kept.
    """
    y: Tensor = Dropout.apply(x, streams.contiguous(), counter, limit, scale)  # type: ignore[no-untyped-call]
    return y
