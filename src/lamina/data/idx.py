"""Read MNIST and Fashion-MNIST: four IDX files each, compressed with gzip or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.data.dataset import Dataset, Splits
from lamina.data.files import Place, find_folder, verify_md5
from lamina.errors import BadInput

_UNSIGNED_BYTES = 0x08


@dataclass(frozen=True)
class IdxFile:
    """One published file: its name without ``.gz``, the shape it must hold, and its checksums."""

    name: str
    shape: tuple[int, ...]
    md5_gz: str | None
    md5: str | None


@dataclass(frozen=True)
class IdxSet:
    """The four files of a data set and the folders (under the data directory) they may be in."""

    name: str
    folders: tuple[str, ...]
    mean: float
    std: float
    train: tuple[IdxFile, IdxFile]  # images, labels
    test: tuple[IdxFile, IdxFile]
    classes: int = 10

    def locate(self, root: Path) -> Place | None:
        """Return the first folder that holds any of the files; None when there is none."""
        names = [file.name for file in (*self.train, *self.test)]
        return find_folder([root / folder for folder in self.folders], names, (".gz", ""))

    def read(self, root: Path) -> Splits | None:
        """Read all four files; None when there are none."""
        place = self.locate(root)
        if place is None:
            return None
        if place.missing:
            name = place.missing[0]
            md5 = next(file.md5_gz for file in (*self.train, *self.test) if file.name == name)
            raise BadInput(f"{place.path} lacks {name}.gz (md5 {md5}); put all four {self.name} files there")
        return Splits(self._read(place.path, self.train), self._read(place.path, self.test))

    def _read(self, folder: Path, part: tuple[IdxFile, IdxFile]) -> Dataset:
        arrays = []
        for file in part:
            packed, unpacked = folder / f"{file.name}.gz", folder / file.name
            path, md5 = (packed, file.md5_gz) if packed.is_file() else (unpacked, file.md5)
            verify_md5(path, md5)
            arrays.append(torch.from_numpy(read_idx(path, file.shape)))
        images, labels = arrays
        return Dataset(images.unsqueeze(1), labels, self.classes, (self.mean,), (self.std,), self.name)


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes that must hold exactly `shape`.

    The header never decides how much is read, so a damaged or hostile file can neither fill the memory nor pass for
    a smaller set.
    """
    header_size = 4 + 4 * len(shape)
    size = header_size + math.prod(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(f"{path} is not a complete gzip file ({error}); download it again") from error
    if len(content) < header_size:
        raise BadInput(f"{path} ends after {len(content)} bytes, inside its header; download it again")
    zero, kind, axes = struct.unpack(">HBB", content[:4])
    if (zero, kind, axes) != (0, _UNSIGNED_BYTES, len(shape)):
        raise BadInput(f"{path} is not an IDX file of unsigned bytes with {len(shape)} axes; download it again")
    claimed = struct.unpack(f">{axes}I", content[4:header_size])
    if claimed != shape:
        raise BadInput(f"{path} claims to hold {list(claimed)} values, expected {list(shape)}; download it again")
    if len(content) != size:
        problem = "is cut short" if len(content) < size else "is longer than its header says"
        raise BadInput(f"{path} {problem} (expected {size} bytes); download it again")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape).copy()


# The .gz checksums are the published ones; the others are of the same files, decompressed.
MNIST = IdxSet(
    "mnist",
    ("mnist", "MNIST/raw", "MNIST"),
    mean=0.1307,
    std=0.3081,
    train=(
        IdxFile("train-images-idx3-ubyte", (60000, 28, 28),
                "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        IdxFile("train-labels-idx1-ubyte", (60000,),
                "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    ),
    test=(
        IdxFile("t10k-images-idx3-ubyte", (10000, 28, 28),
                "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        IdxFile("t10k-labels-idx1-ubyte", (10000,),
                "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    ),
)  # fmt: skip
FASHION_MNIST = IdxSet(
    "fashion-mnist",
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    mean=0.2860,
    std=0.3530,
    train=(
        IdxFile("train-images-idx3-ubyte", (60000, 28, 28),
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        IdxFile("train-labels-idx1-ubyte", (60000,),
                "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    ),
    test=(
        IdxFile("t10k-images-idx3-ubyte", (10000, 28, 28),
                "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        IdxFile("t10k-labels-idx1-ubyte", (10000,),
                "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
)  # fmt: skip
