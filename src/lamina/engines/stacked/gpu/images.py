"""Gather, crop, flip and normalise the images of a batch in one kernel, as `lamina.data.feed` does in about twenty."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.data.feed import WORD_BITS, Augment
from lamina.engines.stacked.gpu.launch import is_recording, launch

BLOCK = 1024  # numbers of an image that a program computes


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    images, index, keys, numbers, out, highest_key,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, FLIP: tl.constexpr,
    CROPS_SOME: tl.constexpr, FILLS_MEAN: tl.constexpr, NORMALISES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < CHANNELS * HEIGHT * WIDTH
    channel = place // (HEIGHT * WIDTH)
    row = place // WIDTH % HEIGHT
    column = place % WIDTH
    if PAD > 0 or FLIP:  # the digits of the image's random word, as in `feed.augment`
        key = tl.load(keys + n)
        OFFSETS: tl.constexpr = 2 * PAD + 1
        down = (key % OFFSETS).to(tl.int32) - PAD
        right = (key // OFFSETS % OFFSETS).to(tl.int32) - PAD
        if CROPS_SOME:
            is_cropped = key // (2 * OFFSETS * OFFSETS) < highest_key
            down = tl.where(is_cropped, down, 0)
            right = tl.where(is_cropped, right, 0)
        if FLIP:
            is_mirrored = key // (OFFSETS * OFFSETS) % 2 == 1
            column = tl.where(is_mirrored, WIDTH - 1 - column, column)
        row += down
        column += right
    inside = real & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    source = tl.load(index + n) * (CHANNELS * HEIGHT * WIDTH) + (channel * HEIGHT + row) * WIDTH + column
    value = tl.div_rn(tl.load(images + source, mask=inside, other=0).to(tl.float32), 255.0)
    if NORMALISES:
        mean = tl.load(numbers + channel, mask=real, other=0.0)
        std = tl.load(numbers + CHANNELS + channel, mask=real, other=1.0)
        value = tl.div_rn(value - mean, std)
    if FILLS_MEAN:
        value = tl.where(inside, value, 0.0)
    tl.store(out + n * (CHANNELS * HEIGHT * WIDTH) + place, value.to(out.dtype.element_ty), mask=real)


def prepare_images(
    images: Tensor, index: Tensor, keys: Tensor | None, augmentation: Augment | None,
    mean: tuple[float, ...] | None, std: tuple[float, ...] | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the images [N, channels, H, W] of uint8 with these indices [...] as model input [..., channels, H, W].

    See `lamina.data.feed.training_inputs`; `keys` [...] are the random words.
    """
    _, channels, height, width = images.shape
    make = torch.zeros if is_recording() else torch.empty  # a module may use pixels as indices
    out = make(*index.shape, channels, height, width, dtype=dtype, device=images.device)
    augmentation = Augment(pad=0, flip=False) if augmentation is None or keys is None else augmentation
    rest_count = 2**WORD_BITS // (2 * (2 * augmentation.pad + 1) ** 2)
    index = index.contiguous()
    launch(
        _prepare, (index.numel(), triton.cdiv(channels * height * width, BLOCK)),
        images, index, index if keys is None else keys.contiguous(), _numbers(mean, std, images.device), out,
        round(augmentation.crop_probability * rest_count),
        channels, height, width, augmentation.pad, augmentation.flip, augmentation.crop_probability < 1,
        augmentation.fill == "mean", mean is not None and std is not None, BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@functools.cache  # for good: captured steps read them
def _numbers(mean: tuple[float, ...] | None, std: tuple[float, ...] | None, device: torch.device) -> Tensor:
    """Return means and deviations on the device. They are sent once: a CUDA graph cannot capture the copy."""
    return torch.tensor([*(mean or (0.0,)), *(std or (1.0,))], dtype=torch.float32, device=device)
