"""Turn stored samples into model input: random crops and flips, and normalisation.

Pure tensor functions, the same on every device and in every engine, with any leading axes
(clients, experiments) and no host work, so that they compile and replay as part of a step. An augmentation of the
user's own is the exception: it is called for the batch of one client at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lamina.base.errors import BadInput, describe_error, takes, unknown
from lamina.base.limits import check_count, check_number
from lamina.base.registry import explain_options, import_named
from lamina.objective.batch import Inputs, map_batch, same_kind, tensors

MOST_PADDING = 1024  # pixels
WORD_BITS = 53  # of an image's random word; see `lamina.base.rng.bits`

Fill = Literal["black", "mean"]


def prepare(
    x: Inputs, mean: tuple[float, ...] | None, std: tuple[float, ...] | None, dtype: torch.dtype = torch.float32
) -> Any:
    """Return model input for stored samples [..., channels, height, width] (or any shape without mean and std).

    Of a tuple or a dict, every tensor is prepared.

    uint8 is read as intensity, because a `Dataset` keeps nothing but images in it: x / 255, then (x - mean) / std per
    channel, computed in float32 or better and rounded to `dtype` once. Floating-point features are only cast. Other
    integers become int64, as an embedding needs them. Booleans, such as masks, are untouched.
    """
    if not isinstance(x, Tensor):
        return map_batch(lambda values: prepare(values, mean, std, dtype), x)
    if x.is_floating_point():
        return x.to(dtype)
    if x.dtype == torch.bool:
        return x
    if x.dtype != torch.uint8:
        return x.to(torch.int64)
    scaled = x.to(torch.promote_types(dtype, torch.float32)) / 255
    if mean is not None and std is not None:
        scaled = (scaled - _per_channel(mean, scaled)) / _per_channel(std, scaled)
    return scaled.to(dtype)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    # Filled on the device: a CUDA graph cannot capture torch.tensor(values, device=...), which copies from the host.
    return torch.stack([like.new_full((1, 1), value) for value in values])


def augment(x: Tensor, keys: Tensor, pad: int, flip: bool, crop_probability: float = 1.0) -> Tensor:
    """Crop images at random after zero padding, with `crop_probability`, and flip half of them horizontally.

    Zeros are black pixels in raw images and the mean colour in normalised ones. The crop and flip of an image of
    `x` [..., n, channels, height, width] depend on its random word in `keys` [..., n] alone (see `rng.bits`).
    `pad` pixels are added on every side before a window of the original size is cut.
    """
    if x.dim() != keys.dim() + 3:
        raise BadInput(
            f"augmentation needs images [..., n, channels, height, width], one random word each; "
            f"found x {list(x.shape)} and keys {list(keys.shape)}: switch augmentation off for other data"
        )
    if pad == 0 and not flip:
        return x
    height, width = x.shape[-2:]
    offsets = 2 * pad + 1
    # Independent numbers out of one word: its digits in base `offsets`, then one more bit, then the rest.
    down = keys % offsets - pad
    right = keys // offsets % offsets - pad
    if crop_probability < 1:
        rest_count = 2**WORD_BITS // (2 * offsets**2)
        is_cropped = keys // (2 * offsets**2) < round(crop_probability * rest_count)
        down, right = torch.where(is_cropped, down, 0), torch.where(is_cropped, right, 0)
    rows = torch.arange(height, device=x.device) + down.unsqueeze(-1)
    columns = torch.arange(width, device=x.device)
    if flip:
        mirrored = (keys // offsets**2 % 2 == 1).unsqueeze(-1)
        columns = torch.where(mirrored, width - 1 - columns, columns)
    columns = columns + right.unsqueeze(-1)
    inside = _between(rows, height).unsqueeze(-1) & _between(columns, width).unsqueeze(-2)
    pixel = rows.clamp(0, height - 1).unsqueeze(-1) * width + columns.clamp(0, width - 1).unsqueeze(-2)
    # [..., n, H, W] -> one channel axis of stride 0, shared by all channels
    pixel = pixel.flatten(-2).unsqueeze(-2).expand(*x.shape[:-2], height * width)
    moved = x.flatten(-2).gather(-1, pixel).reshape(x.shape)
    return moved.masked_fill(~inside.unsqueeze(-3), 0)


def _between(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


@dataclass(frozen=True)
class Augment:
    """The random changes of training images."""

    pad: int = 4
    """Pixels that are added on every side before a random crop; 0 switches it off."""
    flip: bool = True
    """Mirror half of the images horizontally."""
    crop_probability: float = 1.0
    """The probability of a crop; it does not depend on the flip."""
    fill: Fill = "black"
    """The added pixels: black, or the mean colour, which is 0 after normalisation."""

    def __post_init__(self) -> None:
        check_count("augmentation: pad", self.pad, MOST_PADDING, least=0)
        if not isinstance(self.flip, bool):
            raise BadInput(f"augmentation: flip must be true or false, found {self.flip!r}")
        check_number("augmentation: crop_probability", self.crop_probability, above=0, most=1)
        if self.fill not in get_args(Fill):
            raise unknown("augmentation: fill", str(self.fill), get_args(Fill))

    def __call__(self, x: Inputs, keys: Tensor) -> Any:
        """Apply `augment` with these settings; in a tuple or dict, to images only. `training_inputs` applies `fill`."""
        if not isinstance(x, Tensor) and any(values.dim() == keys.dim() + 3 for values in tensors(x)):
            return map_batch(lambda values: self(values, keys) if values.dim() == keys.dim() + 3 else values, x)
        image = x if isinstance(x, Tensor) else tensors(x)[0]
        return augment(image, keys, self.pad, self.flip, self.crop_probability)


explain_options(Augment)


OwnAugmentation = Callable[[Any, torch.Generator], Any]
"""A function of (batch, generator) that returns the changed batch: one client's inputs of one step, normalised."""


def as_augmentation(given: Augment | OwnAugmentation | str | None) -> Augment | OwnAugmentation | None:
    """Return an augmentation given as an object or as "module:function"."""
    if not isinstance(given, str):
        return given
    function: OwnAugmentation = import_named("augmentation", given)
    if not callable(function):
        raise BadInput(f"augmentation = '{given}' is not a function of (batch, generator)")
    return function


def draw(function: OwnAugmentation, batch: Inputs, key: int) -> Inputs:
    """Return what a user's function makes of one client's batch; the random word `key` seeds its generator."""
    generator = torch.Generator(tensors(batch)[0].device).manual_seed(key)
    try:
        result: Inputs = function(batch, generator)
    except Exception as error:  # whatever a user's function raises
        advice = "" if takes(function, batch, generator) else "; define it as function(batch, generator)"
        raise BadInput(f"the augmentation fails: {describe_error(error)}{advice}") from error
    count = len(tensors(batch)[0])
    is_batch = type(result) is type(batch) and all(isinstance(values, Tensor) for values in tensors(result))
    if not is_batch or not same_kind(result, batch) or any(len(values) != count for values in tensors(result)):
        raise BadInput(
            "the augmentation must return what it is given, a batch with the same inputs, shapes and types: "
            f"{_kinds(batch)}, not {_kinds(result)}"
        )
    # a GPU would have to be waited for in every step: there, the loss shows it
    if generator.device.type == "cpu" and not all(bool(torch.isfinite(values).all()) for values in tensors(result)):
        raise BadInput("the augmentation returns values that are NaN or infinite, and the data hold none: correct it")
    return result


def _kinds(batch: Any) -> str:
    if not isinstance(batch, Tensor | tuple | dict):
        return f"a {type(batch).__name__}"
    kinds = map_batch(lambda v: f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else type(v).__name__, batch)
    return str(kinds).replace("'", "")


def _drawn(function: OwnAugmentation, x: Any, keys: Tensor, counts: Tensor | None) -> Any:
    """Return the batches of one client [n, ...] or of several [clients, n, ...] after a user's function."""
    if keys.dim() == 1:
        return draw(function, x, int(keys[0]))
    sizes = [keys.shape[1]] * len(keys) if counts is None else counts.tolist()
    for client, (size, key) in enumerate(zip(sizes, keys[:, 0].tolist(), strict=True)):
        if size:  # the function sees what it sees in the loop: no padding
            samples = map_batch(lambda values, client=client, size=size: values[client, :size].clone(), x)  # type: ignore[misc]
            for target, result in zip(tensors(x), tensors(draw(function, samples, key)), strict=True):
                target[client, :size] = result
    return x


def training_inputs(
    x: Inputs,
    keys: Tensor | None,
    augmentation: Augment | OwnAugmentation | None,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    dtype: torch.dtype = torch.float32,
    counts: Tensor | None = None,
) -> Any:
    """Return model input for stored samples of a training batch: `prepare` and, with random words, the augmentation.

    `counts` [clients] are the numbers of samples of several clients' batches, if some are padded.
    """
    if augmentation is None or keys is None:
        return prepare(x, mean, std, dtype)
    if not isinstance(augmentation, Augment):
        return _drawn(augmentation, prepare(x, mean, std, dtype), keys, counts)
    if augmentation.fill == "mean":  # zeros are the mean colour only after the normalisation
        return augmentation(prepare(x, mean, std, dtype), keys)
    return prepare(augmentation(x, keys), mean, std, dtype)
