"""Find the files of published data sets, check that they are those of the publisher, and read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.base.errors import BadInput
from lamina.data.dataset import Dataset, Splits

ENVIRONMENT_VARIABLE = "LAMINA_DATA"
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images [n, channels, height, width], labels [n, 1] or [n, 2]


class Place(NamedTuple):
    """Where the files of a data set are; nothing is read, so a damaged file goes unnoticed."""

    path: Path  # a folder
    missing: list[str]  # names of the files that it lacks


@dataclass(frozen=True)
class PublishedFile:
    """One published file."""

    name: str
    shape: tuple[int, ...]  # of the images or labels in it
    md5: str | None = None


class Content(NamedTuple):
    """The bytes of a published file, and where they come from."""

    file: PublishedFile
    data: bytes
    path: Path


@dataclass(frozen=True)
class Release:
    """One published form of a data set: files in a folder."""

    folder: str
    train: tuple[PublishedFile, ...]
    test: tuple[PublishedFile, ...]
    decode: Callable[[Sequence[Content], int], Arrays]  # of the files of one part, and the number of classes

    def find(self, root: Path, name: str) -> Place | None:
        """Return the first folder that holds any of the files, below `root` or its folder `name`."""
        for folder in (root / name / self.folder, root / name, root / self.folder):
            missing = [file.name for file in self.files if not (folder / file.name).is_file()]
            if len(missing) < len(self.files):
                return Place(folder, missing)
        return None

    @property
    def files(self) -> tuple[PublishedFile, ...]:
        """All files of the release."""
        return (*self.train, *self.test)

    def read(self, place: Place) -> dict[str, Content]:
        """Return the contents of all files, by name, after comparing their checksums."""
        if place.missing:
            raise BadInput(f"{place.path} lacks {place.missing[0]}; put all files of the set there")
        contents = {}
        for file in self.files:
            path = place.path / file.name
            contents[file.name] = Content(file, path.read_bytes(), path)
            verify_md5(path, contents[file.name].data, file.md5)
        return contents


@dataclass(frozen=True)
class PublishedSet:
    """A data set, its releases in order of preference, and its statistics."""

    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    releases: tuple[Release, ...]

    def locate(self, root: Path) -> Place | None:
        """Return the folder of the first release found; None when there is none."""
        return next((place for release in self.releases if (place := release.find(root, self.name))), None)

    def read(self, root: Path) -> Splits | None:
        """Read the first release found; None when there is none."""
        for release in self.releases:
            place = release.find(root, self.name)
            if place is not None:
                contents = release.read(place)
                return Splits(*(self._dataset(release, part, contents) for part in (release.train, release.test)))
        return None

    def _dataset(self, release: Release, part: Sequence[PublishedFile], contents: dict[str, Content]) -> Dataset:
        images, labels = release.decode([contents.pop(file.name) for file in part], self.classes)
        columns = {"coarse_label": labels[:, 0]} if labels.shape[1] == 2 else {}
        x, y = torch.from_numpy(images), torch.from_numpy(labels[:, -1].copy())
        return Dataset(x, y, self.classes, self.mean, self.std, self.name, columns)


def data_directory(given: str | os.PathLike[str] | None = None, expected: str = "") -> Path:
    """Return the data directory: `given`, else the environment variable LAMINA_DATA, else ./data.

    `expected` says which files belong there, for the error message.
    """
    named = given if given is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if named is None:
        return Path("data")
    root = Path(named).expanduser()
    if not root.is_dir():
        # The user named this directory: falling back to a download would hide the mistake.
        raise BadInput(
            f"the data directory '{root}' does not exist; create it, or correct data.dir, data_dir= or LAMINA_DATA"
            + (f"; expected there: {expected}" if expected else "")
        )
    return root


def verify_md5(path: Path, data: bytes, expected: str | None) -> None:
    """Refuse the bytes of a file if they are not the published ones: others with the same md5 cannot be found."""
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if expected is not None and actual != expected:
        raise BadInput(
            f"{path} is damaged or another version: md5 expected {expected}, found {actual}; "
            f"download it again and put the good file at that path"
        )


def own_path(root: Path, path: str) -> Path:
    """Return the path of the user's own file or folder, which must exist; a relative path starts at `root`."""
    given = root / Path(path).expanduser()
    if not given.exists():
        raise BadInput(f"there is no file or folder '{given}': correct data.path, data.test or data.dir")
    return given
