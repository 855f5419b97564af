"""Read TinyImageNet from its unpacked folder; the decoded pixels are cached beside it."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.base.errors import BadInput
from lamina.base.paths import refuse_special
from lamina.data.dataset import Dataset, Splits
from lamina.data.images import Pictures, stack_pictures
from lamina.data.readers.files import Place

FOLDER = "tiny-imagenet-200"
UNZIP_AGAIN = f"unzip {FOLDER}.zip again"
MEAN = (0.4802, 0.4481, 0.3975)
STD = (0.2302, 0.2265, 0.2262)

CLASSES, TRAIN_IMAGES, TEST_IMAGES = 200, 100_000, 10_000  # of a complete copy; an interrupted unzip has fewer


def locate(root: Path) -> Place | None:
    """Return the unpacked folder, in the data directory or in its ``tinyimagenet``; None when there is none."""
    folder = next((f for f in (root / "tinyimagenet" / FOLDER, root / FOLDER) if f.is_dir()), None)
    parts = ("train", "val/images", "val/val_annotations.txt")
    return None if folder is None else Place(folder, [part for part in parts if not (folder / part).exists()])


def read_set(root: Path) -> Splits | None:
    """Read the unpacked folder; None when there is none.

    The validation images serve as the test set. Classes are numbered in the order of their sorted WordNet ids.
    """
    place = locate(root)
    if place is None:
        return None
    folder = place.path
    wnids = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    if len(wnids) != CLASSES:
        raise BadInput(f"{folder}/train holds {len(wnids)} class folders, not {CLASSES}; {UNZIP_AGAIN}")
    train = [
        (path, label)
        for label, wnid in enumerate(wnids)
        for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
    ]
    test = _annotated(folder / "val", wnids)
    for part, samples, expected in (("train", train, TRAIN_IMAGES), ("val", test, TEST_IMAGES)):
        if len(samples) != expected:
            raise BadInput(f"{folder}/{part} holds {len(samples)} images, not {expected}; {UNZIP_AGAIN}")
    return Splits(_dataset(folder, "train", train), _dataset(folder, "val", test))


def _annotated(folder: Path, wnids: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the validation images with the labels of ``val_annotations.txt`` (name, wnid, box; tab-separated)."""
    annotations = folder / "val_annotations.txt"
    if not annotations.is_file():
        raise BadInput(f"{annotations} is missing; {UNZIP_AGAIN}")
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    samples = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        # A bare file name only: an annotation must not point outside the folder.
        if wnid not in label_of or not name or Path(name).name != name:
            raise BadInput(f"{annotations} line {number} is not 'image<TAB>class ...': {UNZIP_AGAIN}")
        samples.append((folder / "images" / name, label_of[wnid]))
    return samples


def _dataset(folder: Path, part: str, samples: Sequence[tuple[Path, int]]) -> Dataset:
    paths = [path for path, _ in samples]
    # The cache's name depends on the list of files, so that a changed folder is decoded again.
    listing = zlib.crc32("\n".join(str(path.relative_to(folder)) for path in paths).encode())
    cache = folder.parent / f"{folder.name}.{part}.{listing:08x}.npy"
    images = _from_cache(cache, len(samples))
    if images is None:
        images = stack_pictures(Pictures(paths, UNZIP_AGAIN), len(paths), lambda i: str(paths[i]), colour=True)
        with contextlib.suppress(OSError):  # without a cache, the next start decodes again
            _write_atomically(cache, images)
    labels = torch.tensor([label for _, label in samples])
    return Dataset(torch.from_numpy(images), labels, CLASSES, MEAN, STD, "tinyimagenet")


def _from_cache(cache: Path, count: int) -> NDArray[np.uint8] | None:
    refuse_special(cache)
    try:
        images = np.load(cache, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_complete = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[:2] == (count, 3)
    return images if is_complete and images.ndim == 4 else None


def _write_atomically(path: Path, array: NDArray[np.uint8]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
