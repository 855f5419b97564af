"""`Dataset` and `as_dataset`: what they accept and what they refuse in one line."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from data_setup import FakeHubSplit, one_line, pictures
from lamina.base.errors import BadInput, MissingExtra
from lamina.data import Dataset, as_dataset


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


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


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
        (lambda: Dataset(torch.zeros(2, 2), torch.tensor([[0, -100], [-1, 1]])), "the label of sample 1 is not one of"),
        (lambda: Dataset(torch.zeros(2, 2), ["a", "c"], class_names=["a", "b"]), "'c' of sample 1 is not among"),
        (lambda: Dataset(torch.zeros(2, 2), TWO, class_names=["a"]), "label of sample 1 is not one of"),
        (lambda: Dataset(torch.zeros(2, 2), {"y": TWO}), "y is a dict"),
        (lambda: Dataset({0: torch.zeros(2, 2)}, TWO), "under the name that the model's forward"),
        (lambda: Dataset([{"a": 1.0}, {"b": 1.0}], TWO), "different keys"),
        (lambda: Dataset((torch.zeros(2, 2), torch.zeros(3), TWO), TWO), r"x\[1\] and y must hold one row"),
        (lambda: Dataset({"a": torch.zeros(2, 2), "b": torch.zeros(3)}, TWO), r"x\['b'\] and y must hold one row"),
        (lambda: Dataset(torch.zeros(2, 2), [[0.5], [0.5, 1.0]]), "floating-point targets of different length"),
        (lambda: Dataset([np.zeros((2, 3), np.uint8), np.zeros((3, 3), np.uint8)], TWO), "images of different sizes"),
        (lambda: Dataset(torch.zeros(2, 2), torch.zeros(2), classes=2), "must be integers"),
        (lambda: Dataset(torch.tensor([[0.0], [float("nan")]]), TWO), "sample 1 of x"),
        (lambda: Dataset(torch.tensor([[float("-inf")], [0.0]]), TWO), "sample 0 of x"),
        (lambda: Dataset(torch.zeros(2, 1), torch.tensor([0.0, float("nan")])), "sample 1 of y"),
        (lambda: Dataset(torch.zeros(2, 1, dtype=torch.complex64), TWO), "complex"),
        (lambda: Dataset(torch.zeros(2, 32, 32, 3, dtype=torch.uint8), TWO), "channels-last"),
        (lambda: Dataset(GREY, TWO, mean=(0.5,)), "mean and std need 1 value each"),
        (lambda: Dataset(GREY, TWO, mean=(0.5, 0.5), std=(1.0, 1.0)), "mean and std need 1 value each"),
        (lambda: Dataset(GREY, TWO, mean=(0.5,), std=(0.0,)), r"std > 0, found \(0.5,\) and \(0.0,\)"),
        (lambda: Dataset(GREY.float(), TWO, mean=(0.5,), std=(1.0,)), "normalise it before"),
        (lambda: Dataset(GREY, TWO, columns={"user": np.zeros(3)}), "column 'user' has 3 values for 2"),
        (lambda: Dataset(GREY, TWO).subset([2]), "indices from 0 to 1"),
        (lambda: Dataset(GREY, TWO).subset([]), "a list of sample indices"),
        (lambda: Dataset(GREY, TWO).subset([0.5]), "a list of sample indices"),
        (lambda: Dataset(GREY, TWO).holdout(0.0, 0), "test data empty"),
        (lambda: Dataset(GREY, TWO).holdout(0.1, 0), "test data empty"),
        (lambda: Dataset(GREY, TWO).holdout(float("nan"), 0), "test data empty"),
        (lambda: Dataset(GREY, TWO).holdout("a", 0), "a holdout of 'a'"),
        (lambda: as_dataset(torch.zeros(3)), "pair"),
        (lambda: as_dataset((["a", "b"], [0, 1])), "x holds text"),
        (lambda: as_dataset(([[1], [[2], [3]]], [0, 1])), "not an array of numbers"),
        (lambda: as_dataset(([[1, 2], 3], [0, 1])), "not an array of numbers"),
        (lambda: as_dataset(([[1, None], [2]], [0, 1])), "such as None"),
        (lambda: as_dataset(Stream()), "iterable"),
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
