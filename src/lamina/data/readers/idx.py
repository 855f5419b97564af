"""Read MNIST and Fashion-MNIST: four IDX files each, compressed with gzip or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamina.data.readers.files import Arrays, Content, PublishedFile, PublishedSet, Release


def decode_idx(contents: Sequence[Content], classes: int) -> Arrays:
    """Decode a file of images and a file of labels: unsigned bytes after 4 bytes of header and 4 for every axis."""
    images, labels = (
        np.frombuffer(content.data, np.uint8, offset=4 + 4 * len(content.file.shape)).reshape(content.file.shape)
        for content in contents
    )
    return images[:, None].copy(), labels[:, None].astype(np.int64)


FILES = (
    ("train-images-idx3-ubyte", (60000, 28, 28)),
    ("train-labels-idx1-ubyte", (60000,)),
    ("t10k-images-idx3-ubyte", (10000, 28, 28)),
    ("t10k-labels-idx1-ubyte", (10000,)),
)


def _idx_set(name: str, folder: str, mean: float, std: float, md5s: Sequence[tuple[str, str]]) -> PublishedSet:
    """Return a set of four files in torchvision's `folder`; their checksums are compressed as published, and plain."""
    files = [PublishedFile(*file, md5, md5_gz) for file, (md5_gz, md5) in zip(FILES, md5s, strict=True)]
    release = Release(f"{folder}/raw", tuple(files[:2]), tuple(files[2:]), decode_idx)
    return PublishedSet(name, 10, (mean,), (std,), (release,))


MNIST = _idx_set("mnist", "MNIST", 0.1307, 0.3081, (
    ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
))  # fmt: skip
FASHION_MNIST = _idx_set("fashion-mnist", "FashionMNIST", 0.2860, 0.3530, (
    ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
))  # fmt: skip
