"""Data sets of the Hugging Face hub: their columns become inputs, labels and columns to split by."""

from typing import ClassVar

import numpy as np
import pytest

from data_setup import FakeHubSplit, one_line, pictures
from lamina.base.errors import BadInput, MissingExtra
from lamina.data import as_dataset, hub
from lamina.data.mapped import Mapped


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
    named = as_dataset(split, x="a", y="sentence")
    assert (named.y.tolist(), named.class_names) == ([0, 1], ("x", "y"))
    for options, message in [
        ({}, "cannot tell the input column"),
        ({"x": "a"}, "cannot tell the label column"),
        ({"x": "sentense", "y": "b"}, "did you mean 'sentence'"),
        ({"x": "sentence", "y": "b"}, "tokenise"),
        ({"x": ["a", "sentense"], "y": "b"}, "did you mean 'sentence'"),
        ({"x": [], "y": "b"}, "names no column"),
    ]:
        with pytest.raises(BadInput, match=message) as refused:
            as_dataset(split, **options)
        one_line(refused)
    with pytest.raises(BadInput, match="give all pictures one size"):
        as_dataset(FakeHubSplit({"image": pictures("L") + pictures("L", size=(5, 5)), "label": [0, 1]}))
    with pytest.raises(BadInput, match="empty"):
        as_dataset(FakeHubSplit({"image": [], "label": []}))

    class FakeHubDict(dict):
        column_names: ClassVar = {}
        with_format = None

    with pytest.raises(BadInput, match=r"for example data\['train'\]"):
        as_dataset(FakeHubDict(train=split))


def test_hub_tokens_keep_what_the_tokenizer_gives_beside_them():
    columns = {
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "label": [0, 1],
        "n": [3, 1],
    }
    data = as_dataset(FakeHubSplit(columns))
    assert {name: values.tolist() for name, values in data.x.items()} == {n: columns[n] for n in list(columns)[1::-1]}
    assert list(data.columns) == ["n"]
    assert as_dataset(FakeHubSplit(columns), x="input_ids").x.tolist() == columns["input_ids"]
    assert list(as_dataset(FakeHubSplit(columns), x=["n", "input_ids"]).x) == ["n", "input_ids"]
    causal = as_dataset(FakeHubSplit(columns), y="input_ids")  # padding is not a target
    assert causal.y.tolist() == [[5, 6, 7], [8, -100, -100]]
    ragged = {"input_ids": [[5, 6, 7], [8]], "attention_mask": [[1, 1, 1], [1]], "label": [0, 1]}
    assert as_dataset(FakeHubSplit(ragged)).x["attention_mask"].tolist() == columns["attention_mask"]


def test_hub_images_without_pillow_name_the_extra():
    class NeedsPillow(FakeHubSplit):
        def __getitem__(self, key):
            raise ImportError("To support decoding images, please install 'Pillow'.")

    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
        as_dataset(NeedsPillow({"image": [b""], "label": [0]}))


def test_large_columns_stay_on_disk(monkeypatch):
    values = {"x": np.random.default_rng(0).normal(size=(9, 2, 3)), "label": np.arange(9) % 2}
    shown = np.array([*pictures("RGB", "RGB", "RGB"), None], dtype=object)[:3]
    for columns in (values, {"x": shown, "label": np.arange(3)}):
        in_memory = as_dataset(FakeHubSplit(columns))
        with monkeypatch.context() as patch:
            patch.setattr(hub, "LARGE_BYTES", 1)
            on_disk = as_dataset(FakeHubSplit(columns))
        assert isinstance(on_disk.x, Mapped)
        assert on_disk.x.shape == in_memory.x.shape
        assert on_disk.x[:].tolist() == in_memory.x.tolist()
        assert on_disk.inputs(slice(1, 3)).tolist() == in_memory.inputs(slice(1, 3)).tolist()


def test_large_columns_need_rows_of_one_shape(monkeypatch):
    monkeypatch.setattr(hub, "LARGE_BYTES", 1)
    rows = np.array([np.zeros(2), np.zeros(2), np.zeros(3)], dtype=object)
    with pytest.raises(BadInput, match="column 'x' is too large for memory, and its rows differ in shape"):
        as_dataset(FakeHubSplit({"x": rows, "label": np.arange(3)}))
