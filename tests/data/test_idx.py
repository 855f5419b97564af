"""MNIST and Fashion-MNIST files; a damaged or hostile file does no harm."""

import dataclasses
import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from data_setup import one_line, published_data
from lamina.data import idx, load
from lamina.data.files import PublishedFile, verify_md5
from lamina.errors import BadInput


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny_idx_set(train=6, test=4, image=(5, 5)):
    def part(stem, n):
        return (
            PublishedFile(f"{stem}-images-idx3-ubyte", (n, *image)),
            PublishedFile(f"{stem}-labels-idx1-ubyte", (n,)),
        )

    release = dataclasses.replace(idx.MNIST.releases[0], train=part("train", train), test=part("t10k", test))
    return dataclasses.replace(idx.MNIST, releases=(release,))


def write_idx_set(files, folder, compress):
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    written = {}
    for file in files.releases[0].files:
        array = noise.integers(0, 10, file.shape, dtype=np.uint8)
        content = idx_bytes(array)
        (folder / (file.name + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)
        written[file.name] = array
    return written


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_idx_sets_are_read_from_either_folder(tmp_path, folder, compress):
    files = tiny_idx_set()
    written = write_idx_set(files, tmp_path / folder, compress)
    train, test = files.read(tmp_path)
    assert np.array_equal(train.x[:, 0].numpy(), written["train-images-idx3-ubyte"])
    assert np.array_equal(test.labels, written["t10k-labels-idx1-ubyte"])
    assert (train.mean, train.classes) == ((0.1307,), 10)


def test_a_missing_idx_file_is_named(tmp_path):
    files = tiny_idx_set()
    write_idx_set(files, tmp_path / "mnist", compress=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match="lacks t10k-labels-idx1-ubyte"):
        files.read(tmp_path)


GOOD_IDX = idx_bytes(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


def read_with(folder, content, compress):
    """Read a set of four files whose training images have this content; return the error, which names that file."""
    files = tiny_idx_set(train=3, image=(2, 2))
    write_idx_set(files, folder / "mnist", compress)
    path = folder / "mnist" / ("train-images-idx3-ubyte" + ".gz" * compress)
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        files.read(folder)
    assert str(path) in one_line(refused)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends after 0 bytes"),
        (GOOD_IDX[:9], "inside its header"),
        (GOOD_IDX[:-1], "cut short"),
        (GOOD_IDX + b"x", "longer"),
        (b"\x00\x00\x0d" + GOOD_IDX[3:], "not an IDX file"),
        (b"<html>" + GOOD_IDX, "not an IDX file"),
        (GOOD_IDX[:4] + struct.pack(">I", 2**32 - 1) + GOOD_IDX[8:], "claims to hold"),
    ],
)
@pytest.mark.parametrize("compress", [True, False])
def test_damaged_idx_files_are_refused(tmp_path, content, message, compress):
    assert message in read_with(tmp_path, gzip.compress(content) if compress else content, compress)


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"plain", lambda c: c[:-8] + b"\0" * 8])
def test_damaged_gzip_is_refused(tmp_path, damage):
    assert "not a complete gzip file" in read_with(tmp_path, damage(gzip.compress(GOOD_IDX)), compress=True)


def test_a_gzip_bomb_is_not_inflated(tmp_path):
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        assert "not an IDX file" in read_with(tmp_path, bomb, compress=True)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_wrong_checksum_names_file_and_both_sums(tmp_path):
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    write_idx_set(tiny_idx_set(), tmp_path / "mnist", compress=True)
    with pytest.raises(BadInput) as refused:
        load("mnist", tmp_path)
    text = one_line(refused)
    assert str(path) in text
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in text
    assert "put the good file at that path" in text


def test_md5_of_known_content(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    verify_md5(path, "900150983cd24fb0d6963f7d28e17f72")  # RFC 1321's own example
    with pytest.raises(BadInput, match="900150983cd24fb0d6963f7d28e17f73, found 900150983cd24fb0d6963f7d28e17f72"):
        verify_md5(path, "900150983cd24fb0d6963f7d28e17f73")


@pytest.mark.parametrize(("name", "firsts"), [("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])])
def test_the_published_idx_sets(name, firsts):
    root = published_data()
    if not (root / name).is_dir():
        pytest.skip(f"no {name} in {root}")
    train, test = load(name, root, hub=False)
    assert (train.x.shape, test.x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert train.y[:5].tolist() == firsts
    scaled = train.x.double() / 255
    assert abs(float(scaled.mean()) - train.mean[0]) < 1e-4
    assert abs(float(scaled.std()) - train.std[0]) < 1e-4
