"""Read MNIST and Fashion-MNIST: four IDX files each, compressed with gzip."""

from __future__ import annotations

import gzip
from collections.abc import Sequence

import numpy as np

from lamina.data.readers.files import Arrays, Content, PublishedFile, PublishedSet, Release


def decode_idx(contents: Sequence[Content], classes: int) -> Arrays:
    """Decode a file of images and a file of labels: unsigned bytes after 4 bytes of header and 4 for every axis."""
    images, labels = (
        np.frombuffer(gzip.decompress(data), np.uint8, offset=4 + 4 * len(file.shape)).reshape(file.shape)
        for file, data, _ in contents
    )
    return images[:, None].copy(), labels[:, None].astype(np.int64)


FILES = (
    ("train-images-idx3-ubyte.gz", (60000, 28, 28)),
    ("train-labels-idx1-ubyte.gz", (60000,)),
    ("t10k-images-idx3-ubyte.gz", (10000, 28, 28)),
    ("t10k-labels-idx1-ubyte.gz", (10000,)),
)


def _idx_set(name: str, folder: str, mean: float, std: float, md5s: Sequence[str]) -> PublishedSet:
    """Return a set of four files in torchvision's `folder`, with their checksums."""
    files = [PublishedFile(*file, md5) for file, md5 in zip(FILES, md5s, strict=True)]
    release = Release(f"{folder}/raw", tuple(files[:2]), tuple(files[2:]), decode_idx)
    return PublishedSet(name, 10, (mean,), (std,), (release,))


MNIST = _idx_set("mnist", "MNIST", 0.1307, 0.3081, (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
))  # fmt: skip
FASHION_MNIST = _idx_set("fashion-mnist", "FashionMNIST", 0.2860, 0.3530, (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
))  # fmt: skip
