"""Data of a user's function, in the forms that it may return, and the options of `[data]`."""

import pytest
import torch

import lamina
from lamina.base.errors import BadInput
from lamina.data import as_dataset
from lamina.data.readers.own import FORMATS, as_splits, check_names, check_types


def test_a_function_may_return_token_labels_of_different_length():
    train, test = as_splits("m:load", (([[1, 2], [3]], [[1, 0], [1]]), ([[1, 4]], [[1, 0]])))
    assert (train.y.tolist(), test.y.tolist()) == ([[1, 0], [1, -100]], [[1, 0]])


def test_a_function_may_return_datasets_that_number_their_classes_differently():
    x = torch.zeros(3, 2)
    train, test = as_splits("m:load", (lamina.Dataset(x, ["a", "b", "c"]), lamina.Dataset(x[:2], ["a", "c"])))
    assert (test.y.tolist(), test.class_names) == ([0, 2], train.class_names)


def test_a_function_may_return_splits_of_the_installed_datasets_package():
    datasets = pytest.importorskip("datasets")
    rows = {"pixels": [[i, 0.5] for i in range(6)], "kind": ["cat", "dog"] * 3, "site": list("aabbab")}
    whole = datasets.Dataset.from_dict(rows)
    splits = [as_dataset(part, x="pixels", y="kind") for part in (whole, whole.select([1]))]
    train, test = as_splits("m:load", splits)
    assert (train.y.tolist(), test.y.tolist(), test.class_names) == ([0, 1] * 3, [1], ("cat", "dog"))
    assert train.columns["site"].tolist() == list("aabbab")
    missing = datasets.Dataset.from_dict(rows | {"kind": ["cat", None] * 3})
    with pytest.raises(BadInput, match="column 'kind' has no value in sample 1"):
        as_dataset(missing, x="pixels", y="kind")


def test_a_function_may_return_a_dict_of_splits_with_columns():
    parts = {"test": ([[2.0]], [0]), "train": ([[0.0], [1.0]], [1, 0], {"site": ["a", "b"]})}
    train, test = as_splits("m:load", parts)
    assert (train.x.tolist(), test.x.tolist()) == ([[0.0], [1.0]], [[2.0]])
    assert list(train.columns["site"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"the data 'm:load' returned an object of type NoneType: return \(train, test\)"),
        ((1, 2, 3), "the data 'm:load' returned 3 values: return"),
        ((([[0.0]], [0]), 5), "the test data of 'm:load': "),
        ((([[0.0]], [0]), ([[0.0]], [1])), "the data 'm:load': the class '1' appears only in the test data"),
    ],
)
def test_other_results_of_a_function_are_refused(result, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        as_splits("m:load", result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs the key 'path' for arrays \(options: path, features"),
        ({"path": "a.npz", "labels": "y"}, r"no key 'labels'; did you mean 'label'\? \(options of arrays: path"),
        ({"path": "a.npz", "clients": "who"}, "no key 'clients'; did you mean 'client'"),
    ],
)
def test_unknown_and_missing_options_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check_names("arrays", FORMATS["arrays"].read, options, {"client": None})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("table", {"label": 3}, "data.label = 3: must be text"),
        ("table", {"categorical": ["a", 1]}, "must be a list of texts"),
        ("table", {"standardise": 1}, "data.standardise = 1: must be true or false"),
        ("table", {"test": True}, "data.test = True: must be text or a number"),
        ("table", {"task": "ranking"}, "must be 'classification' or 'regression'"),
        ("images", {"size": [3.5, 4]}, "must be a list of whole numbers"),
        ("arrays", {"ignore_index": 0.5}, "must be a whole number"),
    ],
)
def test_options_of_another_type_are_refused(name, options, message):
    with pytest.raises(BadInput, match=message):
        check_types(FORMATS[name].read, options)


def test_options_of_the_right_type_are_accepted():
    options = {"path": "a.csv", "test": 1, "categorical": [], "standardise": True, "task": "regression", "client": None}
    check_types(FORMATS["table"].read, options)
