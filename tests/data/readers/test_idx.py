"""MNIST and Fashion-MNIST files; a damaged or hostile file does no harm."""

import dataclasses
import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from data_setup import one_line, published_data
from lamina.base.errors import BadInput
from lamina.data import load
from lamina.data.readers import idx
from lamina.data.readers.files import PublishedFile


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny_idx_set(train=6, test=4, image=(5, 5)):
    def part(stem, n):
        return (
            PublishedFile(f"{stem}-images-idx3-ubyte.gz", (n, *image)),
            PublishedFile(f"{stem}-labels-idx1-ubyte.gz", (n,)),
        )

    release = dataclasses.replace(idx.MNIST.releases[0], train=part("train", train), test=part("t10k", test))
    return dataclasses.replace(idx.MNIST, releases=(release,))


def write_idx_set(files, folder):
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    written = {}
    for file in files.releases[0].files:
        array = noise.integers(0, 10, file.shape, dtype=np.uint8)
        (folder / file.name).write_bytes(gzip.compress(idx_bytes(array)))
        written[file.name] = array
    return written


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_idx_sets_are_read_from_either_folder(tmp_path, folder):
    files = tiny_idx_set()
    written = write_idx_set(files, tmp_path / folder)
    train, test = files.read(tmp_path)
    assert np.array_equal(train.x[:, 0].numpy(), written["train-images-idx3-ubyte.gz"])
    assert np.array_equal(test.labels, written["t10k-labels-idx1-ubyte.gz"])
    assert (train.mean, train.classes) == ((0.1307,), 10)


def test_a_missing_idx_file_is_named(tmp_path):
    files = tiny_idx_set()
    write_idx_set(files, tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match="lacks t10k-labels-idx1-ubyte"):
        files.read(tmp_path)


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: gzip.compress(bytes(64 << 20))])
def test_a_damaged_file_is_refused_by_its_checksum_before_it_is_decompressed(tmp_path, damage):
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    write_idx_set(tiny_idx_set(), tmp_path / "mnist")
    path.write_bytes(damage(path.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput) as refused:
            load("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    text = one_line(refused)
    assert str(path) in text
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in text
    assert "put the good file at that path" in text


@pytest.mark.parametrize(("name", "firsts"), [("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])])
def test_the_published_idx_sets(name, firsts):
    root = published_data()
    if not (root / name).is_dir():
        pytest.skip(f"no {name} in {root}")
    train, test = load(name, root)
    assert (train.x.shape, test.x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert train.y[:5].tolist() == firsts
    scaled = train.x.double() / 255
    assert abs(float(scaled.mean()) - train.mean[0]) < 1e-4
    assert abs(float(scaled.std()) - train.std[0]) < 1e-4
