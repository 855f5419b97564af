"""Read pictures of the user's own from one folder per class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamina.data.dataset import Splits
from lamina.data.files import own_path
from lamina.data.images import stack_pictures
from lamina.data.labels import held_out_rows, make_splits
from lamina.errors import BadInput, missing_extra
from lamina.paths import refuse_special

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def read(root: Path, *, path: str, test: str | float | None = None, size: list[int] | None = None) -> Splits:
    """Read pictures.

    Args:
        root: The folder that relative paths start at.
        path: The folder with one folder of pictures per class, or with such folders in ``train/`` and ``test/``.
        test: A folder with the test data, or the fraction of the pictures to hold out: 0.2 if there is no ``test/``.
        size: Height and width to resize all pictures to.
    """
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise BadInput(f"data.size = {size}: must be a height and a width in pixels, for example [32, 32]")
    folder = own_path(root, path)
    held_out = None
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        if test is not None:
            raise BadInput(f"'{folder}' holds train/ and test/: take data.test out, or set data.path to one of them")
        train, held_out = _listed(folder / "train"), _listed(folder / "test")
    else:
        train = _listed(folder)
        if isinstance(test, str):
            held_out = _listed(own_path(root, test))
    files = train + (held_out or [])
    if held_out is None:
        is_test = held_out_rows(str(folder), len(files), 0.2 if test is None else test)
    else:
        is_test = np.arange(len(files)) >= len(train)
    pictures = _Pictures([file for file, _ in files], size)
    x = stack_pictures(pictures, len(files), str(folder))
    return make_splits(str(folder), x, [name for _, name in files], is_test, name=folder.name)


def _listed(folder: Path) -> list[tuple[Path, str]]:
    """Return the pictures of a folder, each with the name of its class."""
    if not folder.is_dir():
        raise BadInput(f"'{folder}' is not a folder: data.path must hold one folder of pictures per class")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise BadInput(f"'{folder}' holds no folders: put the pictures of every class into a folder of its own")
    files = []
    for each in classes:
        pictures = sorted(file for file in each.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not pictures:
            raise BadInput(f"'{each}' holds no pictures ({', '.join(SUFFIXES)}): remove the folder, or fill it")
        files += [(file, each.name) for file in pictures]
    return files


class _Pictures:
    """The decoded pictures of some files; iterating again decodes them again."""

    def __init__(self, files: Sequence[Path], size: list[int] | None) -> None:
        self.files, self.size = files, size

    def __iter__(self) -> Iterator[Any]:
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_extra("pillow", "images", "reading pictures") from error
        first: tuple[int, int] | None = None
        for file in self.files:
            refuse_special(file)
            try:
                with Image.open(file) as opened:
                    picture = opened.copy()
                    if picture.mode in ("P", "PA"):  # a palette of grey values is rare, and colour keeps all of them
                        picture = picture.convert("RGB")
                    if self.size is not None:
                        picture = picture.resize((self.size[1], self.size[0]))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise BadInput(f"{file} is not a readable picture ({error}): replace or remove it") from error
            first = first or picture.size
            if picture.size != first:
                sizes = f"{picture.size[1]}x{picture.size[0]}, the first one {first[1]}x{first[0]}"
                raise BadInput(f"{file} is {sizes}: resize all pictures with data.size = [height, width]")
            yield picture
