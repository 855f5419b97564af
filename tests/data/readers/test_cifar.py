"""CIFAR releases; a damaged or hostile file does no harm."""

import dataclasses
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from data_setup import Attack, one_line, published_data
from lamina.base.errors import BadInput
from lamina.data import load
from lamina.data.readers import cifar


def small(files, samples=3):
    """The same releases with few samples and no checksums."""

    def shrink(batches):
        return tuple(dataclasses.replace(batch, shape=(samples, 3, 32, 32), md5=None) for batch in batches)

    releases = tuple(dataclasses.replace(r, train=shrink(r.train), test=shrink(r.test)) for r in files.releases)
    return dataclasses.replace(files, releases=releases)


def python2_pickle(batch):
    """The batch as Python 2's cPickle wrote it (protocol 2, byte strings, numpy 1's module names)."""

    def string(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    def encode(value):
        if isinstance(value, bytes):
            return string(value)
        if isinstance(value, list):
            return b"](" + b"".join(number(v) for v in value) + b"e"
        rows, columns = value.shape
        dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNN"
        dtype += number(-1) + number(-1) + b"K\x00tb"
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R(K\x01"
            + number(rows) + number(columns) + b"\x86" + dtype + b"\x89" + string(value.tobytes()) + b"tb"
        )  # fmt: skip

    return b"\x80\x02}(" + b"".join(string(k) + encode(v) for k, v in batch.items()) + b"u."


def write_release(files, release, folder):
    """Random batches; returns images and labels per file name."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    written = {}
    for batch in (*release.train, *release.test):
        samples = batch.shape[0]
        images = noise.integers(0, 256, (samples, 3072), dtype=np.uint8)
        labels = noise.integers(0, files.classes, samples, dtype=np.uint8)
        coarse = labels // 5
        if release.decode is cifar.decode_binary:
            columns = [coarse, labels] if files.classes == 100 else [labels]
            content = np.column_stack([*columns, images]).tobytes()
        else:
            named = {b"fine_labels": labels, b"coarse_labels": coarse} if files.classes == 100 else {b"labels": labels}
            lists = {key: value.tolist() for key, value in named.items()}
            content = python2_pickle({b"batch_label": b"a batch", **lists, b"data": images})
        (folder / batch.name).write_bytes(content)
        written[batch.name] = (images, labels)
    return written


@pytest.mark.parametrize("files", [small(cifar.CIFAR10), small(cifar.CIFAR100)], ids=["cifar10", "cifar100"])
@pytest.mark.parametrize("which", [0, 1], ids=["binary", "pickled"])
@pytest.mark.parametrize("place", ["own", "root"])
def test_cifar_releases_are_read_from_every_place(tmp_path, files, which, place):
    release = files.releases[which]
    base = tmp_path / files.name if place == "own" else tmp_path
    written = write_release(files, release, base / release.folder)
    train, test = files.read(tmp_path)
    images = np.concatenate([written[batch.name][0] for batch in release.train])
    labels = np.concatenate([written[batch.name][1] for batch in release.train])
    assert np.array_equal(train.x.numpy(), images.reshape(-1, 3, 32, 32))
    assert np.array_equal(train.labels, labels)
    assert np.array_equal(test.labels, written[release.test[0].name][1])
    if files.classes == 100:
        assert np.array_equal(train.columns["coarse_label"], labels // 5)


def test_cifar_files_that_are_not_whole(tmp_path):
    files = small(cifar.CIFAR10)
    release = files.releases[0]
    folder = tmp_path / release.folder
    write_release(files, release, folder)
    last = folder / "data_batch_5.bin"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"data_batch_5.bin has 9218 bytes, expected 9219"):
        files.read(tmp_path)
    last.unlink()
    with pytest.raises(BadInput, match=r"lacks data_batch_5.bin"):
        files.read(tmp_path)
    for batch in cifar.CIFAR10.releases[0].files:
        (folder / batch.name).write_bytes(b"<html>not found</html>")
    with pytest.raises(BadInput, match="md5 expected 5dd7e06a14cb22eb9f671a540d1b7c25"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("files", [cifar.CIFAR10, cifar.CIFAR100], ids=["cifar10", "cifar100"])
def test_a_malicious_pickle_is_refused_by_its_checksum(tmp_path, files):
    release, marker = files.releases[1], tmp_path / "pwned"
    (tmp_path / release.folder).mkdir()
    for batch in release.files:
        assert batch.md5 is not None  # of every file that is unpickled
        (tmp_path / release.folder / batch.name).write_bytes(pickle.dumps(Attack(os.mkdir, str(marker))))
    with pytest.raises(BadInput, match="is damaged or another version") as refused:
        files.read(tmp_path)
    one_line(refused)
    assert not marker.exists()


def test_the_published_cifar10():
    root = published_data()
    places = [base / release.folder for release in cifar.CIFAR10.releases for base in (root, root / "cifar10")]
    if not any(place.exists() for place in places):
        pytest.skip(f"no unpacked cifar10 in {root}")
    train, test = load("cifar10", root)
    assert (train.x.shape, test.x.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert train.y.bincount().tolist() == [5000] * 10
    assert train.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.allclose(train.x.double().mean((0, 2, 3)) / 255, torch.tensor(train.mean).double(), atol=1e-4)
