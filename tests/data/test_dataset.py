"""`Dataset` and `as_dataset`: what they accept and what they refuse in one line."""

import numpy as np
import pytest
import torch

from data_setup import one_line
from lamina.base.errors import BadInput
from lamina.data import Dataset, as_dataset
from lamina.training.inputs import as_splits


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
        (lambda: Dataset(torch.zeros(2, 2), {"a": TWO, "b": [0, 1, 1]}), r"y\['b'\] and y\['a'\] must hold one row"),
        (lambda: Dataset(torch.zeros(2, 2), {"a": ["x", "z"]}), r"y\['a'\] holds text; number the classes"),
        (lambda: Dataset(torch.zeros(2, 2), {}), "give every target under a name"),
        (lambda: Dataset(torch.zeros(2, 2), {"a": TWO}, class_names=["x", "z"]), "for one array of labels, .* dict"),
        (lambda: Dataset(torch.zeros(3), [{"a": 1}, {"b": 1}, {"a": 1}]), "samples of y are dicts with different keys"),
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


def test_columns_may_be_lists():
    data = Dataset(np.zeros((3, 2)), [0, 1, 0], columns={"who": ["a", "b", "a"]})
    assert list(data.subset([2, 1]).columns["who"]) == ["a", "b"]


def test_another_ignored_value_is_stored_as_minus_one_hundred():
    data = Dataset(torch.zeros(2, 1, 2, 2), torch.tensor([[[0, 255], [1, 1]]] * 2), ignore_index=255)
    assert data.classes == 2
    assert data.y[0].tolist() == [[0, -100], [1, 1]]
    assert data.labels is None
    for y in (torch.tensor([0, 255]), torch.tensor([[0.0, -1.0], [1.0, 0.0]])):  # where it would have no effect
        with pytest.raises(BadInput, match="ignore_index is for integer maps"):
            Dataset(torch.zeros(2, 3), y, ignore_index=255)


class Boxes(torch.utils.data.Dataset):
    """A torch data set whose targets are a tuple or a dict."""

    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((3,), float(i)), self.form(i % 2, torch.tensor([i, i + 1.0]))


@pytest.mark.parametrize("make", [
    lambda: Dataset(np.zeros((4, 3)), ([0, 1, 0, 1], np.arange(8).reshape(4, 2) / 2)),
    lambda: Dataset((np.zeros(4), np.zeros(4)), (np.array([0, 1, 0, 1]), torch.arange(8).reshape(4, 2) / 2)),
    lambda: as_dataset(Boxes(lambda kind, box: (kind, box))),
])  # fmt: skip
def test_a_tuple_of_targets_is_not_one_of_samples(make):
    data = make()
    assert len(data) == 4
    assert (data.classes, data.labels) == (None, None)
    kinds, boxes = data.y
    assert (kinds.tolist(), kinds.dtype, boxes.shape) == ([0, 1, 0, 1], torch.int64, (4, 2))
    assert boxes.is_floating_point()
    assert "targets y[0], y[1]" in repr(data)
    part = data.subset([3, 1])
    assert torch.equal(part.y[1], boxes[[3, 1]])
    assert data.to("cpu") is data


@pytest.mark.parametrize("make", [
    lambda: Dataset(np.zeros((4, 3)), {"kind": [0, 1, 0, 1], "tokens": [[1], [1, 2], [3], [4]]}),
    lambda: Dataset(np.zeros((4, 3)), [{"kind": i % 2, "tokens": [1] * (1 + i % 2)} for i in range(4)]),
    lambda: as_dataset(Boxes(lambda kind, box: {"kind": kind, "tokens": [1] * (1 + kind)})),
])  # fmt: skip
def test_a_dict_of_targets(make):
    data = make()
    assert data.y["kind"].tolist() == [0, 1, 0, 1]
    assert data.y["tokens"][0].tolist()[1] == -100  # padded tokens do not count
    assert list(data.holdout(0.5)[1].y) == ["kind", "tokens"]


def test_a_pair_of_pairs_is_told_from_several_inputs_and_targets():
    many, few = (torch.zeros(n, 3) for n in (8, 4))
    for pairs in (((many, many[:, 0]), (few, few[:, 0])), ((few, few[:, 0]), (few + 1, few[:, 0]))):
        with pytest.raises(BadInput, match=r"a pair of pairs: .* are a lamina\.Dataset\(x, y\)"):
            as_splits(pairs)
    train, test = as_splits(((many, many), (many[:, 0], many[:, :2])))
    assert [tuple(y.shape) for y in train.y] == [(8,), (8, 2)]
    assert test is None
