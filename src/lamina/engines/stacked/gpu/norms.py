"""GroupNorm of many clients' images, with the residual sum and the ReLU that follow it, in one kernel each way.

A program normalises one group of one sample. A group that fits the registers is read once, others twice: for their
moments and for the result. Images have their channels last in memory; scale and shift are one vector per client.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.folding import NormOptions
from lamina.engines.stacked.gpu.launch import launch
from lamina.engines.stacked.gpu.sums import sum_rows
from lamina.engines.stacked.side_stream import claim, weight_gradients

# Elements that a program holds at a time, from a sweep over the layers of ResNet-18 on an H200: a whole group of a
# small image, so that it is read once, unless the gradients of a residual or of two users have to be held as well.
TILE, RESIDUAL_TILE = 32768, 16384
# A warp reads a pixel of a group with so many channels at once. Backward, several warps would then add up their sums of
# every channel through shared memory, which takes longer than the rest; so there is one.
WIDE_GROUP = 128


@triton.jit
def _moments(  # type: ignore[no-untyped-def]
    x, first, channel, real, CHANNELS: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, BP: tl.constexpr
):
    """Mean and squared distance from it, tile by tile: also exact for a large mean."""
    count = 0.0
    mean = 0.0
    squares = 0.0
    for start in range(0, PIXELS, BP):
        pixel = start + tl.arange(0, BP)
        mask = (pixel < PIXELS)[:, None] & real[None, :]
        value = tl.load(x + first + pixel[:, None] * CHANNELS + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        number = tl.minimum(PIXELS - start, BP) * SIZE * 1.0
        tile_mean = tl.sum(value) / number
        centred = tl.where(mask, value - tile_mean, 0.0)
        shift = tile_mean - mean
        total = count + number
        mean += shift * number / total
        squares += tl.sum(centred * centred) + shift * shift * count * number / total
        count = total
    return mean, squares


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, residual, weight, bias, y, moments, samples, w_client,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, EPS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual), for SIZE channels of one sample."""
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, BC)
    real = tl.arange(0, BC) < SIZE
    first = n * PIXELS * CHANNELS
    client = n // samples
    w = tl.load(weight + client * w_client + channel, mask=real, other=0.0).to(tl.float32)
    b = tl.load(bias + client * w_client + channel, mask=real, other=0.0).to(tl.float32)
    IN_REGISTERS: tl.constexpr = PIXELS <= BP
    if IN_REGISTERS:
        pixel = tl.arange(0, BP)
        mask = (pixel < PIXELS)[:, None] & real[None, :]
        value = tl.load(x + first + pixel[:, None] * CHANNELS + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(value) / (PIXELS * SIZE)
        centred = tl.where(mask, value - mean, 0.0)
        squares = tl.sum(centred * centred)
    else:
        mean, squares = _moments(x, first, channel, real, CHANNELS, SIZE, PIXELS, BP)
    scale = 1.0 / tl.sqrt_rn(squares / (PIXELS * SIZE) + EPS)
    for start in range(0, PIXELS, BP):
        pixel = start + tl.arange(0, BP)
        mask = (pixel < PIXELS)[:, None] & real[None, :]
        place = first + pixel[:, None] * CHANNELS + channel[None, :]
        if not IN_REGISTERS:
            value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        out = (value - mean) * scale * w[None, :] + b[None, :]
        if RESIDUAL:
            out += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
    slot = moments + (n * tl.num_programs(1) + group) * 2
    tl.store(slot, mean)
    tl.store(slot + 1, scale)


@triton.jit
def _gradient_and_value(  # type: ignore[no-untyped-def]
    g, g_again, x, y, place, mask, mean, scale, w, b, RESIDUAL: tl.constexpr, RELU: tl.constexpr, TWICE: tl.constexpr
):
    """Return the gradient before the ReLU and the value, in their narrow types, so that more fit the registers.

    Without a residual, the output is computed again, which is faster than reading y. TWICE: the gradient has two terms.
    """
    gradient = tl.load(g + place, mask=mask, other=0.0)
    value = tl.load(x + place, mask=mask, other=0.0)
    if TWICE:
        again = tl.load(g_again + place, mask=mask, other=0.0)
        gradient = (gradient.to(tl.float32) + again.to(tl.float32)).to(gradient.dtype)
    if RELU:
        if RESIDUAL:
            out = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
        else:
            out = (value.to(tl.float32) - mean) * scale * w[None, :] + b[None, :]
        gradient = tl.where(out <= 0, 0.0, gradient).to(gradient.dtype)
    return gradient, value


@triton.jit
def _add_pairs(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, b + d


@triton.jit
def _channel_sums(gradient, value, mean, scale):  # type: ignore[no-untyped-def]
    """Return the sums over pixels of the gradient and of its product with the normalised value, in one reduction."""
    wide = gradient.to(tl.float32)
    return tl.reduce((wide, wide * ((value.to(tl.float32) - mean) * scale)), axis=0, combine_fn=_add_pairs)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    g, g_again, x, y, weight, bias, moments, dx, d_residual, d_affine, samples, w_client,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """The gradients of `_forward`; those of weight and bias for every sample apart."""
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, BC)
    real = tl.arange(0, BC) < SIZE
    first = n * PIXELS * CHANNELS
    slot = moments + (n * tl.num_programs(1) + group) * 2
    mean = tl.load(slot)
    scale = tl.load(slot + 1)
    w = tl.load(weight + n // samples * w_client + channel, mask=real, other=0.0).to(tl.float32)
    b = tl.load(bias + n // samples * w_client + channel, mask=real, other=0.0).to(tl.float32)
    IN_REGISTERS: tl.constexpr = PIXELS <= BP
    if IN_REGISTERS:
        pixel = tl.arange(0, BP)
        mask = (pixel < PIXELS)[:, None] & real[None, :]
        place = first + pixel[:, None] * CHANNELS + channel[None, :]
        gradient, value = _gradient_and_value(g, g_again, x, y, place, mask, mean, scale, w, b, RESIDUAL, RELU, TWICE)
        sums, products = _channel_sums(gradient, value, mean, scale)
    else:
        sums = tl.zeros((BC,), dtype=tl.float32)
        products = tl.zeros((BC,), dtype=tl.float32)
        for start in range(0, PIXELS, BP):
            pixel = start + tl.arange(0, BP)
            mask = (pixel < PIXELS)[:, None] & real[None, :]
            place = first + pixel[:, None] * CHANNELS + channel[None, :]
            gradient, value = _gradient_and_value(
                g, g_again, x, y, place, mask, mean, scale, w, b, RESIDUAL, RELU, TWICE
            )
            if RESIDUAL and (RELU or TWICE):  # the second pass reads it instead of the gradients and y
                tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)
            tile_sums, tile_products = _channel_sums(gradient, value, mean, scale)
            sums += tile_sums
            products += tile_products
    if RESIDUAL and (RELU or TWICE) and not IN_REGISTERS:
        tl.debug_barrier()  # what the first pass has stored is read by other threads
    tl.store(d_affine + n * CHANNELS + channel, products, mask=real)
    tl.store(d_affine + (tl.num_programs(0) + n) * CHANNELS + channel, sums, mask=real)
    mean_gradient, mean_product = tl.reduce((w * sums, w * products), axis=0, combine_fn=_add_pairs)
    mean_gradient /= PIXELS * SIZE
    mean_product /= PIXELS * SIZE
    for start in range(0, PIXELS, BP):
        pixel = start + tl.arange(0, BP)
        mask = (pixel < PIXELS)[:, None] & real[None, :]
        place = first + pixel[:, None] * CHANNELS + channel[None, :]
        if not IN_REGISTERS:
            if RESIDUAL and (RELU or TWICE):
                gradient = tl.load(d_residual + place, mask=mask, other=0.0)
                value = tl.load(x + place, mask=mask, other=0.0)
            else:
                gradient, value = _gradient_and_value(
                    g, g_again, x, y, place, mask, mean, scale, w, b, RESIDUAL, RELU, TWICE
                )
        elif RESIDUAL and (RELU or TWICE):
            tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)
        normal = (value.to(tl.float32) - mean) * scale
        out = scale * (w[None, :] * gradient.to(tl.float32) - mean_gradient - normal * mean_product)
        tl.store(dx + place, out.to(dx.dtype.element_ty), mask=mask)


class GroupNorm(torch.autograd.Function):
    """The kernels with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, options: NormOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `group_norm`."""
        ctx.claim = claim(weight, bias)
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.to(x.dtype).contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        groups, eps, relu, twice = options
        samples, channels, height, width = x.shape
        moments = torch.empty(samples, groups, 2, dtype=torch.float32, device=x.device)
        ctx.sizes = channels, channels // groups, height * width
        ctx.relu, ctx.residual = relu, residual is not None
        launch(
            _forward, (samples, groups), x, x if residual is None else residual, weight, bias, y, moments,
            samples // len(weight), weight.stride(0),
            *ctx.sizes, eps, *_tile(ctx.sizes, TILE), ctx.residual, relu, num_warps=_warps(ctx.sizes, TILE),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, y if relu and ctx.residual else x, moments)
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, scale, shift and residual."""
        x, weight, bias, y, moments = ctx.saved_tensors
        twice = len(gradients) == 2
        g, *second = (gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients)
        again = second[0] if twice else g
        dx = torch.empty_like(x)
        d_residual = torch.empty_like(x) if ctx.residual and (ctx.relu or twice) else g
        d_affine = torch.empty(2, len(x), x.shape[1], dtype=torch.float32, device=x.device)
        clients = len(weight)
        most, warps = _backward_tile(ctx.sizes, ctx.residual)
        launch(
            _backward, (len(x), moments.shape[1]), g, again, x, y, weight, bias, moments, dx, d_residual, d_affine,
            len(x) // clients, weight.stride(0),
            *ctx.sizes, *_tile(ctx.sizes, most), ctx.residual, ctx.relu, twice, num_warps=warps,
        )  # fmt: skip

        def compute() -> tuple[Tensor, ...]:
            sums = sum_rows(d_affine.reshape(2 * clients, -1, x.shape[1]))
            return sums.to(weight.dtype).reshape(2, clients, -1).unbind()

        d_weight, d_bias = weight_gradients(ctx.claim, compute, (d_affine,))
        return dx, d_weight, d_bias, d_residual if ctx.residual else None, None


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, options: NormOptions, residual: Tensor | None = None) -> Any:
    """x [C * B, channels, H, W], weight and bias [C, channels] -> relu(GroupNorm(x) + residual), of the same shape.

    With `twice`, the backward pass adds the gradients of the two users itself.
    """
    if bias.stride(0) != weight.stride(0) or weight.stride(1) != 1 or bias.stride(1) != 1:
        weight, bias = weight.contiguous(), bias.contiguous()
    return GroupNorm.apply(x, weight, bias, residual, options)  # type: ignore[no-untyped-call]


def _tile(sizes: tuple[int, int, int], most: int) -> tuple[int, int]:
    """Return the pixels and channels that a program holds at a time."""
    _, size, pixels = sizes
    columns = triton.next_power_of_2(size)
    return max(1, min(triton.next_power_of_2(pixels), most // columns)), columns


def _backward_tile(sizes: tuple[int, int, int], holds_more: bool) -> tuple[int, int]:
    """Return the elements that a program of the backward pass holds at a time, and its warps."""
    _, size, pixels = sizes
    if size >= WIDE_GROUP:
        return 4096 if size < 2 * WIDE_GROUP else 2048, 1
    most = RESIDUAL_TILE if holds_more else TILE
    if size * pixels <= most // 2:
        return most, 4
    return most, 8 if holds_more or size * pixels <= most else 16


def _warps(sizes: tuple[int, int, int], most: int) -> int:
    rows, columns = _tile(sizes, most)
    return 4 if rows * columns < 8192 else 8 if rows * columns < 32768 else 16
