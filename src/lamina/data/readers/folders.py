"""Read pictures of the user's own from one folder per class."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from lamina.base.errors import BadInput, short_repr
from lamina.base.text import listed
from lamina.data.dataset import Splits
from lamina.data.images import Pictures, stack_pictures
from lamina.data.readers.files import own_path
from lamina.data.readers.labels import make_splits, mark_test_rows

log = logging.getLogger(__name__)

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
        raise BadInput(f"data.size = {short_repr(size)}: must be a height and a width, for example [32, 32]")
    folder = own_path(root, path)
    parts = [folder / "train", folder / "test"]
    if not all(part.is_dir() for part in parts):
        parts = [folder, *([own_path(root, test)] if isinstance(test, str) else [])]
    elif test is not None:
        raise BadInput(f"'{folder}' holds train/ and test/: take data.test out, or set data.path to one of them")
    train, *held_out = [_listed(part) for part in parts]
    is_test = mark_test_rows(str(folder), len(train), len(held_out[0]) if held_out else None, test)
    files = [*train, *(held_out[0] if held_out else [])]
    pictures = Pictures([file for file, _ in files], "replace or remove it", size)
    x = stack_pictures(pictures, len(files), lambda i: str(files[i][0]))
    return make_splits(str(folder), x, np.array([name for _, name in files]), is_test, name=folder.name)


def _listed(folder: Path) -> list[tuple[Path, str]]:
    """Return the pictures of a folder, each with the name of its class."""
    if not folder.is_dir():
        raise BadInput(f"'{folder}' is not a folder: data.path must hold one folder of pictures per class")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise BadInput(f"'{folder}' holds no folders: put the pictures of every class into a folder of its own")
    files, others = [], []
    for each in classes:
        in_folder = sorted(file for file in each.rglob("*") if file.is_file() and not file.name.startswith("."))
        pictures = [file for file in in_folder if file.suffix.lower() in SUFFIXES]
        if not pictures:
            raise BadInput(f"'{each}' holds no pictures ({', '.join(SUFFIXES)}): remove the folder, or fill it")
        files += [(file, each.name) for file in pictures]
        others += [str(file) for file in in_folder if file.suffix.lower() not in SUFFIXES]
    if others:
        log.warning("ignored, because they are not pictures (%s): %s", ", ".join(SUFFIXES), listed(others))
    return files
