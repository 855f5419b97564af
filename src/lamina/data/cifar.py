"""Read CIFAR-10 and CIFAR-100 from their official binary or pickled release, unpacked or still in the tar.gz."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.data.dataset import Dataset, Splits
from lamina.data.files import Place, find_folder, verify_md5
from lamina.errors import BadInput

_PIXELS = 3 * 32 * 32


Records = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images, and labels [n, 1] or, coarse and fine, [n, 2]


@dataclass(frozen=True)
class Batch:
    """One published file."""

    name: str
    samples: int
    md5: str | None = None


@dataclass(frozen=True)
class Release:
    """One published form of a set: a folder of batch files, and the archive that holds that folder."""

    folder: str
    archive: str
    archive_md5: str | None
    train: tuple[Batch, ...]
    test: tuple[Batch, ...]
    decode: Callable[[bytes, int, int, str], Records]


@dataclass(frozen=True)
class CifarSet:
    """A data set, its releases in order of preference, and its statistics."""

    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    releases: tuple[Release, ...]

    def locate(self, root: Path) -> Place | None:
        """Return the folder or archive of the first release found; None when there is none."""
        release = self._find(root)
        return release and release[1]

    def read(self, root: Path) -> Splits | None:
        """Read the first release found; None when there is none."""
        release_and_place = self._find(root)
        if release_and_place is None:
            return None
        release, place = release_and_place
        contents = _read_archive(release, place.path) if place.path.is_file() else _read_folder(release, place)

        return Splits(*(self._dataset(release, part, contents, place.path) for part in (release.train, release.test)))

    def _find(self, root: Path) -> tuple[Release, Place] | None:
        home = root / self.name
        for release in self.releases:
            names = [batch.name for batch in (*release.train, *release.test)]
            folder = find_folder((home / release.folder, home, root / release.folder), names)
            if folder is not None:
                return release, folder
            for archive in (home / release.archive, root / release.archive):
                if archive.is_file():
                    return release, Place(archive, [])
        return None

    def _dataset(self, release: Release, part: Sequence[Batch], contents: dict[str, bytes], path: Path) -> Dataset:
        records = [release.decode(contents.pop(b.name), b.samples, self.classes, str(path / b.name)) for b in part]
        images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*records, strict=True))
        columns = {"coarse_label": labels[:, 0].numpy()} if labels.shape[1] == 2 else {}
        return Dataset(images, labels[:, -1], self.classes, self.mean, self.std, self.name, columns)


def _read_folder(release: Release, place: Place) -> dict[str, bytes]:
    if place.missing:
        raise BadInput(f"{place.path} lacks {place.missing[0]}; put all files of {release.archive} there")
    contents = {}
    for batch in (*release.train, *release.test):
        verify_md5(place.path / batch.name, batch.md5)
        contents[batch.name] = (place.path / batch.name).read_bytes()
    return contents


def _read_archive(release: Release, archive: Path) -> dict[str, bytes]:
    """Read the batch files out of the archive in one pass; nothing is written to disk."""
    verify_md5(archive, release.archive_md5)
    limits = {batch.name: 2 * batch.samples * _PIXELS for batch in (*release.train, *release.test)}
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                if folder == release.folder and name in limits and member.isfile():
                    file = tar.extractfile(member)
                    contents[name] = file.read(limits[name]) if file else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadInput(f"{archive} is not a complete tar.gz file ({error}); download it again") from error
    missing = [name for name in limits if name not in contents]
    if missing:
        raise BadInput(f"{archive} lacks {release.folder}/{missing[0]}; download it again")
    return contents


def decode_binary(content: bytes, samples: int, classes: int, where: str) -> Records:
    """Decode records of one label byte (CIFAR-100: coarse, then fine) followed by the 3072 pixels."""
    label_bytes = 2 if classes == 100 else 1
    size = samples * (label_bytes + _PIXELS)
    if len(content) != size:
        raise BadInput(f"{where} has {len(content)} bytes, expected {size}; download it again")
    rows = np.frombuffer(content, np.uint8).reshape(samples, label_bytes + _PIXELS)
    images = rows[:, label_bytes:].reshape(samples, 3, 32, 32)
    return images, _checked(rows[:, :label_bytes].astype(np.int64), classes, where)


def decode_pickle(content: bytes, samples: int, classes: int, where: str) -> Records:
    """Decode the dictionary of the Python release without running anything a pickle may ask for."""
    try:
        loaded = _InertUnpickler(io.BytesIO(content), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in loaded.items()}
        _version, shape, dtype, _fortran, pixels = batch["data"].state
        if dtype.args[0] not in ("u1", b"u1") or tuple(shape) != (samples, _PIXELS):
            raise BadInput(f"{where}: expected {samples} x {_PIXELS} unsigned bytes; download it again")
        images = np.frombuffer(pixels, np.uint8).reshape(samples, 3, 32, 32)
        names = ("coarse_labels", "fine_labels") if classes == 100 else ("labels",)
        labels = np.stack([np.array(batch[name], np.int64).reshape(samples) for name in names], axis=1)
    except BadInput:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{where} is not a CIFAR batch ({type(error).__name__}); download it again") from error
    return images, _checked(labels, classes, where)


def _checked(labels: NDArray[np.int64], classes: int, where: str) -> NDArray[np.int64]:
    outside = np.flatnonzero((labels[:, -1] < 0) | (labels[:, -1] >= classes))
    if len(outside):
        first = int(outside[0])
        raise BadInput(f"{where}: label {labels[first, -1]} of record {first} is not in 0..{classes - 1}")
    return labels


class _Recorded:
    """Stand-in for every permitted global: it stores its arguments and state, and does nothing."""

    args: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """An unpickler whose only callable is `_Recorded`: no file it reads can execute code.

    A pickled array names three globals. Even numpy's own are replaced, so that neither their bugs
    nor their memory allocation are within reach of the file.
    """

    _permitted = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),  # written by numpy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._permitted:
            raise BadInput(
                f"the pickle asks for {module}.{name}, which no CIFAR batch needs; do not trust this file, "
                "download the official archive"
            )
        return _Recorded


def _numbered(name: str, md5s: tuple[str, ...]) -> tuple[Batch, ...]:
    """Return CIFAR-10's training batches, numbered from 1."""
    return tuple(Batch(name.format(number), 10000, md5) for number, md5 in enumerate(md5s, 1))


CIFAR10 = CifarSet(
    "cifar10",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    releases=(
        Release(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            _numbered("data_batch_{}.bin", ("5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692",
                                            "942cd6a4bcdd0dd3c604fbe906cb4421", "ae636b3ba5c66a11e91e8cb52e771fcb",
                                            "53f37980c15c3d472c316c40844f3f0d")),
            (Batch("test_batch.bin", 10000, "803d5f7f4d78ea53de84dbe85f74fb6d"),),
            decode_binary,
        ),
        Release(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            _numbered("data_batch_{}", ("c99cafc152244af753f735de768cd75f", "d4bba439e000b95fd0a9bffe97cbabec",
                                        "54ebc095f3ab1f0389bbae665268c751", "634d18415352ddfa80567beed471001a",
                                        "482c414d41f54cd18b22e5b47cb7c3cb")),
            (Batch("test_batch", 10000, "40351d587109b95175f43aff81a1287e"),),
            decode_pickle,
        ),
    ),
)  # fmt: skip
CIFAR100 = CifarSet(
    "cifar100",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    releases=(
        Release(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            # No checksum of the unpacked binary files is published: their exact size and labels are checked.
            (Batch("train.bin", 50000),),
            (Batch("test.bin", 10000),),
            decode_binary,
        ),
        Release(
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            (Batch("train", 50000, "16019d7e3df5f24257cddd939b257f8d"),),
            (Batch("test", 10000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
            decode_pickle,
        ),
    ),
)
