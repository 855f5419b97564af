"""Convolve on NVIDIA's Hopper chips: a copy engine fetches a tile of pixels by its coordinates.

`convolution.py` computes the address of every pixel it reads; here one instruction asks for a box of the image,
shifted by a tap of the kernel, and pixels outside the image (or beyond the client's last sample) arrive as zeros. The
products read the boxes from shared memory as they come. Stride 1 and channels in multiples of 8; bfloat16. Written in
Gluon, Triton's lower level, because plain Triton stages such boxes through registers and, up to 3.6, overwrites them
while a product still reads them.
"""

from __future__ import annotations

import math

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

from lamina.engines.stacked.gpu.convolution import Pair, Tile
from lamina.engines.stacked.gpu.launch import launch


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    step, steps, x, w, pixels, weights, ready, client, sample, top, left, column0,
    KW: gl.constexpr, CHUNKS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Start the loads of one step: a box of pixels and the weights that go with it."""
    tap = step // CHUNKS
    channel = step % CHUNKS * BK
    stage = step % STAGES
    barrier = ready.index(stage)
    wanted = step < steps
    mbarrier.expect(barrier, x.block_type.nbytes + w.block_type.nbytes, pred=wanted)
    if BACK:
        place = [client, sample, top - tap // KW, left - tap % KW, channel]
        which = [client, channel, tap, column0]
    else:
        place = [client, sample, top + tap // KW, left + tap % KW, channel]
        which = [client, column0, tap, channel]
    tma.async_copy_global_to_shared(x, place, barrier, pixels.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(w, which, barrier, weights.index(stage), pred=wanted)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    x, w, y, bias, bias_client, steps, height, width,
    DEPTH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, COLUMNS: gl.constexpr,
    NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr, BIASED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute y[pixel, n] = bias[n] + the sum over taps and channels of x[shifted pixel, channel] w[n, tap, channel].

    BACK: the gradient of the input: the shift is the other way round, and w is read as [channel, tap, n].
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

    # the first tap of the kernel lies up and to the left of a pixel, or on the way back down and to the right
    first_row = top + PAD_H if BACK else top - PAD_H
    first_column = left + PAD_W if BACK else left - PAD_W
    for i in gl.static_range(STAGES - 1):
        _fetch(i, steps, x, w, pixels, weights, ready, client, sample, first_row, first_column, column0,
               KW, CHUNKS, BK, STAGES, BACK)  # fmt: skip
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
        _fetch(step + STAGES - 1, steps, x, w, pixels, weights, ready, client, sample, first_row, first_column, column0,
               KW, CHUNKS, BK, STAGES, BACK)  # fmt: skip
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
    box, boxes, g, x, gradients, pixels, ready, client, across, down, shift_h, shift_w, out0, channel0,
    stage, NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """Start the loads of one box of output pixels, and of the input pixels one tap away from them."""
    left = box % across * BW
    top = box // across % down * BH
    sample = box // (across * down) * NB
    barrier = ready.index(stage)
    wanted = box < boxes
    mbarrier.expect(barrier, g.block_type.nbytes + x.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(g, [client, sample, top, left, out0], barrier, gradients.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(
        x, [client, sample, top + shift_h, left + shift_w, channel0], barrier, pixels.index(stage), pred=wanted
    )


@gluon.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    g, x, dw, boxes, per_part, height, width,
    IN: gl.constexpr, OUT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr,
    NB: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
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
        _fetch_pair(first + i, last, g, x, gradients, pixels, ready, client, across, down, shift_h, shift_w,
                    out0, channel0, i, NB, BH, BW)  # fmt: skip
    sums = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
    for step in range(last - first):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        a = gradients.index(stage).reshape([PIXELS, BM]).permute([1, 0])
        b = pixels.index(stage).reshape([PIXELS, BN])
        sums = warpgroup_mma(a, b, sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        later = step + STAGES - 1
        _fetch_pair(first + later, last, g, x, gradients, pixels, ready, client, across, down, shift_h, shift_w,
                    out0, channel0, later % STAGES, NB, BH, BW)  # fmt: skip
    total = warpgroup_mma_wait(0, deps=[sums])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))
    out = gl.allocate_shared_memory(dw.dtype, [1, 1, BM, 1, BN], dw.layout)
    out.reshape([BM, BN]).store(total.to(dw.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dw, [part, client, out0, tap, channel0], out)
    tma.store_wait(0)


ALIGNED = 8  # channels: the copy engine wants strides of 16 bytes


def forward(x: Tensor, w: Tensor, padding: Pair, bias: Tensor | None = None) -> Tensor:
    """Convolve x [C * B, in, H, W] with w [C, out, in, kh, kw], both bfloat16 with the channels last."""
    kh, kw = w.shape[3:]
    size = x.shape[2] + 2 * padding[0] - kh + 1, x.shape[3] + 2 * padding[1] - kw + 1
    return _multiply(x, w, w.shape[1], size, padding, False, bias)


def input_gradient(g: Tensor, w: Tensor, size: Pair, padding: Pair) -> Tensor:
    """Return the gradient of the input [C * B, in, H, W] from that of the output."""
    return _multiply(g, w, w.shape[2], size, padding, True)


def _multiply(
    x: Tensor, w: Tensor, columns: int, size: Pair, padding: Pair, back: bool, bias: Tensor | None = None
) -> Tensor:
    clients, _, _, kh, kw = w.shape
    depth = x.shape[1]
    y = torch.empty(x.shape[0], columns, *size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    tile = _product_tile(x.shape[0] * size[0] * size[1], columns, depth)
    box = _box(size, tile.rows)
    bn, bk = tile.columns, tile.depth
    x5, y5 = _by_client(x, clients), _by_client(y, clients)
    kernels = w.permute(0, 1, 3, 4, 2).reshape(clients, w.shape[1], kh * kw, w.shape[2])
    grid = (_boxes(y5, box) * triton.cdiv(columns, bn), clients)
    launch(
        _product, grid,
        _descriptor(x5, (1, *box, bk)),
        _descriptor(kernels, (1, bk, 1, bn) if back else (1, bn, 1, bk)),
        _descriptor(y5, (1, *box, bn)),
        y if bias is None else bias, 0 if bias is None else bias.stride(0),
        kh * kw * triton.cdiv(depth, bk), *size,
        depth, kw, *padding, columns, *box, bn, bk, tile.stages, back, bias is not None, num_warps=tile.warps,
    )  # fmt: skip
    return y


def weight_gradient(
    g: Tensor, x: Tensor, clients: int, kernel: Pair, padding: Pair, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the gradient of the weights [C, out, in, kh, kw], channels last in memory; sums are float32."""
    out, inp, (kh, kw) = g.shape[1], x.shape[1], kernel
    tile = _gradient_tile(out, inp)
    g5, x5 = _by_client(g, clients), _by_client(x, clients)
    box = _box((g.shape[2], g.shape[3]), tile.depth)
    boxes = _boxes(g5, box)
    tiles = triton.cdiv(out, tile.rows) * kh * kw * triton.cdiv(inp, tile.columns)
    parts = max(1, min(PROGRAMS // (tiles * clients), boxes // BOXES_PER_PART))
    per_part = triton.cdiv(boxes, parts)
    parts = triton.cdiv(boxes, per_part)  # none is empty
    summed = dtype if parts == 1 else torch.float32  # parts are added up before they are rounded
    dw = torch.empty(parts, clients, out, kh * kw, inp, dtype=summed, device=g.device)
    launch(
        _weight_gradient, (tiles, clients, parts),
        _descriptor(g5, (1, *box, tile.rows)),
        _descriptor(x5, (1, *box, tile.columns)),
        _descriptor(dw, (1, 1, tile.rows, 1, tile.columns)),
        boxes, per_part, g.shape[2], g.shape[3],
        inp, out, kh, kw, *padding, *box, tile.rows, tile.columns, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    total = dw[0] if parts == 1 else dw.sum(0)
    return total.to(dtype).reshape(clients, out, kh, kw, inp).permute(0, 1, 4, 2, 3)


PROGRAMS = 720  # five for each of 132 processors; a weight gradient is cut into parts to have as many
BOXES_PER_PART = 50  # at least: every part is written down and added up
FEW_PROGRAMS = 200


def _by_client(x: Tensor, clients: int) -> Tensor:
    """Rearrange [C * B, channels, H, W] as contiguous [C, B, H, W, channels]."""
    pixels = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return pixels.reshape(clients, -1, *pixels.shape[1:])


def _box(size: Pair, pixels: int) -> tuple[int, int, int]:
    """Return the samples, rows and columns of a box of pixels: as wide as the image first, then as high, then deep."""
    width = min(triton.next_power_of_2(size[1]), pixels)
    height = min(triton.next_power_of_2(size[0]), pixels // width)
    return pixels // (width * height), height, width


def _boxes(x: Tensor, box: tuple[int, int, int]) -> int:
    return math.prod(triton.cdiv(n, b) for n, b in zip(x.shape[1:4], box, strict=True))


def _descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Describe a tensor to the copy engine; clients need not be adjacent if their starts are aligned."""
    apart = len(x) > 1 and x[0].is_contiguous() and x.stride(0) % ALIGNED == 0 and x.data_ptr() % 16 == 0
    x = x if apart else x.contiguous()
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(x.dim())]  # torch gives axes of length 1 any stride
    strides[0] = x.stride(0) if apart else strides[0]
    kind = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return TensorDescriptor(x, list(x.shape), strides, list(block), layout)


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
