"""Read CIFAR-10 and CIFAR-100 from the unpacked folder of their official binary or pickled release."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

import numpy as np

from lamina.base.errors import BadInput
from lamina.data.readers.files import Arrays, Content, PublishedFile, PublishedSet, Release

_IMAGE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def decode_binary(contents: Sequence[Content], classes: int) -> Arrays:
    """Decode records of one label byte (CIFAR-100: coarse, then fine) followed by the 3072 pixels."""
    return _joined(_decode_records(content, classes) for content in contents)


def decode_pickle(contents: Sequence[Content], classes: int) -> Arrays:
    """Decode the dictionaries of the Python release.

    A pickle can run code, but a file reaches this function only if its checksum says that it is the published one.
    """
    return _joined(_decode_dictionary(content, classes) for content in contents)


def _joined(parts: Iterable[Arrays]) -> Arrays:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images.reshape(-1, *_IMAGE), labels


def _decode_records(content: Content, classes: int) -> Arrays:
    samples, label_bytes = content.file.shape[0], 2 if classes == 100 else 1
    size = samples * (label_bytes + _PIXELS)
    if len(content.data) != size:
        raise BadInput(f"{content.path} has {len(content.data)} bytes, expected {size}; download it again")
    rows = np.frombuffer(content.data, np.uint8).reshape(samples, label_bytes + _PIXELS)
    return rows[:, label_bytes:], rows[:, :label_bytes].astype(np.int64)


def _decode_dictionary(content: Content, classes: int) -> Arrays:
    batch = pickle.loads(content.data, encoding="bytes")
    names = (b"coarse_labels", b"fine_labels") if classes == 100 else (b"labels",)
    return batch[b"data"], np.stack([np.array(batch[name], np.int64) for name in names], axis=1)


def _batch(name: str, samples: int, md5: str | None = None) -> PublishedFile:
    return PublishedFile(name, (samples, *_IMAGE), md5)


def _numbered(name: str, md5s: tuple[str, ...]) -> tuple[PublishedFile, ...]:
    """Return CIFAR-10's training batches, numbered from 1."""
    return tuple(_batch(name.format(number), 10000, md5) for number, md5 in enumerate(md5s, 1))


CIFAR10 = PublishedSet(
    "cifar10",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    releases=(
        Release(
            "cifar-10-batches-bin",
            _numbered("data_batch_{}.bin", ("5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692",
                                            "942cd6a4bcdd0dd3c604fbe906cb4421", "ae636b3ba5c66a11e91e8cb52e771fcb",
                                            "53f37980c15c3d472c316c40844f3f0d")),
            (_batch("test_batch.bin", 10000, "803d5f7f4d78ea53de84dbe85f74fb6d"),),
            decode_binary,
        ),
        Release(
            "cifar-10-batches-py",
            _numbered("data_batch_{}", ("c99cafc152244af753f735de768cd75f", "d4bba439e000b95fd0a9bffe97cbabec",
                                        "54ebc095f3ab1f0389bbae665268c751", "634d18415352ddfa80567beed471001a",
                                        "482c414d41f54cd18b22e5b47cb7c3cb")),
            (_batch("test_batch", 10000, "40351d587109b95175f43aff81a1287e"),),
            decode_pickle,
        ),
    ),
)  # fmt: skip
CIFAR100 = PublishedSet(
    "cifar100",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    releases=(
        Release(
            "cifar-100-binary",
            # No checksum of the unpacked binary files is published: their exact size and labels are checked.
            (_batch("train.bin", 50000),),
            (_batch("test.bin", 10000),),
            decode_binary,
        ),
        Release(
            "cifar-100-python",
            (_batch("train", 50000, "16019d7e3df5f24257cddd939b257f8d"),),
            (_batch("test", 10000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
            decode_pickle,
        ),
    ),
)
