"""Data sets: what is refused, what is read from files, and that no file can do harm."""

import dataclasses
import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from lamina.data import SOURCES, Dataset, as_dataset, cifar, idx, load, tinyimagenet
from lamina.data.files import data_directory, verify_md5
from lamina.errors import BadInput, MissingExtra


def published_data() -> Path:
    """Where the real files are on this machine, if they are."""
    return Path(os.environ.get("LAMINA_DATA") or Path(__file__).parents[3] / "shared" / "data")


def one_line(refused: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(refused.value)
    assert "\n" not in text
    return text


# --- Dataset -----------------------------------------------------------------------------------


def test_dataset_derives_classes_and_keeps_labels_as_int64():
    data = Dataset(torch.zeros(3, 2), torch.tensor([0, 4, 1], dtype=torch.int32))
    assert (len(data), data.classes, data.y.dtype) == (3, 5, torch.int64)
    assert data.labels.tolist() == [0, 4, 1]
    assert repr(data) == "Dataset('data', 3 samples of [2] torch.float32, 5 classes)"


def test_regression_has_no_labels():
    data = Dataset(torch.zeros(2, 2), torch.tensor([[0.5], [1.0]]))
    assert data.classes is None
    assert data.labels is None


GREY = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
TWO = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dataset(torch.zeros(3, 2), TWO), r"\[3, 2\] and \[2\]"),
        (lambda: Dataset(torch.tensor(1.0), torch.tensor(1)), "one row per sample"),
        (lambda: Dataset(torch.zeros(0, 2), torch.zeros(0)), "empty"),
        (lambda: Dataset(torch.zeros(2, 2), torch.tensor([0, -1])), "the label of sample 1"),
        (
            lambda: Dataset(torch.zeros(3, 2), torch.tensor([0, 7, 9]), classes=7),
            "the label of sample 1 is not one of 0..6",
        ),
        (lambda: Dataset(torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.int64)), r"shape \[n\]"),
        (lambda: Dataset(torch.zeros(2, 2), torch.zeros(2), classes=2), "must be integers"),
        (lambda: Dataset(torch.tensor([[0.0], [float("nan")]]), TWO), "sample 1 of x"),
        (lambda: Dataset(torch.tensor([[float("-inf")], [0.0]]), TWO), "sample 0 of x"),
        (lambda: Dataset(torch.zeros(2, 1), torch.tensor([0.0, float("nan")])), "sample 1 of y"),
        (lambda: Dataset(torch.zeros(2, 1, dtype=torch.complex64), TWO), "complex"),
        (lambda: Dataset(torch.zeros(2, 32, 32, 3, dtype=torch.uint8), TWO), "channels-last"),
        (lambda: Dataset(GREY, TWO, mean=(0.5,)), "both mean and std"),
        (lambda: Dataset(GREY, TWO, mean=(0.5, 0.5), std=(1.0, 1.0)), "need 1 values"),
        (lambda: Dataset(GREY, TWO, mean=(0.5,), std=(0.0,)), "std positive"),
        (lambda: Dataset(GREY.float(), TWO, mean=(0.5,), std=(1.0,)), "normalise it before"),
        (lambda: Dataset(GREY, TWO, columns={"user": np.zeros(3)}), "column 'user' has 3 values for 2"),
        (lambda: Dataset(GREY, TWO).subset([2]), "index 2 is not in 0..1"),
        (lambda: Dataset(GREY, TWO).subset([]), "non-empty"),
        (lambda: Dataset(GREY, TWO).subset([0.5]), "integer"),
        (lambda: Dataset(GREY, TWO).holdout(0.0, 0), "one side empty"),
        (lambda: Dataset(GREY, TWO).holdout(0.1, 0), "one side empty"),
        (lambda: Dataset(GREY, TWO).holdout(float("nan"), 0), "one side empty"),
        (lambda: as_dataset(torch.zeros(3)), "pair"),
        (lambda: as_dataset((["a", "b"], [0, 1])), "x holds text"),
        (lambda: as_dataset(([[1], [2, 3]], [0, 1])), "not an array of numbers"),
    ],
)
def test_bad_data_are_refused_in_one_line(make, message):
    with pytest.raises(BadInput, match=message) as refused:
        make()
    one_line(refused)


def test_subset_keeps_order_classes_and_columns():
    data = Dataset(torch.arange(5.0)[:, None], torch.arange(5), columns={"user": np.array(list("abcde"))})
    part = data.subset(np.array([3, 1]))
    assert part.x.flatten().tolist() == [3, 1]
    assert part.classes == 5
    assert part.columns["user"].tolist() == ["d", "b"]
    assert data.subset(torch.tensor([4])).y.tolist() == [4]


def test_holdout_is_a_seeded_split_into_two():
    data = Dataset(torch.arange(50.0)[:, None], torch.arange(50) % 2)
    rest, held = data.holdout(0.3, seed=1)
    assert (len(rest), len(held)) == (35, 15)
    assert sorted(rest.x.flatten().tolist() + held.x.flatten().tolist()) == list(range(50))
    assert torch.equal(held.x, data.holdout(0.3, seed=1)[1].x)
    assert not torch.equal(held.x, data.holdout(0.3, seed=2)[1].x)


def test_to_moves_the_tensors():
    moved = Dataset(GREY, TWO, mean=(0.5,), std=(0.5,)).to("cpu")
    assert torch.equal(moved.x, GREY)
    assert moved.mean == (0.5,)


# --- as_dataset --------------------------------------------------------------------------------


def test_arrays_tensors_and_tensor_datasets_become_datasets():
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([2, 0, 1], np.uint16)
    from_arrays = as_dataset((x, y), name="mine")
    from_tensors = as_dataset(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.tensor([2, 0, 1])))
    assert torch.equal(from_arrays.x, from_tensors.x)
    assert torch.equal(from_arrays.y, from_tensors.y)
    assert from_arrays.name == "mine"
    assert as_dataset(from_arrays) is from_arrays


def test_read_only_arrays_are_copied():
    x = np.zeros((2, 3), np.float32)
    x.flags.writeable = False
    data = as_dataset((x, [0, 1]))
    data.x[0, 0] = 1.0
    assert x[0, 0] == 0


class FakeHubSplit:
    """The parts of `datasets.Dataset` that lamina uses."""

    def __init__(self, columns, classes=None):
        self.columns = columns
        self.column_names = list(columns)
        self.features = {"label": types.SimpleNamespace(num_classes=classes)} if classes else {}

    def with_format(self, _format):
        return self

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: v[key] for name, v in self.columns.items()}


def pictures(*modes, size=(4, 3)):
    Image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0)
    return [
        Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode) for mode in modes
    ]


def test_hub_images_labels_and_other_columns():
    shown = pictures("RGB", "RGB")
    split = FakeHubSplit({"img": shown, "label": [1, 0], "writer": ["a", "b"], "box": [[1], [2]]}, classes=4)
    data = as_dataset(split)
    assert data.x.shape == (2, 3, 3, 4)
    assert np.array_equal(data.x[1].permute(1, 2, 0).numpy(), np.asarray(shown[1]))
    assert data.classes == 4
    assert {name: column.tolist() for name, column in data.columns.items()} == {"writer": ["a", "b"]}


def test_hub_grey_images_stay_grey_unless_one_has_colour():
    assert as_dataset(FakeHubSplit({"image": pictures("L", "L"), "label": [0, 1]})).x.shape == (2, 1, 3, 4)
    mixed = pictures("L", "RGB")
    data = as_dataset(FakeHubSplit({"image": mixed, "label": [0, 1]}))
    assert np.array_equal(data.x[0, 2].numpy(), np.asarray(mixed[0]))


def test_hub_columns_can_be_named_and_mistakes_are_explained():
    split = FakeHubSplit({"a": [[1.0], [2.0]], "b": [0, 1], "sentence": ["x", "y"]})
    assert as_dataset(split, x="a", y="b").x.flatten().tolist() == [1, 2]
    for options, message in [
        ({}, "cannot tell the input column"),
        ({"x": "a"}, "cannot tell the label column"),
        ({"x": "sentense", "y": "b"}, "did you mean 'sentence'"),
        ({"x": "sentence", "y": "b"}, "tokenise"),
        ({"x": "a", "y": "sentence"}, "class_encode_column"),
    ]:
        with pytest.raises(BadInput, match=message) as refused:
            as_dataset(split, **options)
        one_line(refused)
    with pytest.raises(BadInput, match="resize the images"):
        as_dataset(FakeHubSplit({"image": pictures("L") + pictures("L", size=(5, 5)), "label": [0, 1]}))
    with pytest.raises(BadInput, match="empty"):
        as_dataset(FakeHubSplit({"image": [], "label": []}))

    class FakeHubDict(dict):
        column_names: ClassVar = {}
        with_format = None

    with pytest.raises(BadInput, match=r"for example data\['train'\]"):
        as_dataset(FakeHubDict(train=split))


def test_hub_images_without_pillow_name_the_extra():
    class NeedsPillow(FakeHubSplit):
        def __getitem__(self, key):
            raise ImportError("To support decoding images, please install 'Pillow'.")

    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
        as_dataset(NeedsPillow({"image": [b""], "label": [0]}))


# --- load: digits, the hub, the data directory ---------------------------------------------------


def test_digits_keep_their_seventeen_grey_levels():
    train, test = load("digits")
    assert (len(train), len(test), train.classes) == (1438, 359, 10)
    levels = torch.unique(torch.cat([train.x, test.x])) * 16
    assert levels.tolist() == list(range(17))
    assert test.y.bincount(minlength=10).min() > 20
    assert torch.equal(load("digits").test.x, test.x)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    assert all(source.description for source in SOURCES.values())


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_missing_files_are_named_with_every_way_out(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    for hub in (True, False):
        with pytest.raises(BadInput) as refused:
            load(name, tmp_path, hub=hub)
        text = one_line(refused)
        for part in (str(tmp_path), "LAMINA_DATA", ".[hub]", SOURCES[name].files, "(from http"):
            assert part in text
        assert "md5" not in text  # said of a file that is wrong, not of one that is not there


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_without_the_directory_its_files_are_named_too(name, tmp_path):
    with pytest.raises(BadInput) as refused:
        load(name, tmp_path / "nowhere")
    text = one_line(refused)
    for part in ("does not exist", SOURCES[name].files, SOURCES[name].published):
        assert part in text


def test_data_directory_is_argument_then_environment_then_data(tmp_path, monkeypatch):
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    assert data_directory() == Path("data")
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    other = tmp_path / "other"
    other.mkdir()
    assert data_directory(other) == other
    with pytest.raises(BadInput, match="does not exist"):
        data_directory(tmp_path / "nowhere")
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path / "nowhere"))
    assert len(load("digits").train) == 1438  # needs no directory


@pytest.fixture
def fake_hub(monkeypatch):
    """An installed `datasets` whose hub holds what the test puts there; records what it was asked for."""
    hub = types.SimpleNamespace(splits={}, asked=[])

    def load_dataset(repository):
        hub.asked.append(repository)
        return hub.splits

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return hub


def test_the_hub_is_asked_when_there_are_no_files(tmp_path, fake_hub):
    fake_hub.splits = {
        "train": FakeHubSplit({"img": pictures("RGB", "RGB"), "fine_label": [0, 99], "coarse_label": [4, 5]}),
        "test": FakeHubSplit({"img": pictures("RGB"), "fine_label": [99], "coarse_label": [5]}),
    }
    train, test = load("cifar100", tmp_path)
    assert fake_hub.asked == ["uoft-cs/cifar100"]
    assert (train.labels.tolist(), train.columns["coarse_label"].tolist()) == ([0, 99], [4, 5])
    assert (test.name, test.mean) == ("cifar100", cifar.CIFAR100.mean)


def test_the_hub_is_left_alone_when_not_needed_or_not_wanted(tmp_path, fake_hub):
    load("digits", tmp_path)
    with pytest.raises(BadInput, match="hub is switched off"):
        load("mnist", tmp_path, hub=False)
    assert fake_hub.asked == []


def test_a_hub_set_of_another_layout_is_explained(tmp_path, fake_hub):
    fake_hub.splits = {"train": FakeHubSplit({"image": pictures("RGB"), "label": [0]})}
    with pytest.raises(BadInput, match=r"zh-plus/tiny-imagenet has no split 'valid' \(splits: train\)"):
        load("tinyimagenet", tmp_path)
    fake_hub.splits["valid"] = FakeHubSplit({"image": pictures("L"), "label": [0]})
    with pytest.raises(BadInput, match="need 1 values"):  # a colour set cannot be grey
        load("tinyimagenet", tmp_path)


def test_an_unreachable_hub_is_reported_with_its_reason(tmp_path, monkeypatch):
    def load_dataset(repository):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(BadInput, match=r"no files of mnist .*ylecun/mnist \(no route to host\).*mnist/") as refused:
        load("mnist", tmp_path)
    one_line(refused)


# --- IDX files -----------------------------------------------------------------------------------


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny_idx_set(train=6, test=4):
    def part(stem, n):
        return (
            idx.IdxFile(f"{stem}-images-idx3-ubyte", (n, 5, 5), None, None),
            idx.IdxFile(f"{stem}-labels-idx1-ubyte", (n,), None, None),
        )

    return dataclasses.replace(idx.MNIST, train=part("train", train), test=part("t10k", test))


def write_idx_set(files, folder, compress):
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    written = {}
    for file in (*files.train, *files.test):
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
    with pytest.raises(BadInput, match=r"lacks t10k-labels-idx1-ubyte\.gz"):
        files.read(tmp_path)


GOOD_IDX = idx_bytes(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


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
    path = tmp_path / ("file.gz" if compress else "file")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(BadInput, match=message) as refused:
        idx.read_idx(path, (3, 2, 2))
    assert str(path) in one_line(refused)


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"plain", lambda c: c[:-8] + b"\0" * 8])
def test_damaged_gzip_is_refused(tmp_path, damage):
    path = tmp_path / "file.gz"
    path.write_bytes(damage(gzip.compress(GOOD_IDX)))
    with pytest.raises(BadInput, match="not a complete gzip file"):
        idx.read_idx(path, (3, 2, 2))


def test_a_gzip_bomb_is_not_inflated(tmp_path):
    path = tmp_path / "file.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(BadInput, match="not an IDX file"):
        idx.read_idx(path, (3, 2, 2))


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


# --- CIFAR files ---------------------------------------------------------------------------------


def small(files, samples=3):
    """The same releases with few samples and no checksums."""

    def shrink(batches):
        return tuple(dataclasses.replace(batch, samples=samples, md5=None) for batch in batches)

    releases = tuple(
        dataclasses.replace(r, archive_md5=None, train=shrink(r.train), test=shrink(r.test)) for r in files.releases
    )
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
        images = noise.integers(0, 256, (batch.samples, 3072), dtype=np.uint8)
        labels = noise.integers(0, files.classes, batch.samples, dtype=np.uint8)
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
@pytest.mark.parametrize("place", ["own", "root", "own-archive", "root-archive"])
def test_cifar_releases_are_read_from_every_place(tmp_path, files, which, place):
    release = files.releases[which]
    base = tmp_path / files.name if place.startswith("own") else tmp_path
    written = write_release(files, release, base / release.folder)
    if place.endswith("archive"):
        with tarfile.open(base / release.archive, "w:gz") as tar:
            tar.add(base / release.folder, arcname=release.folder)
        for file in (base / release.folder).iterdir():
            file.unlink()
    train, test = files.read(tmp_path)
    images = np.concatenate([written[batch.name][0] for batch in release.train])
    labels = np.concatenate([written[batch.name][1] for batch in release.train])
    assert np.array_equal(train.x.numpy(), images.reshape(-1, 3, 32, 32))
    assert np.array_equal(train.labels, labels)
    assert np.array_equal(test.labels, written[release.test[0].name][1])
    if files.classes == 100:
        assert np.array_equal(train.columns["coarse_label"], labels // 5)


def test_cifar_pickles_of_python_3_are_read():
    images = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = pickle.dumps({"data": images, "labels": [3, 4]}, protocol=3)
    records = cifar.decode_pickle(content, 2, 10, "batch")
    assert np.array_equal(records.images.reshape(2, 3072), images)
    assert records.labels.tolist() == [3, 4]


def test_cifar_files_and_archives_that_are_not_whole(tmp_path):
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
    archive = tmp_path / "archive" / release.archive
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=release.folder)
    with pytest.raises(BadInput, match=r"lacks cifar-10-batches-bin/data_batch_5\.bin"):
        files.read(archive.parent)
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(BadInput, match=r"not a complete tar\.gz"):
        files.read(archive.parent)
    archive.write_bytes(b"<html>not found</html>")
    with pytest.raises(BadInput, match=r"not a complete tar\.gz"):
        files.read(archive.parent)
    with pytest.raises(BadInput, match="c32a1d4ab5d03f1284b67883e8d87530"):
        load("cifar10", archive.parent)


def test_cifar_labels_out_of_range_are_named():
    with pytest.raises(BadInput, match="label 10 of record 1"):
        cifar.decode_binary(bytes(3073) + b"\x0a" + bytes(3072), 2, 10, "batch")


class Attack:
    """Pickles to a call of something the reader must not call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    marker = tmp_path / "pwned"
    attacks = [
        Attack(os.system, f"touch {marker}"),
        Attack(eval, f"open({str(marker)!r}, 'w')"),
        Attack(os.mkdir, str(marker)),
        Attack(np.fromfile, str(marker)),
    ]
    for attack in attacks:
        batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [0], "batch_label": attack}
        with pytest.raises(BadInput, match="asks for") as refused:
            cifar.decode_pickle(pickle.dumps(batch, protocol=protocol), 1, 10, "batch")
        one_line(refused)
        assert not marker.exists()


def test_permitted_names_are_never_numpy_itself():
    """Even the allowed globals are inert, so their state can neither allocate nor hold objects."""
    content = b"cnumpy\nndarray\n(J" + struct.pack("<i", 2**31 - 1) + b"tR."
    loaded = cifar._InertUnpickler(io.BytesIO(content)).load()
    assert not isinstance(loaded, np.ndarray)
    assert loaded.args == (2**31 - 1,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"labels": [0]}),
        pickle.dumps({"data": b"", "labels": [0]}, protocol=2),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}, protocol=3),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [0, 1]}, protocol=3),
        pickle.dumps({"data": np.zeros((1, 3072), np.float32), "labels": [0]}, protocol=3),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, protocol=3),
        python2_pickle({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]})[:-700],
    ],
)
def test_damaged_pickles_are_refused(content):
    with pytest.raises(BadInput, match="batch") as refused:
        cifar.decode_pickle(content, 1, 10, "batch")
    one_line(refused)


def test_the_published_cifar10():
    root = published_data()
    places = [
        base / name
        for release in cifar.CIFAR10.releases
        for name in (release.folder, release.archive)
        for base in (root, root / "cifar10")
    ]
    if not any(place.exists() for place in places):
        pytest.skip(f"no unpacked cifar10 in {root}")
    train, test = load("cifar10", root, hub=False)
    assert (train.x.shape, test.x.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert train.y.bincount().tolist() == [5000] * 10
    assert train.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.allclose(train.x.double().mean((0, 2, 3)) / 255, torch.tensor(train.mean).double(), atol=1e-4)


# --- TinyImageNet --------------------------------------------------------------------------------

SMALL = tinyimagenet.Size(classes=2, train=4, test=3)


@pytest.fixture
def tiny(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(["n01", "n02"]):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for i in range(2):
            # One grey picture among the colours, as in the real set.
            mode, colour = ("L", 40) if (label, i) == (0, 0) else ("RGB", (200 * label, 10, 10 + 100 * i))
            Image.new(mode, (64, 64), colour).save(images / f"{wnid}_{i}.JPEG", quality=95)
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate(["n02", "n01", "n02"]):
        Image.new("RGB", (64, 64), (0, 100 * i, 0)).save(folder / "val" / "images" / f"val_{i}.JPEG", quality=95)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tinyimagenet_folder(tiny):
    train, test = tinyimagenet.read_set(tiny.parent, SMALL)
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert test.labels.tolist() == [1, 0, 1]
    assert train.x.shape == (4, 3, 64, 64)
    # JPEG is lossy, flat colours nearly are not.
    expected = torch.tensor([[40, 40, 40], [0, 10, 110], [200, 10, 10], [200, 10, 110]])
    assert (train.x[:, :, 32, 32].int() - expected).abs().max() <= 4
    assert (test.x[:, 1, 5, 5].int() - torch.tensor([0, 100, 200])).abs().max() <= 4


def test_tinyimagenet_decodes_once_and_notices_changes(tiny, monkeypatch):
    first = tinyimagenet.read_set(tiny.parent, SMALL)
    assert len(list(tiny.parent.glob("*.npy"))) == 2
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        again = tinyimagenet.read_set(tiny.parent, SMALL)
        assert torch.equal(again.train.x, first.train.x)
        (tiny / "train" / "n01" / "images" / "n01_0.JPEG").rename(tiny / "train" / "n01" / "images" / "n01_9.JPEG")
        with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
            tinyimagenet.read_set(tiny.parent, SMALL)
    changed = tinyimagenet.read_set(tiny.parent, SMALL)
    assert torch.equal(changed.train.x, first.train.x[[1, 0, 2, 3]])


def test_a_damaged_cache_is_decoded_again(tiny):
    first = tinyimagenet.read_set(tiny.parent, SMALL)
    for cache in tiny.parent.glob("*.npy"):
        cache.write_bytes(cache.read_bytes()[:500])
    assert torch.equal(tinyimagenet.read_set(tiny.parent, SMALL).train.x, first.train.x)
    for cache in tiny.parent.glob("*.npy"):  # a pickle in disguise must not be loaded
        np.save(cache, np.array([Attack(os.mkdir, str(tiny / "pwned"))], object), allow_pickle=True)
    assert torch.equal(tinyimagenet.read_set(tiny.parent, SMALL).train.x, first.train.x)
    assert not (tiny / "pwned").exists()


def test_a_read_only_folder_only_costs_the_cache(tiny, monkeypatch):
    def refuse(path, array):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(tinyimagenet, "_write_atomically", refuse)
    assert len(tinyimagenet.read_set(tiny.parent, SMALL).train) == 4
    assert list(tiny.parent.glob("*.npy*")) == []


def test_incomplete_tinyimagenet_folders_are_refused(tiny):
    def refused_with(message, size=SMALL):
        with pytest.raises(BadInput, match=message) as refused:
            tinyimagenet.read_set(tiny.parent, size)
        one_line(refused)

    refused_with("2 class folders, not 200", tinyimagenet.Size())
    refused_with("4 images, not 5", tinyimagenet.Size(2, 5, 3))
    refused_with("3 images, not 4", tinyimagenet.Size(2, 4, 4))
    annotations = tiny / "val" / "val_annotations.txt"
    good = annotations.read_text()
    for line in ("val_0.JPEG n02\n", "val_0.JPEG\tn99\t0\n", "../../secret.JPEG\tn01\t0\n", "\tn01\n"):
        annotations.write_text(line)
        refused_with("line 1 is not")
    annotations.write_text(good)
    picture = tiny / "train" / "n02" / "images" / "n02_1.JPEG"
    content = picture.read_bytes()
    picture.write_bytes(content[: len(content) // 2])
    refused_with("n02_1.JPEG is not a readable JPEG")
    picture.write_bytes(b"GIF?")
    refused_with("n02_1.JPEG is not a readable JPEG")
    annotations.unlink()
    refused_with("val_annotations.txt is missing")


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    from lamina.data import sources

    images, labels = load_digits(return_X_y=True)
    table = sources._digits_table()
    assert (table[:, :-1] == images).all()
    assert (table[:, -1] == labels).all()
