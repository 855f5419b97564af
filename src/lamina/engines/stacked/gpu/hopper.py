"""Convolve on NVIDIA's Hopper chips: a copy engine fetches a tile of pixels by its coordinates.

`convolution.py` computes the address of every pixel it reads; here one instruction asks for a box of the image,
shifted by a tap of the kernel, and pixels outside the image (or beyond the client's last sample) arrive as zeros. The
products read the boxes from shared memory as they come. Stride 1 or 2, channels in multiples of 8; bfloat16. Written in
Gluon, Triton's lower level, because plain Triton stages such boxes through registers and, up to 3.6, overwrites them
while a product still reads them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lamina.engines.stacked.gpu import halo
from lamina.engines.stacked.gpu.boxes import by_client, count_boxes, descriptor, every_second
from lamina.engines.stacked.gpu.convolution import Pair, Tile, empty_images, out_size
from lamina.engines.stacked.gpu.launch import launch


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    step, steps, x, odd_column, odd_row, odd_both, w, pixels, weights, ready, client, sample, top, left, column0,
    KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, STRIDE: gl.constexpr,
    TAP: gl.constexpr, TAP_ROW: gl.constexpr, TAP_COLUMN: gl.constexpr,
    CHUNKS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Start the loads of one step: a box of pixels and the weights that go with it."""
    channel = step % CHUNKS * BK
    stage = step % STAGES
    barrier = ready.index(stage)
    wanted = step < steps
    row = step // CHUNKS // KW
    column = step // CHUNKS % KW
    tap = TAP + row * TAP_ROW + column * TAP_COLUMN
    mbarrier.expect(barrier, x.block_type.nbytes + w.block_type.nbytes, pred=wanted)
    box = pixels.index(stage)
    if BACK:
        place = [client, sample, top + PAD_H - row, left + PAD_W - column, channel]
        tma.async_copy_global_to_shared(x, place, barrier, box, pred=wanted)
        which = [client, channel, tap, column0]
    else:
        _fetch_pixels(x, odd_column, odd_row, odd_both, barrier, box, wanted, client, sample, top, left,
                      row - PAD_H, column - PAD_W, channel, STRIDE)  # fmt: skip
        which = [client, column0, tap, channel]
    tma.async_copy_global_to_shared(w, which, barrier, weights.index(stage), pred=wanted)


@gluon.jit
def _fetch_pixels(  # type: ignore[no-untyped-def]
    x, odd_column, odd_row, odd_both, barrier, box, wanted, client, sample, top, left, down, right, channel,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """Start to load what a tap, `down` and `right` of the first one, meets. Stride 2: one of four images has it."""
    if STRIDE == 1:
        place = [client, sample, top + down, left + right, channel]
        tma.async_copy_global_to_shared(x, place, barrier, box, pred=wanted)
    else:
        place = [client, sample, top + (down >> 1), left + (right >> 1), channel]
        even_row = (down & 1) == 0
        even_column = (right & 1) == 0
        tma.async_copy_global_to_shared(x, place, barrier, box, pred=wanted & even_row & even_column)
        tma.async_copy_global_to_shared(odd_column, place, barrier, box, pred=wanted & even_row & (right & 1 == 1))
        tma.async_copy_global_to_shared(odd_row, place, barrier, box, pred=wanted & (down & 1 == 1) & even_column)
        both = wanted & (down & 1 == 1) & (right & 1 == 1)
        tma.async_copy_global_to_shared(odd_both, place, barrier, box, pred=both)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    x, odd_column, odd_row, odd_both, w, y, bias, bias_client, steps, height, width,
    DEPTH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, STRIDE: gl.constexpr,
    TAP: gl.constexpr, TAP_ROW: gl.constexpr, TAP_COLUMN: gl.constexpr, COLUMNS: gl.constexpr,
    NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr, BIASED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute y[pixel, n] = bias[n] + the sum over taps and channels of x[shifted pixel, channel] w[n, tap, channel].

    BACK: the gradient of the input: the shift is the other way round, and w is read as [channel, tap, n]. The taps of
    w from TAP on, so many rows and columns apart, make the kernel. With stride 2, x and the three images after it are
    every second row and column of the input.
    """
    BM: gl.constexpr = NB * BH * BW
    TILES: gl.constexpr = (COLUMNS + BN - 1) // BN
    CHUNKS: gl.constexpr = (DEPTH + BK - 1) // BK  # of channels, per tap
    client = gl.program_id(1)
    tile = gl.program_id(0)
    column0 = tile % TILES * BN
    tile = tile // TILES
    across = gl.cdiv(width, BW)
    down = gl.cdiv(height, BH)
    left = tile % across * BW
    top = tile // across % down * BH
    sample = tile // (across * down) * NB

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    pixels = gl.allocate_shared_memory(x.dtype, [STAGES, 1, NB, BH, BW, BK], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_type.shape, w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()

    for i in gl.static_range(STAGES - 1):
        _fetch(i, steps, x, odd_column, odd_row, odd_both, w, pixels, weights, ready, client, sample, top, left,
               column0, KW, PAD_H, PAD_W, STRIDE, TAP, TAP_ROW, TAP_COLUMN, CHUNKS, BK, STAGES, BACK)  # fmt: skip
    sums = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        a = pixels.index(stage).reshape([BM, BK])
        if BACK:
            b = weights.index(stage).reshape([BK, BN])
        else:
            b = weights.index(stage).reshape([BN, BK]).permute([1, 0])
        sums = warpgroup_mma(a, b, sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))  # the step before has read its buffers
        _fetch(step + STAGES - 1, steps, x, odd_column, odd_row, odd_both, w, pixels, weights, ready, client, sample,
               top, left, column0, KW, PAD_H, PAD_W, STRIDE, TAP, TAP_ROW, TAP_COLUMN,
               CHUNKS, BK, STAGES, BACK)  # fmt: skip
    total = warpgroup_mma_wait(0, deps=[sums])
    if BIASED:
        column = column0 + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        shift = gl.load(bias + client.to(gl.int64) * bias_client + column, mask=column < COLUMNS, other=0.0)
        total += gl.expand_dims(shift.to(gl.float32), 0)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))
    out = gl.allocate_shared_memory(y.dtype, [1, NB, BH, BW, BN], y.layout)
    out.reshape([BM, BN]).store(total.to(y.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [client, sample, top, left, column0], out)
    tma.store_wait(0)


@gluon.jit
def _fetch_pair(  # type: ignore[no-untyped-def]
    box, boxes, g, x, odd_column, odd_row, odd_both, gradients, pixels, ready, client, across, down, shift_h, shift_w,
    out0, channel0, stage, STRIDE: gl.constexpr, NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """Start the loads of one box of output pixels, and of the input pixels one tap away from them."""
    left = box % across * BW
    top = box // across % down * BH
    sample = box // (across * down) * NB
    barrier = ready.index(stage)
    wanted = box < boxes
    mbarrier.expect(barrier, g.block_type.nbytes + x.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(g, [client, sample, top, left, out0], barrier, gradients.index(stage), pred=wanted)
    _fetch_pixels(x, odd_column, odd_row, odd_both, barrier, pixels.index(stage), wanted, client, sample, top, left,
                  shift_h, shift_w, channel0, STRIDE)  # fmt: skip


@gluon.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    g, x, odd_column, odd_row, odd_both, dw, boxes, per_part, height, width,
    IN: gl.constexpr, OUT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr,
    STRIDE: gl.constexpr, NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute dw[o, tap, channel] = sum of g[pixel, o] x[pixel shifted by the tap, channel] over some pixels."""
    PIXELS: gl.constexpr = NB * BH * BW
    CHUNKS: gl.constexpr = (IN + BN - 1) // BN
    client = gl.program_id(1)
    part = gl.program_id(2)
    tile = gl.program_id(0)
    channel0 = tile % CHUNKS * BN
    tap = tile // CHUNKS % (KH * KW)
    out0 = tile // (CHUNKS * KH * KW) * BM
    shift_h = tap // KW - PAD_H
    shift_w = tap % KW - PAD_W
    across = gl.cdiv(width, BW)
    down = gl.cdiv(height, BH)
    first = part * per_part
    last = gl.minimum(first + per_part, boxes)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    gradients = gl.allocate_shared_memory(g.dtype, [STAGES, 1, NB, BH, BW, BM], g.layout)
    pixels = gl.allocate_shared_memory(x.dtype, [STAGES, 1, NB, BH, BW, BN], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES - 1):
        _fetch_pair(first + i, last, g, x, odd_column, odd_row, odd_both, gradients, pixels, ready, client, across,
                    down, shift_h, shift_w, out0, channel0, i, STRIDE, NB, BH, BW)  # fmt: skip
    sums = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    for step in range(last - first):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        a = gradients.index(stage).reshape([PIXELS, BM]).permute([1, 0])
        b = pixels.index(stage).reshape([PIXELS, BN])
        sums = warpgroup_mma(a, b, sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        later = step + STAGES - 1
        _fetch_pair(first + later, last, g, x, odd_column, odd_row, odd_both, gradients, pixels, ready, client, across,
                    down, shift_h, shift_w, out0, channel0, later % STAGES, STRIDE, NB, BH, BW)  # fmt: skip
    total = warpgroup_mma_wait(0, deps=[sums])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))
    out = gl.allocate_shared_memory(dw.dtype, [1, 1, BM, 1, BN], dw.layout)
    out.reshape([BM, BN]).store(total.to(dw.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dw, [part, client, out0, tap, channel0], out)
    tma.store_wait(0)


def forward(x: Tensor, w: Tensor, padding: Pair, stride: int = 1, bias: Tensor | None = None) -> Tensor:
    """Convolve x [C * B, in, H, W] with w [C, out, in, kh, kw], both bfloat16 with the channels last.

    The stride is 1 or 2 both ways.
    """
    kernel = w.shape[3:]
    height, width = (out_size(x.shape[2 + i], kernel[i], stride, padding[i]) for i in (0, 1))
    y = empty_images(x, x.shape[0], w.shape[1], height, width)
    if stride == 1 and halo.suits_product((height, width), (kernel[0], kernel[1]), w.shape[1], w.shape[2]):
        halo.multiply(x, w, y, padding, False, bias)
    else:
        _multiply(x, w, y, Taps(0, 1, *kernel), padding, stride=stride, bias=bias)
    return y


def input_gradient(g: Tensor, w: Tensor, size: Pair, padding: Pair, stride: int = 1) -> Tensor:
    """Return the gradient of the input [C * B, in, H, W] from that of the output."""
    kernel = w.shape[3], w.shape[4]
    dx = empty_images(g, g.shape[0], w.shape[2], *size)
    if stride == 1 and halo.suits_product(size, kernel, w.shape[2], w.shape[1]):
        halo.multiply(g, w, dx, padding, True)
        return dx
    if min(kernel) < stride:
        dx.zero_()  # no tap meets some pixels
    # a pixel is used only by the taps of its own residue, which are a kernel of stride 1
    for row, column in itertools.product(range(stride), repeat=2):
        first = (row + padding[0]) % stride, (column + padding[1]) % stride
        taps = Taps(first[0] * kernel[1] + first[1], stride, *(-(-(kernel[i] - first[i]) // stride) for i in (0, 1)))
        some = dx[:, :, row::stride, column::stride]
        if taps.rows > 0 and taps.columns > 0 and some.numel():
            shift = (row + padding[0]) // stride, (column + padding[1]) // stride
            _multiply(g, w, some, taps, shift, back=True)
    return dx


class Taps(NamedTuple):
    """Some taps of a kernel: from the first one on, in rows and columns that are so many apart."""

    first: int
    apart: int
    rows: int
    columns: int


def _multiply(
    x: Tensor, w: Tensor, y: Tensor, taps: Taps, padding: Pair, *, stride: int = 1, back: bool = False,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the convolution of x with some taps of w into y, or (back) the gradient of its input."""
    clients, out, inp, kh, kw = w.shape
    (depth, columns), size = (out, inp) if back else (inp, out), (y.shape[2], y.shape[3])
    tile = _product_tile(y.shape[0] * size[0] * size[1], columns, depth)
    box = _box(size, tile.rows)
    bn, bk = tile.columns, tile.depth
    y5 = by_client(y, clients)
    kernels = w.permute(0, 1, 3, 4, 2).reshape(clients, out, kh * kw, inp)
    grid = (count_boxes(y5, box) * triton.cdiv(columns, bn), clients)
    launch(
        _product, grid, *_images(x, clients, stride, (1, *box, bk)),
        descriptor(kernels, (1, bk, 1, bn) if back else (1, bn, 1, bk)),
        descriptor(y5, (1, *box, bn)),
        y if bias is None else bias, 0 if bias is None else bias.stride(0),
        taps.rows * taps.columns * triton.cdiv(depth, bk), *size,
        depth, taps.columns, *padding, stride, taps.first, taps.apart * kw, taps.apart, columns, *box, bn, bk,
        tile.stages, back, bias is not None, num_warps=tile.warps,
    )  # fmt: skip


def _images(x: Tensor, clients: int, stride: int, box: tuple[int, ...]) -> list[TensorDescriptor]:
    """Describe the images that a convolution reads: all pixels or, with stride 2, every second one."""
    images = [x] * 4 if stride == 1 else every_second(x)
    return [descriptor(by_client(each, clients), box) for each in images]


def weight_gradient(
    g: Tensor, x: Tensor, clients: int, kernel: Pair, padding: Pair, stride: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the gradient of the weights [C, out, in, kh, kw], channels last in memory; sums are float32."""
    out, inp, (kh, kw) = g.shape[1], x.shape[1], kernel
    if stride == 1 and halo.suits_gradient((g.shape[2], g.shape[3]), kernel, out, inp):
        return halo.weight_gradient(g, x, clients, padding, dtype)
    tile = _gradient_tile(out, inp)
    g5 = by_client(g, clients)
    box = _box((g.shape[2], g.shape[3]), tile.depth)
    boxes = count_boxes(g5, box)
    tiles = triton.cdiv(out, tile.rows) * kh * kw * triton.cdiv(inp, tile.columns)
    parts = max(1, min(PROGRAMS // (tiles * clients), boxes // BOXES_PER_PART))
    per_part = triton.cdiv(boxes, parts)
    parts = triton.cdiv(boxes, per_part)  # none is empty
    summed = dtype if parts == 1 else torch.float32  # parts are added up before they are rounded
    dw = torch.empty(parts, clients, out, kh * kw, inp, dtype=summed, device=g.device)
    launch(
        _weight_gradient, (tiles, clients, parts),
        descriptor(g5, (1, *box, tile.rows)),
        *_images(x, clients, stride, (1, *box, tile.columns)),
        descriptor(dw, (1, 1, tile.rows, 1, tile.columns)),
        boxes, per_part, g.shape[2], g.shape[3],
        inp, out, kh, kw, *padding, stride, *box, tile.rows, tile.columns, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    total = dw[0] if parts == 1 else dw.sum(0)
    return total.to(dtype).reshape(clients, out, kh, kw, inp).permute(0, 1, 4, 2, 3)


PROGRAMS = 720  # five for each of 132 processors; a weight gradient is cut into parts to have as many
BOXES_PER_PART = 50  # at least: every part is written down and added up
FEW_PROGRAMS = 200


def _box(size: Pair, pixels: int) -> tuple[int, int, int]:
    """Return the samples, rows and columns of a box of pixels: as wide as the image first, then as high, then deep."""
    width = min(triton.next_power_of_2(size[1]), pixels)
    height = min(triton.next_power_of_2(size[0]), pixels // width)
    return pixels // (width * height), height, width


def _product_tile(rows: int, columns: int, depth: int) -> Tile:
    """Return the fastest tile of a sweep over the layers of ResNet-18 and a small network on an H200."""
    bk = 64 if depth > 32 else 32
    if columns <= 32:
        return Tile(256, 32, bk, 4, 3)
    if columns <= 128:
        return Tile(128, 64 if columns <= 64 else 128, bk, 4, 3)
    enough = rows // 128 * triton.cdiv(columns, 256) >= FEW_PROGRAMS
    return Tile(128, 256, bk, 8, 3) if enough else Tile(64, 256, bk, 4, 4)


def _gradient_tile(out: int, channels: int) -> Tile:
    if channels <= 32:
        return Tile(64, 32, 64, 4, 4)
    if out <= 64:
        return Tile(64, 64, 128, 4, 3)
    return Tile(128, 64 if channels <= 64 else 128, 64, 4, 3)
