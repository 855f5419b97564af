"""Decode picture files, and stack pictures into one uint8 array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, missing_extra

_GREY_MODES = ("1", "L", "LA")
_WIDE_MODES = ("I", "F")  # the beginnings of PIL's modes of 16 and 32 bits: I, I;16, I;16B, F


def stack_pictures(
    pictures: Iterable[Any], count: int, name: Callable[[int], str], colour: bool = False
) -> NDArray[np.uint8]:
    """Return PIL images of one size as [count, channels, height, width]: grey if all of them are, else RGB.

    `colour` asks for RGB in any case; without it, `pictures` must be a collection, because it is read again if a colour
    picture follows grey ones. `name` returns what messages call a picture, from its place.
    """
    mode, channels = ("RGB", 3) if colour else ("L", 1)
    stacked = np.empty((0, channels, 0, 0), np.uint8)
    for index, picture in enumerate(pictures):
        if picture is None:
            raise BadInput(f"{name(index)} is missing; fill or drop it")
        if picture.mode.startswith(_WIDE_MODES):  # PIL would clip it to 255
            raise BadInput(
                f"{name(index)} has more than 8 bits per channel (mode {picture.mode}): convert it to 8 bits, or give "
                "the pixels as arrays of floats (in an experiment file: data.name = 'arrays')"
            )
        if not colour and picture.mode not in _GREY_MODES:
            return stack_pictures(pictures, count, name, colour=True)
        pixels = np.asarray(picture.convert(mode), dtype=np.uint8)
        if index == 0:
            # Allocated once: a list of 100,000 arrays and its stack would need the memory twice.
            stacked = np.empty((count, channels, *pixels.shape[:2]), np.uint8)
        if pixels.shape[:2] != stacked.shape[2:]:
            raise BadInput(
                f"{name(index)} is {pixels.shape[0]}x{pixels.shape[1]}, the first one {stacked.shape[2]}x"
                f"{stacked.shape[3]}: give all pictures one size; data.size = [height, width] resizes those of files"
            )
        stacked[index] = pixels.reshape(*stacked.shape[2:], channels).transpose(2, 0, 1)
    return stacked


class Pictures:
    """The decoded pictures of some files; iterating again decodes them again.

    Args:
        files: their paths.
        advice: what to do about a damaged file, for messages.
        size: height and width to resize all pictures to.
    """

    def __init__(self, files: Sequence[Path], advice: str, size: Sequence[int] | None = None) -> None:
        self.files, self.advice, self.size = files, advice, size

    def __iter__(self) -> Iterator[Any]:
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_extra("pillow", "images", "reading pictures") from error
        for file in self.files:
            try:
                with Image.open(file) as opened:
                    picture = opened.copy()
                    if picture.mode in ("P", "PA"):  # a palette of grey values is rare, and colour keeps all of them
                        picture = picture.convert("RGB")
                    if self.size is not None:
                        picture = picture.resize((self.size[1], self.size[0]))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise BadInput(f"{file} is not a readable picture ({error}): {self.advice}") from error
            yield picture
