"""Read TinyImageNet from its unpacked folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lamina.base.errors import BadInput
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
    return Splits(_dataset(train), _dataset(test))


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


def _dataset(samples: Sequence[tuple[Path, int]]) -> Dataset:
    paths = [path for path, _ in samples]
    images = stack_pictures(Pictures(paths, UNZIP_AGAIN), len(paths), lambda i: str(paths[i]), colour=True)
    labels = torch.tensor([label for _, label in samples])
    return Dataset(torch.from_numpy(images), labels, CLASSES, MEAN, STD, "tinyimagenet")
