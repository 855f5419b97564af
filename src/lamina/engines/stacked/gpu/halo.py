"""Convolve few channels with 3x3 kernels on NVIDIA's Hopper chips: pixels are fetched once for three taps.

`hopper.py` fetches a box of pixels for each of the nine taps. With at most 64 channels, a box is multiplied with so few
weights that the tensor cores wait for the cache. So here a box comes with two more rows (its *halo*), and the three
taps of a column of the kernel read it one row apart. It is fetched three times, once for each column, because tensor
cores read only whole groups of pixels. The forward pass and the input's gradient keep all weights of a client in shared
memory while a program works on many boxes.
"""

from __future__ import annotations

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

from lamina.engines.stacked.gpu.boxes import by_client, count_boxes, descriptor
from lamina.engines.stacked.gpu.convolution import Pair
from lamina.engines.stacked.gpu.launch import launch

KERNEL_SIDE = 3
HALO = gl.constexpr(KERNEL_SIDE - 1)  # rows of pixels beyond a box
MOST_CHANNELS = 64


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    step, first, apart, tiles, x, halo, pixels, ready, client, across, down,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Start the loads of one step: a box of pixels for one column of the kernel, and its halo."""
    tile = first + step // 3 * apart
    column = step % 3
    left = tile % across * BW
    top = tile // across % down * BH
    sample = tile // (across * down)
    row0 = top + PAD_H - HALO if BACK else top - PAD_H
    column0 = left + PAD_W - column if BACK else left - PAD_W + column
    stage = step % STAGES
    place = stage * (BH + HALO)
    inner = pixels.index(place)._reinterpret(x.dtype, x.block_type.shape, x.layout)
    rest = pixels.index(place + BH)._reinterpret(x.dtype, halo.block_type.shape, halo.layout)
    barrier = ready.index(stage)
    wanted = tile < tiles
    mbarrier.expect(barrier, x.block_type.nbytes + halo.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(x, [client, sample, row0, column0, 0], barrier, inner, pred=wanted)
    tma.async_copy_global_to_shared(halo, [client, sample, row0 + BH, column0, 0], barrier, rest, pred=wanted)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    x, halo, w, y, bias, bias_client, tiles, height, width,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, COLUMNS: gl.constexpr,
    BH: gl.constexpr, BW: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr, BIASED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute y[pixel, n] = bias[n] + the sum over taps and channels of x[shifted pixel, channel] w[n, tap, channel].

    BACK: the gradient of the input: the shift is the other way round, and w is read as [channel, tap, n]. A program
    works on every `num_programs`-th box of a client.
    """
    BM: gl.constexpr = BH * BW
    client = gl.program_id(1)
    first = gl.program_id(0)
    apart = gl.num_programs(0)
    across = gl.cdiv(width, BW)
    down = gl.cdiv(height, BH)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(x.layout.swizzle_byte_width, 16, 2)
    # row by row, so that a product may begin at any of the first three rows
    pixels = gl.allocate_shared_memory(x.dtype, [STAGES * (BH + HALO), 1, 1, 1, BW, BK], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [9] + w.block_type.shape, w.layout)
    out = gl.allocate_shared_memory(y.dtype, [1, 1, BH, BW, BN], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(STAGES), 9 * w.block_type.nbytes)
    for tap in gl.static_range(9):
        tma.async_copy_global_to_shared(w, [client, 0, tap, 0], ready.index(STAGES), weights.index(tap))
    for i in gl.static_range(STAGES - 1):
        _fetch(i, first, apart, tiles, x, halo, pixels, ready, client, across, down,
               PAD_H, PAD_W, BH, BW, STAGES, BACK)  # fmt: skip
    mbarrier.wait(ready.index(STAGES), 0)
    for i in range(gl.cdiv(tiles - first, apart)):
        sums = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
        for column in gl.static_range(3):
            step = i * 3 + column
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            for row in gl.static_range(3):
                below = 2 - row if BACK else row
                shifted = pixels.index(stage * (BH + HALO) + below).reshape([BW, BK])
                a = shifted._reinterpret(x.dtype, [BM, BK], flat)
                if BACK:
                    b = weights.index(row * 3 + column).reshape([BK, BN])
                else:
                    b = weights.index(row * 3 + column).reshape([BN, BK]).permute([1, 0])
                sums = warpgroup_mma(a, b, sums, is_async=True)
            sums = warpgroup_mma_init(warpgroup_mma_wait(3, deps=[sums]))  # the step before has read its buffers
            _fetch(step + STAGES - 1, first, apart, tiles, x, halo, pixels, ready, client, across, down,
                   PAD_H, PAD_W, BH, BW, STAGES, BACK)  # fmt: skip
        total = warpgroup_mma_wait(0, deps=[sums])
        if BIASED:
            n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            shift = gl.load(bias + client.to(gl.int64) * bias_client + n, mask=n < COLUMNS, other=0.0)
            total += gl.expand_dims(shift.to(gl.float32), 0)
        tile = first + i * apart
        tma.store_wait(0)  # the box before has left
        out.reshape([BM, BN]).store(total.to(y.dtype))
        fence_async_shared()
        place = [client, tile // (across * down), tile // across % down * BH, tile % across * BW, 0]
        tma.async_copy_shared_to_global(y, place, out)
    tma.store_wait(0)
    pixels._keep_alive()
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))


@gluon.jit
def _fetch_pair(  # type: ignore[no-untyped-def]
    box, last, g, x, halo, gradients, pixels, ready, client, across, down, shift_w, out0, channel0, stage,
    PAD_H: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """Start the loads of one box of output pixels, and of the input pixels one column of the kernel away, with halo."""
    left = box % across * BW
    top = box // across % down * BH
    sample = box // (across * down)
    place = stage * (BH + HALO)
    inner = pixels.index(place)._reinterpret(x.dtype, x.block_type.shape, x.layout)
    rest = pixels.index(place + BH)._reinterpret(x.dtype, halo.block_type.shape, halo.layout)
    row0 = top - PAD_H
    column0 = left + shift_w
    barrier = ready.index(stage)
    wanted = box < last
    mbarrier.expect(barrier, g.block_type.nbytes + x.block_type.nbytes + halo.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(g, [client, sample, top, left, out0], barrier, gradients.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(x, [client, sample, row0, column0, channel0], barrier, inner, pred=wanted)
    tma.async_copy_global_to_shared(halo, [client, sample, row0 + BH, column0, channel0], barrier, rest, pred=wanted)


@gluon.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    g, x, halo, dw, boxes, per_part, height, width,
    IN: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr,
    BH: gl.constexpr, BW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute dw[o, tap, channel] = sum of g[pixel, o] x[pixel shifted by the tap, channel] over some pixels.

    A program computes the three taps of one column of the kernel.
    """
    PIXELS: gl.constexpr = BH * BW
    ROWS: gl.constexpr = BH + HALO
    CHUNKS: gl.constexpr = (IN + BN - 1) // BN
    client = gl.program_id(1)
    part = gl.program_id(2)
    tile = gl.program_id(0)
    channel0 = tile % CHUNKS * BN
    column = tile // CHUNKS % 3
    out0 = tile // (CHUNKS * 3) * BM
    shift_w = column - PAD_W
    across = gl.cdiv(width, BW)
    down = gl.cdiv(height, BH)
    first = part * per_part
    last = gl.minimum(first + per_part, boxes)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(x.layout.swizzle_byte_width, 16, 2)
    gradients = gl.allocate_shared_memory(g.dtype, [STAGES, 1, 1, BH, BW, BM], g.layout)
    pixels = gl.allocate_shared_memory(x.dtype, [STAGES * ROWS, 1, 1, 1, BW, BN], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES - 1):
        _fetch_pair(first + i, last, g, x, halo, gradients, pixels, ready, client, across, down, shift_w,
                    out0, channel0, i, PAD_H, BH, BW)  # fmt: skip
    top = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    middle = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    bottom = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    for step in range(last - first):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        a = gradients.index(stage).reshape([PIXELS, BM]).permute([1, 0])
        b0 = pixels.index(stage * ROWS).reshape([BW, BN])._reinterpret(x.dtype, [PIXELS, BN], flat)
        b1 = pixels.index(stage * ROWS + 1).reshape([BW, BN])._reinterpret(x.dtype, [PIXELS, BN], flat)
        b2 = pixels.index(stage * ROWS + 2).reshape([BW, BN])._reinterpret(x.dtype, [PIXELS, BN], flat)
        top = warpgroup_mma(a, b0, top, is_async=True)
        middle = warpgroup_mma(a, b1, middle, is_async=True)
        bottom = warpgroup_mma(a, b2, bottom, is_async=True)
        top, middle, bottom = warpgroup_mma_wait(3, deps=[top, middle, bottom])
        top = warpgroup_mma_init(top)
        middle = warpgroup_mma_init(middle)
        bottom = warpgroup_mma_init(bottom)
        later = step + STAGES - 1
        _fetch_pair(first + later, last, g, x, halo, gradients, pixels, ready, client, across, down, shift_w,
                    out0, channel0, later % STAGES, PAD_H, BH, BW)  # fmt: skip
    top, middle, bottom = warpgroup_mma_wait(0, deps=[top, middle, bottom])
    pixels._keep_alive()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))
    out = gl.allocate_shared_memory(dw.dtype, [3, 1, 1, BM, 1, BN], dw.layout)
    out.index(0).reshape([BM, BN]).store(top.to(dw.dtype))
    out.index(1).reshape([BM, BN]).store(middle.to(dw.dtype))
    out.index(2).reshape([BM, BN]).store(bottom.to(dw.dtype))
    fence_async_shared()
    for row in gl.static_range(3):
        tma.async_copy_shared_to_global(dw, [part, client, out0, row * 3 + column, channel0], out.index(row))
    tma.store_wait(0)


PROCESSORS = 132  # of a large Hopper
STAGES = 3
FEW_SLOTS = 4  # for a client's programs; with fewer, each slot runs this many programs, one after another
GROUP_PIXELS = 8  # tensor cores read shared memory from a multiple of it on
BOXES_PER_PART = 8  # at least: every part is written down and added up


def suits_product(size: Pair, kernel: Pair, columns: int, depth: int) -> bool:
    """Return whether `multiply` is made for these numbers of channels, and for images of this size."""
    is_narrow = kernel == (KERNEL_SIDE, KERNEL_SIDE) and max(columns, depth) <= MOST_CHANNELS
    return is_narrow and _fits(_product_box(size, columns, depth), size)


def suits_gradient(size: Pair, kernel: Pair, out: int, channels: int) -> bool:
    """Return whether `weight_gradient` is made for these numbers of channels, and for images of this size."""
    is_narrow = kernel == (KERNEL_SIDE, KERNEL_SIDE) and max(out, channels) <= MOST_CHANNELS
    return is_narrow and _fits(_gradient_box(size), size)


def multiply(x: Tensor, w: Tensor, y: Tensor, padding: Pair, back: bool, bias: Tensor | None = None) -> None:
    """Write the convolution of x with w into y, or (back) the gradient of its input."""
    clients, out, inp = w.shape[:3]
    (depth, columns), size = (out, inp) if back else (inp, out), (y.shape[2], y.shape[3])
    height, width = _product_box(size, columns, depth)
    bn, bk = _channels(columns), _channels(depth)
    is_small = _is_small(columns, depth)
    x5, y5 = by_client(x, clients), by_client(y, clients)
    kernels = w.permute(0, 1, 3, 4, 2).reshape(clients, out, KERNEL_SIDE * KERNEL_SIDE, inp)
    tiles = count_boxes(y5, (1, height, width))
    launch(
        _product, (_programs(tiles, clients, 2 * PROCESSORS if is_small else PROCESSORS), clients),
        descriptor(x5, (1, 1, height, width, bk)),
        descriptor(x5, (1, 1, KERNEL_SIDE - 1, width, bk)),
        descriptor(kernels, (1, bk, 1, bn) if back else (1, bn, 1, bk)),
        descriptor(y5, (1, 1, height, width, bn)),
        y if bias is None else bias, 0 if bias is None else bias.stride(0),
        tiles, *size, *padding, columns, height, width, bn, bk, STAGES, back, bias is not None,
        num_warps=4 if is_small else 8,
    )  # fmt: skip


def weight_gradient(g: Tensor, x: Tensor, clients: int, padding: Pair, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the gradient of the weights [C, out, in, 3, 3], channels last in memory; sums are float32."""
    out, inp = g.shape[1], x.shape[1]
    bm, bn = MOST_CHANNELS, _channels(inp)
    g5, x5 = by_client(g, clients), by_client(x, clients)
    height, width = _gradient_box((g.shape[2], g.shape[3]))
    boxes = count_boxes(g5, (1, height, width))
    tiles = triton.cdiv(out, bm) * KERNEL_SIDE * triton.cdiv(inp, bn)
    # three programs fit a processor
    parts = max(1, min(3 * PROCESSORS // (tiles * clients), boxes // BOXES_PER_PART))
    per_part = triton.cdiv(boxes, parts)
    parts = triton.cdiv(boxes, per_part)  # none is empty
    summed = dtype if parts == 1 else torch.float32  # parts are added up before they are rounded
    dw = torch.empty(parts, clients, out, KERNEL_SIDE * KERNEL_SIDE, inp, dtype=summed, device=g.device)
    launch(
        _weight_gradient, (tiles, clients, parts),
        descriptor(g5, (1, 1, height, width, bm)),
        descriptor(x5, (1, 1, height, width, bn)),
        descriptor(x5, (1, 1, KERNEL_SIDE - 1, width, bn)),
        descriptor(dw, (1, 1, bm, 1, bn)),
        boxes, per_part, g.shape[2], g.shape[3], inp, *padding, height, width, bm, bn, STAGES, num_warps=4,
    )  # fmt: skip
    total = dw[0] if parts == 1 else dw.sum(0)
    return total.to(dtype).reshape(clients, out, KERNEL_SIDE, KERNEL_SIDE, inp).permute(0, 1, 4, 2, 3)


def _channels(count: int) -> int:
    """Return how many channels a box has that holds `count`."""
    return 32 if count <= 32 else 64


def _is_small(columns: int, depth: int) -> bool:
    """Return whether the weights of two programs fit the shared memory of a processor."""
    return _channels(columns) * _channels(depth) < MOST_CHANNELS**2


def _product_box(size: Pair, columns: int, depth: int) -> Pair:
    """Return the height and width of a product's boxes, from a sweep on an H200."""
    return _box(size, 128 if _is_small(columns, depth) else 256, 32)


def _gradient_box(size: Pair) -> Pair:
    """Return the height and width of a weight gradient's boxes, from the same sweep."""
    return _box(size, 64, 16)


def _box(size: Pair, pixels: int, widest: int) -> Pair:
    """Return the height and width of a box of pixels."""
    width = min(triton.next_power_of_2(size[1]), widest)
    return pixels // width, width


def _fits(box: Pair, size: Pair) -> bool:
    """Return whether a box covers at most one image (rounded up), and its rows are whole groups of pixels."""
    height, width = box
    return height <= triton.next_power_of_2(size[0]) and width % GROUP_PIXELS == 0


def _programs(tiles: int, clients: int, slots: int) -> int:
    """Return how many programs share the boxes of a client, for all programs that run at the same time (`slots`).

    With few slots per client, rounding down would leave many of them idle, so each runs several programs in turn.
    """
    programs_per_slot = 1 if slots // clients >= FEW_SLOTS else FEW_SLOTS
    return max(1, min(tiles, programs_per_slot * slots // clients))
