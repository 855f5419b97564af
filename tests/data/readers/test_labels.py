"""Classes of the user's own data are numbered, and test data are split off."""

import numpy as np
import pytest
import torch

from lamina.base.errors import BadInput
from lamina.data import Dataset, load
from lamina.data.dataset import Splits
from lamina.data.readers.labels import make_splits, mark_test_rows, refuse_unseen_classes


def test_the_held_out_rows_are_a_fraction_and_always_the_same():
    rows = mark_test_rows("a.csv", 50, None, 0.3)
    assert (rows.shape, rows.sum()) == ((50,), 15)
    assert np.array_equal(rows, mark_test_rows("b.csv", 50, None, 0.3))
    assert mark_test_rows("a.csv", 50, None).sum() == 10
    assert 0 < rows[:25].sum() < 15  # they are not the last ones


def test_test_data_of_their_own_follow_the_training_data():
    assert mark_test_rows("a.csv", 3, 2, "b.csv").tolist() == [False, False, False, True, True]


def test_classes_are_numbered_in_sorted_order_in_both_parts():
    labels, is_test = np.array([10, 2, 10, 2]), np.array([False, False, True, False])
    train, test = make_splits("a.npz", np.arange(4.0)[:, None], labels, is_test, columns={"who": list("abcd")})
    assert (train.y.tolist(), test.y.tolist(), test.class_names) == ([1, 0, 0], [1], ("2", "10"))
    assert (train.x.flatten().tolist(), train.columns["who"].tolist()) == ([0, 1, 3], ["a", "b", "d"])


def test_the_task_decides_whether_whole_numbers_are_classes():
    is_test = np.array([False, False, True])
    for labels, task, classes in (([0, 1, 1], None, 2), ([0, 1, 1], "regression", None), ([0.0, 1.0, 1.0], None, None),
                                  ([0.0, 1.0, 1.0], "classification", 2)):  # fmt: skip
        train, _ = make_splits("a.npz", np.zeros((3, 1)), np.array(labels), is_test, task=task)
        assert train.classes == classes
        assert train.y.dtype == (torch.float32 if classes is None else torch.int64)


@pytest.mark.parametrize(
    ("labels", "is_test", "message"),
    [
        (["a", "b"], [True, True], "a.npz: there are no training data"),
        (["a", "b"], [False, False], "a.npz: there are no test data"),
        (["a", "b"], [False, True], "a.npz: the class 'b' appears only in the test data"),
        (["a", "b", "c"], [False, True, True], "a.npz: the classes 'b', 'c' appear only in the test data"),
        ([["a"], ["b"]], [False, True], r"a.npz: labels must have shape \[n\], found \[2, 1\]"),
    ],
)
def test_splits_that_cannot_be_evaluated_are_refused(labels, is_test, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        make_splits("a.npz", np.zeros((len(labels), 1)), np.array(labels), np.array(is_test))


def test_classes_beside_numbers_are_refused():
    classes, numbers = (Dataset(torch.zeros(2, 1), y) for y in (torch.tensor([0, 1]), torch.tensor([0.5, 1.0])))
    for splits in (Splits(classes, numbers), Splits(numbers, classes)):
        with pytest.raises(BadInput, match="has classes, the other one numbers"):
            refuse_unseen_classes("m:load", splits)
    assert refuse_unseen_classes("m:load", Splits(numbers, numbers)).test is numbers


def test_whole_floats_beyond_int64_are_no_classes(tmp_path):
    """They would all be the class of the smallest int64."""
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2)), y=np.array([1e300, -1e300, 1e20, 1.0]))
    with pytest.raises(BadInput, match="the label holds fractions"):
        load("arrays", path=str(tmp_path / "data.npz"), test=0.5, task="classification")
