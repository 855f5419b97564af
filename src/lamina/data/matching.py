"""Match test data to the training data: the order of columns, the numbers of classes, the normalisation of images."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from lamina.base.errors import BadInput
from lamina.data.dataset import Dataset
from lamina.objective.batch import map_batch, named_tensors, tensors


def match(test: Dataset, train: Dataset) -> Dataset:
    """Return test data with the training data's order of columns and numbers of text labels.

    Columns are matched by name if both data sets were tables, and by place otherwise. Images of another type or
    normalisation are refused, and so are tables prepared in another way and labels of another kind.
    """
    _refuse_other_images(test, train)
    _refuse_other_preprocessing(test, train)
    return _with_labels_of(_with_columns_of(test, train), train)


def inherit_normalisation(test: Dataset, train: Dataset) -> Dataset:
    """Return test images with the mean and std of the training data; for test data that the user gave as a pair."""
    has_images = any(values.dtype == torch.uint8 and values.dim() == 4 for values in tensors(test.x))
    if train.mean is None or test.mean is not None or not has_images:
        return test
    return dataclasses.replace(test, mean=train.mean, std=train.std)


def _refuse_other_images(test: Dataset, train: Dataset) -> None:
    """Refuse uint8 images beside other numbers, because only uint8 is divided by 255, and another mean or std."""
    inputs, tested = named_tensors(train.x), named_tensors(test.x)
    for what in [name for name in inputs if name in tested]:
        kinds = inputs[what].dtype, tested[what].dtype
        if torch.uint8 in kinds and kinds[0] != kinds[1]:
            raise BadInput(
                f"{what} is {kinds[0]} in the training data and {kinds[1]} in the test data, and only uint8 images are "
                "divided by 255 and normalised: give both the same type"
            )
    for name in ("mean", "std"):
        expected, given = getattr(train, name), getattr(test, name)
        is_same = expected is given or (
            expected is not None and given is not None and len(expected) == len(given) and np.allclose(expected, given)
        )
        if not is_same:
            advice = "give both the same, or give the test data as a pair (x, y), which takes that of the training data"
            raise BadInput(
                f"the images have {name} = {expected} in the training data and {given} in the test data: {advice}",
                without_data=f"the images have another {name} in the test data than in the training data: {advice}",
            )


def _refuse_other_preprocessing(test: Dataset, train: Dataset) -> None:
    """Refuse a table whose features were fitted apart from the training data's: the same value is another number."""
    one, other = train.preprocessing, test.preprocessing
    if one is None or other is None or {*one.features} != {*other.features} or {*one.columns} == {*other.columns}:
        return
    raise BadInput(
        "the test table was prepared apart from the training table, so its numbers mean something else: give "
        "lamina.data.as_dataset(test, …, preprocessing=train.preprocessing)"
    )


def _with_columns_of(test: Dataset, train: Dataset) -> Dataset:
    """Return test data whose columns have the order of the training data's, if the columns of both have names."""
    changed: dict[str, Tensor] = {}
    parts = {**named_tensors(test.x), **named_tensors(test.y, "y")}
    for what in [name for name in parts if name in train.column_names and name in test.column_names]:
        names, wanted = test.column_names[what], train.column_names[what]
        if names != wanted:
            odd = [name for name in (*wanted, *names) if names.count(name) != 1 or wanted.count(name) != 1]
            if odd:
                rule = f"{what} of the test data has other columns than the training data, or two of one name"
                advice = f"give both the same columns, or arrays ({what}.to_numpy()), which are matched by place"
                raise BadInput(f"{rule} ('{odd[0]}'): {advice}", without_data=f"{rule}: {advice}")
            changed[what] = parts[what][:, [names.index(name) for name in wanted]]
    if not changed:
        return test
    values = iter([changed.get(what, part) for what, part in parts.items()])
    return dataclasses.replace(
        test,
        x=map_batch(lambda _: next(values), test.x),  # in this order
        y=map_batch(lambda _: next(values), test.y),
        column_names={**test.column_names, **{what: train.column_names[what] for what in changed}},
    )


def _with_labels_of(test: Dataset, train: Dataset) -> Dataset:
    """Return test data whose text labels have the numbers of the training data's."""
    if train.class_names == test.class_names:
        return dataclasses.replace(test) if test.names_from_labels else test  # now its names are the training data's
    if train.class_names is None or test.class_names is None:
        names = train.class_names or test.class_names or ()
        are_numbers = names == tuple(map(str, range(len(names))))  # the names "0", "1", … of 0, 1, …
        if are_numbers or not (train.labels_are_names or test.labels_are_names):
            return test  # both have the numbers of the classes, and one the names as well
        named, other = ("training", "test") if train.labels_are_names else ("test", "training")
        raise BadInput(
            f"the {named} labels are names of classes, and the {other} labels are numbers: give names in both, or "
            f"numbers in both; or name the class of every number of the {other} data: lamina.Dataset(x, y, "
            "class_names=[…])"
        )
    places = {name: place for place, name in enumerate(train.class_names)}
    missing = [name for name in test.class_names if name not in places]
    if missing:
        raise BadInput(
            f"the class '{missing[0]}' appears only in the test data: add training samples, drop the test "
            "samples, or give all names to both: class_names=[…]",
            without_data="a class appears only in the test data",
        )
    numbers = torch.tensor([places[name] for name in test.class_names], device=test.y.device)
    return dataclasses.replace(test, y=numbers[test.y], classes=train.classes, class_names=train.class_names)
