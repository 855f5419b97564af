"""Convolve the images of many clients, each with its own weights, in one launch of a Triton kernel.

A convolution is a matrix product whose left factor is never stored ("implicit GEMM"): a program computes one tile of
one client's product and reads the pixels that it needs. The client is an axis of the grid, so a cohort
of any size is one launch and no data are rearranged. Images are [C, B, H, W, channels] in memory, kernels
[C, out, kh, kw, in], which is how `ChannelsLast` lays them out in the flat vector.

Products are exact in float32 ("ieee"), or go through tensor cores ("tf32", or bfloat16 inputs); sums are float32.
Nothing is added atomically: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.gpu.launch import launch


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, w, bias, y, rows, height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    x_client, w_client, bias_client, y_client,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Compute y[m, n] = bias[n] + sum_k patch(x)[m, k] w[n, k].

    m = (sample, row, column), n = out channel, k = (kh, kw, in channel).
    """
    DEPTH: tl.constexpr = KH * KW * IN
    RUN: tl.constexpr = KW * IN  # what one row of the kernel meets lies side by side in memory
    BY_TAP: tl.constexpr = IN % BK == 0 or IN >= 32  # one tap at a time: the pixel is the same for the whole tile
    UNPADDED: tl.constexpr = PAD_H == 0 and PAD_W == 0  # no tap falls outside: nothing to test
    BY_RUN: tl.constexpr = UNPADDED and RUN <= BK and 2 * RUN > BK
    CHUNKS: tl.constexpr = (IN + BK - 1) // BK  # of channels, per tap
    STEPS: tl.constexpr = KH * KW * CHUNKS if BY_TAP else KH if BY_RUN else (DEPTH + BK - 1) // BK
    tiles_n: tl.constexpr = (OUT + BN - 1) // BN
    client = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    m = (tile // tiles_n) * BM + tl.arange(0, BM)
    n = (tile % tiles_n) * BN + tl.arange(0, BN)
    x += client * x_client
    w += client * w_client
    y += client * y_client
    sample = m // (out_height * out_width)
    top = (m // out_width) % out_height * STRIDE_H - PAD_H
    left = m % out_width * STRIDE_W - PAD_W
    first = ((sample * height + top) * width + left) * IN  # of the patch, if it has no padding
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, STEPS):
        if BY_TAP:
            tap = step // CHUNKS
            row = top + tap // KW
            column = left + tap % KW
            inside = (m < rows) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            pixel = (sample * height + row) * width + column
            channel = step % CHUNKS * BK + tl.arange(0, BK)
            real = channel < IN
            a = tl.load(x + pixel[:, None] * IN + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            b = tl.load(
                w + n[None, :] * DEPTH + (tap * IN + channel)[:, None],
                mask=(n < OUT)[None, :] & real[:, None],
                other=0.0,
            )
        elif BY_RUN:
            k = tl.arange(0, BK)
            a = tl.load(
                x + (first + step * width * IN)[:, None] + k[None, :],
                mask=(m < rows)[:, None] & (k < RUN)[None, :],
                other=0.0,
            )
            b = tl.load(
                w + n[None, :] * DEPTH + (step * RUN + k)[:, None],
                mask=(n < OUT)[None, :] & (k < RUN)[:, None],
                other=0.0,
            )
        else:
            k = step * BK + tl.arange(0, BK)
            if UNPADDED:
                offset = (k // RUN * width + k // IN % KW) * IN + k % IN
                a = tl.load(
                    x + first[:, None] + offset[None, :], mask=(m < rows)[:, None] & (k < DEPTH)[None, :], other=0.0
                )
            else:
                rows_k = top[:, None] + (k // RUN)[None, :]
                columns_k = left[:, None] + (k // IN % KW)[None, :]
                inside_k = (rows_k >= 0) & (rows_k < height) & (columns_k >= 0) & (columns_k < width)
                inside_k = inside_k & (m < rows)[:, None] & (k < DEPTH)[None, :]
                pixels = (sample[:, None] * height + rows_k) * width + columns_k
                a = tl.load(x + pixels * IN + (k % IN)[None, :], mask=inside_k, other=0.0)
            b = tl.load(w + n[None, :] * DEPTH + k[:, None], mask=(n < OUT)[None, :] & (k < DEPTH)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if BIASED:
        sums += tl.load(bias + client * bias_client + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < OUT)[None, :]
    tl.store(y + m[:, None] * OUT + n[None, :], sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _input_gradient(  # type: ignore[no-untyped-def]
    g, w, dx, samples, height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    g_client, w_client, dx_client,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx[m, n] = sum_k g[the output pixel that used pixel m at tap k] w[k, n].

    With a stride, a pixel is used only by the taps of its own residue. Each program handles one residue (grid axis 2),
    so that no product with zero is computed.
    """
    tiles_n: tl.constexpr = (IN + BN - 1) // BN
    client = tl.program_id(1).to(tl.int64)
    residue_h = tl.program_id(2) // STRIDE_W
    residue_w = tl.program_id(2) % STRIDE_W
    some_height = (height - residue_h + STRIDE_H - 1) // STRIDE_H  # pixels of this residue
    some_width = (width - residue_w + STRIDE_W - 1) // STRIDE_W
    rows = samples * some_height * some_width
    tile = tl.program_id(0)
    if (tile // tiles_n) * BM >= rows:
        return
    m = (tile // tiles_n) * BM + tl.arange(0, BM)
    n = (tile % tiles_n) * BN + tl.arange(0, BN)
    g += client * g_client
    w += client * w_client
    dx += client * dx_client
    sample = m // (some_height * some_width)
    row = (m // some_width) % some_height * STRIDE_H + residue_h
    column = m % some_width * STRIDE_W + residue_w
    first_h = (residue_h + PAD_H) % STRIDE_H  # the taps are first, first + stride, ...
    first_w = (residue_w + PAD_W) % STRIDE_W
    taps_h = tl.maximum(KH - first_h + STRIDE_H - 1, 0) // STRIDE_H
    taps_w = tl.maximum(KW - first_w + STRIDE_W - 1, 0) // STRIDE_W
    bottom = (row + PAD_H - first_h) // STRIDE_H  # the output row the first tap carried this row to
    right = (column + PAD_W - first_w) // STRIDE_W
    NARROW: tl.constexpr = g.dtype.element_ty.primitive_bitwidth == 16
    BY_TAP: tl.constexpr = OUT % BK == 0 or OUT >= 32 or (OUT >= 16 and NARROW)
    CHUNKS: tl.constexpr = (OUT + BK - 1) // BK
    depth = taps_h * taps_w * OUT
    steps = taps_h * taps_w * CHUNKS if BY_TAP else (depth + BK - 1) // BK
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, steps):
        if BY_TAP:
            tap = step // CHUNKS
            tap_h = tap // taps_w
            tap_w = tap % taps_w
            out_row = bottom - tap_h
            out_column = right - tap_w
            inside = (m < rows) & (out_row >= 0) & (out_row < out_height)
            inside = inside & (out_column >= 0) & (out_column < out_width)
            pixel = (sample * out_height + out_row) * out_width + out_column
            channel = step % CHUNKS * BK + tl.arange(0, BK)
            real = channel < OUT
            a = tl.load(g + pixel[:, None] * OUT + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            offset = ((first_h + tap_h * STRIDE_H) * KW + first_w + tap_w * STRIDE_W) * IN
            b = tl.load(
                w + channel[:, None] * (KH * KW * IN) + offset + n[None, :],
                mask=(n < IN)[None, :] & real[:, None],
                other=0.0,
            )
        else:
            k = step * BK + tl.arange(0, BK)
            taps = k // OUT
            taps_kh = taps // taps_w
            taps_kw = taps % taps_w
            channel_k = k % OUT
            out_rows = bottom[:, None] - taps_kh[None, :]
            out_columns = right[:, None] - taps_kw[None, :]
            inside_k = (out_rows >= 0) & (out_rows < out_height) & (out_columns >= 0) & (out_columns < out_width)
            inside_k = inside_k & (m < rows)[:, None] & (k < depth)[None, :]
            pixels = (sample[:, None] * out_height + out_rows) * out_width + out_columns
            a = tl.load(g + pixels * OUT + channel_k[None, :], mask=inside_k, other=0.0)
            offsets = ((first_h + taps_kh * STRIDE_H) * KW + first_w + taps_kw * STRIDE_W) * IN
            b = tl.load(
                w + (channel_k * (KH * KW * IN) + offsets)[:, None] + n[None, :],
                mask=(n < IN)[None, :] & (k < depth)[:, None],
                other=0.0,
            )
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    pixel_out = (sample * height + row) * width + column
    mask = (m < rows)[:, None] & (n < IN)[None, :]
    tl.store(dx + pixel_out[:, None] * IN + n[None, :], sums.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    g, x, dw, db, rows, per_part, height: tl.constexpr, width: tl.constexpr,
    out_height: tl.constexpr, out_width: tl.constexpr, g_client, x_client, dw_client, dw_part, db_part,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Compute dw[o, k] = sum_m g[m, o] patch(x)[m, k] over a part (grid axis 2) of the rows m = (sample, row, column).

    The kernel also computes the gradient of the bias, sum_m g[m, o], because it reads g.
    """
    DEPTH: tl.constexpr = KH * KW * IN
    RUN: tl.constexpr = KW * IN
    UNPADDED: tl.constexpr = PAD_H == 0 and PAD_W == 0
    BY_RUN: tl.constexpr = UNPADDED and RUN <= BN and 2 * RUN > BN  # a tile is one row of the kernel
    tiles_n: tl.constexpr = KH if BY_RUN else (DEPTH + BN - 1) // BN
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    tile = tl.program_id(0)
    o = (tile // tiles_n) * BM + tl.arange(0, BM)
    column_k = tl.arange(0, BN)
    if BY_RUN:
        k = (tile % tiles_n) * RUN + column_k
        real_k = column_k < RUN
    else:
        k = (tile % tiles_n) * BN + column_k
        real_k = k < DEPTH
    g += client * g_client
    x += client * x_client
    dw += client * dw_client + part.to(tl.int64) * dw_part
    tap_h = k // (KW * IN)
    tap_w = k // IN % KW
    channel = k % IN
    # for whole tiles of channels the tap is the same for the tile
    one_tap = (tile % tiles_n) * BN // IN
    one_h = one_tap // KW
    one_w = one_tap % KW
    offset = (tap_h * width + tap_w) * IN + channel
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    bias_sums = tl.zeros((BM,), dtype=tl.float32)
    end = tl.minimum((part + 1) * per_part, rows)
    for start in range(part * per_part, end, BK):
        m = start + tl.arange(0, BK)
        valid = m < end
        sample = m // (out_height * out_width)
        top = (m // out_width) % out_height * STRIDE_H - PAD_H
        left = m % out_width * STRIDE_W - PAD_W
        a = tl.load(g + m[:, None] * OUT + o[None, :], mask=valid[:, None] & (o < OUT)[None, :], other=0.0)
        if IN % BN == 0:
            row = top + one_h
            column = left + one_w
            inside = valid & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            pixel = (sample * height + row) * width + column
            b = tl.load(x + pixel[:, None] * IN + channel[None, :], mask=inside[:, None], other=0.0)
        elif UNPADDED:
            first = ((sample * height + top) * width + left) * IN
            if BY_RUN:
                first += (tile % tiles_n) * width * IN
                b = tl.load(x + first[:, None] + column_k[None, :], mask=valid[:, None] & real_k[None, :], other=0.0)
            else:
                b = tl.load(x + first[:, None] + offset[None, :], mask=valid[:, None] & real_k[None, :], other=0.0)
        else:
            rows_k = top[:, None] + tap_h[None, :]
            columns_k = left[:, None] + tap_w[None, :]
            inside_k = (rows_k >= 0) & (rows_k < height) & (columns_k >= 0) & (columns_k < width)
            inside_k = inside_k & valid[:, None] & real_k[None, :]
            pixels = (sample[:, None] * height + rows_k) * width + columns_k
            b = tl.load(x + pixels * IN + channel[None, :], mask=inside_k, other=0.0)
        sums = tl.dot(tl.trans(a), b, sums, input_precision=PRECISION)
        if BIASED:  # noqa: SIM102 (known when it is compiled, the other is not)
            if tile % tiles_n == 0:
                bias_sums += tl.sum(a.to(tl.float32), axis=0)
    if BIASED:
        only_once = (o < OUT) & (tile % tiles_n == 0)
        tl.store(db + part.to(tl.int64) * db_part + client * OUT + o, bias_sums, mask=only_once)
    mask = (o < OUT)[:, None] & real_k[None, :]
    tl.store(dw + o[:, None] * DEPTH + k[None, :], sums.to(dw.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """The size of the tile that one program computes, and its launch options."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3  # loads kept in flight


PROGRAMS = 528  # to keep a large GPU's 132 processors busy; a weight gradient is cut into parts to have as many
MOST_PARTS = 32
Pair = tuple[int, int]


class Window(NamedTuple):
    """What a convolution sees of an image at a time, and how it moves over it."""

    size: Pair
    stride: Pair
    padding: Pair


def forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair, precision: str, bias: Tensor | None = None) -> Tensor:
    """Convolve x [C * B, in, H, W] with w [C, out, in, kh, kw], both with the channels last in memory."""
    x, w = _images(x), _kernels(w)
    clients, out, inp, kh, kw = w.shape
    height, width = x.shape[2:]
    out_height, out_width = out_size(height, kh, stride[0], padding[0]), out_size(width, kw, stride[1], padding[1])
    y = empty_images(x, x.shape[0], out, out_height, out_width)
    rows = x.shape[0] // clients * out_height * out_width
    run = kw * inp if padding == (0, 0) else 0
    bm, bn, bk, warps, stages = _product_tile(out, inp, kh * kw, run, x.element_size())
    grid = (triton.cdiv(rows, bm) * triton.cdiv(out, bn), clients)
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    launch(
        _forward, grid, x, w, w if bias is None else bias, y, rows, height, width, out_height, out_width,
        x.numel() // clients, w.stride(0), 0 if bias is None else bias.stride(0), y.numel() // clients,
        inp, out, kh, kw, *stride, *padding, bm, bn, bk, precision, bias is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def input_gradient(g: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """Return the gradient of the input [C * B, in, H, W] from that of the output."""
    g, w = _images(g), _kernels(w)
    clients, out, inp, kh, kw = w.shape
    height, width = size
    dx = empty_images(g, g.shape[0], inp, height, width)
    samples = g.shape[0] // clients
    pixels = triton.cdiv(height, stride[0]) * triton.cdiv(width, stride[1])  # of the largest residue
    bm, bn, bk, warps, stages = _product_tile(inp, out, kh * kw, 0, g.element_size())
    grid = (triton.cdiv(samples * pixels, bm) * triton.cdiv(inp, bn), clients, stride[0] * stride[1])
    launch(
        _input_gradient, grid, g, w, dx, samples, height, width, g.shape[2], g.shape[3],
        g.numel() // clients, w.stride(0), dx.numel() // clients,
        inp, out, kh, kw, *stride, *padding, bm, bn, bk, precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


def weight_gradient(
    g: Tensor, x: Tensor, clients: int, window: Window, precision: str,
    biased: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of the weights [C, out, in, kh, kw], channels last in memory, and of the bias (float32)."""
    g, x = _images(g), _images(x)
    out, inp = g.shape[1], x.shape[1]
    (height, width), (out_height, out_width) = x.shape[2:], g.shape[2:]
    (kh, kw), stride, padding = window
    rows, depth = g.shape[0] // clients * out_height * out_width, kh * kw * inp
    run = kw * inp if padding == (0, 0) else 0
    bm, bn, bk, warps, stages = _gradient_tile(out, inp, run, g.element_size())
    tiles = triton.cdiv(out, bm) * (kh if fits_run(run, bn) else triton.cdiv(depth, bn))
    parts = max(1, min(MOST_PARTS, PROGRAMS // (tiles * clients), rows // (4 * bk)))
    per_part = triton.cdiv(triton.cdiv(rows, parts), bk) * bk
    summed = dtype if parts == 1 else torch.float32  # parts are added up before they are rounded
    dw = torch.empty(parts, clients, out, kh, kw, inp, dtype=summed, device=g.device)
    db = torch.empty(parts, clients, out, dtype=torch.float32, device=g.device) if biased else dw
    launch(
        _weight_gradient, (tiles, clients, parts), g, x, dw, db, rows, per_part, height, width, out_height, out_width,
        g.numel() // clients, x.numel() // clients, dw.stride(1), dw.stride(0), db.stride(0),
        inp, out, kh, kw, *stride, *padding, bm, bn, bk, precision, biased, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    total, bias = (each[0] if parts == 1 else each.sum(0) for each in (dw, db if biased else db[:1]))
    return total.to(dtype).permute(0, 1, 4, 2, 3), bias if biased else None


def out_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the size of a convolution's output along one axis."""
    return (size + 2 * padding - kernel) // stride + 1


def empty_images(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor for images, with the channels last in memory."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _images(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _kernels(w: Tensor) -> Tensor:
    """Return the weights with the channels last in memory; clients need not be adjacent, as in a flat vector."""
    moved = w.permute(0, 1, 3, 4, 2)
    dense = moved[0].is_contiguous()
    return w if dense else moved.contiguous().permute(0, 1, 4, 2, 3)


def _power(n: int, low: int, high: int) -> int:
    """Return the smallest power of two that is at least n, within limits."""
    return int(min(high, max(low, triton.next_power_of_2(n))))


def fits_run(run: int, size: int) -> bool:
    """Return whether one row of a kernel, `run` adjacent numbers, fills more than half of a tile's side."""
    return run <= size < 2 * run


def _product_tile(columns: int, channels: int, taps: int, run: int, bytes_each: int) -> Tile:
    """Return the fastest tile of a sweep over the benchmarks' layers on an H200; `run` is 0 if there is padding."""
    if bytes_each == 2 and channels < 32 and 16 < run <= 64:
        return Tile(128, _power(columns, 16, 64), _power(run, 32, 64), 4, 1)
    if bytes_each == 2 and channels == 1 and taps <= 32:
        return Tile(256, _power(columns, 16, 64), 32, 4, 3)
    if bytes_each == 2 and 16 <= channels < 32 and not run:
        return Tile(128, _power(columns, 16, 64), 32, 4, 1)
    if bytes_each == 4 and channels < 32:
        if channels * taps <= 32 or columns <= 16:
            return Tile(128 if channels == 1 else 256, _power(columns, 16, 64), 32, 4, 2)
        return Tile(256, _power(columns, 32, 64), 16, 8, 3)
    if bytes_each == 4:
        return Tile(128, _power(columns, 16, 64), 32, 4, 3)
    if channels < 16:
        return Tile(128, _power(columns, 16, 64), 32, 4, 3)
    return Tile(64, _power(columns, 16, 128), _power(channels, 16, 64), 4, 3)


def _gradient_tile(out: int, channels: int, run: int, bytes_each: int) -> Tile:
    bm = _power(out, 16, 128)
    if channels < 32 and 16 < run <= 64:
        return Tile(min(bm, 64), _power(run, 32, 64), *((64, 2, 3) if bytes_each == 2 else (32, 4, 3)))
    if bytes_each == 2 and channels == 1:
        return Tile(min(bm, 64), 32, 128, 2, 3)
    if channels % 64 == 0:
        return Tile(bm, 64, 64, 4, 3) if bytes_each == 2 else Tile(min(bm, 64), 64, 32, 4, 3)
    if bytes_each == 2 or channels == 1:
        return Tile(min(bm, 64), 32, 128, 4, 2)
    return Tile(min(bm, 64), 32, 64, 2, 3)
