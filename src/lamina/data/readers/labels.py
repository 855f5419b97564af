"""Number the classes of the user's own data, and split off test data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.data.convert import signed
from lamina.data.dataset import Dataset, Splits, held_out_count
from lamina.data.mapped import Mapped
from lamina.objective.losses import IGNORED

Task = Literal["classification", "regression"]


def mark_test_rows(where: str, samples: int, held_out: int | None, fraction: Any = None) -> NDArray[np.bool_]:
    """Return which samples [samples + held_out] are test data.

    Args:
        where: the file, for messages.
        samples: the number of samples that are read as training data.
        held_out: the number of samples that follow, from test data of their own; None if there are none.
        fraction: the fraction of the samples that is held out otherwise, always the same ones; None: 0.2.
    """
    if held_out is not None:
        return np.arange(samples + held_out) >= samples
    fraction = 0.2 if fraction is None else fraction
    held_out = held_out_count(f"{where}: data.test =", samples, fraction)
    rows = np.zeros(samples, np.bool_)
    # The split never depends on the run's seed: every run is evaluated on the same test data.
    rows[rng.permutation(rng.key(0, "own-test-data"), samples)[:held_out]] = True
    return rows


def make_splits(
    where: str,
    x: NDArray[Any] | Mapped,
    y: NDArray[Any],
    is_test: NDArray[np.bool_],
    *,
    task: str | None = None,
    columns: Mapping[str, Any] | None = None,
    name: str = "data",
    ignore_index: int = IGNORED,
) -> Splits:
    """Return training and test data from all samples.

    Args:
        where: the file, for messages.
        x: the inputs [n, ...].
        y: the labels or targets [n], as a file has them. Classes are numbered in their sorted order.
        is_test: which samples are test data [n].
        task: classification or regression; None: regression for floats, else classification.
        columns: further values per sample.
        name: the name of the data.
        ignore_index: the integer target that does not count in maps, beside -100.
    """
    if is_test.all() or not is_test.any():
        part = "training" if is_test.all() else "test"
        raise BadInput(f"{where}: there are no {part} data; give at least one sample")
    class_names = None
    if y.ndim > 1 and y.dtype.kind in "iub" and task != "regression":
        targets = signed(where, "the label", y).astype(np.int64)  # one class per token or pixel, numbered already
    elif (task or ("regression" if y.dtype.kind == "f" else "classification")) == "regression":
        if y.dtype.kind not in "iufb":
            raise BadInput(f"{where}: the label holds text, but data.task = 'regression' needs numbers")
        targets = y.astype(np.float32)
    else:
        targets, class_names = number_classes(where, y)
    inputs = _as_tensor(where, x)
    splits = []
    for rows in (~is_test, is_test):
        kept = {column: np.asarray(values)[rows] for column, values in (columns or {}).items()}
        places = np.flatnonzero(rows)
        data = Dataset(
            inputs.subset(places) if isinstance(inputs, Mapped) else inputs[torch.from_numpy(places)], targets[rows],
            name=name, columns=kept, class_names=class_names, ignore_index=ignore_index,
            labels_are_names=class_names is not None,
        )  # fmt: skip
        splits.append(data)
    return refuse_unseen_classes(where, Splits(*splits))


def _as_tensor(where: str, values: NDArray[Any] | Mapped) -> torch.Tensor | Mapped:
    """Return the inputs as a tensor; grey images that lack their only channel get it."""
    x: torch.Tensor | Mapped
    if isinstance(values, Mapped):
        is_float, x = values.is_floating_point(), values
        x = x if x.dtype == torch.uint8 else x.to(torch.float32 if is_float else torch.int64)
    else:
        kind = values.dtype.kind
        if kind not in "iufb":
            raise BadInput(f"{where}: the features hold text or objects, not an array of numbers of one shape")
        if kind == "f":
            values = values.astype(np.float32)
        elif values.dtype != np.uint8:
            values = signed(where, "x", values).astype(np.int64)
        x = torch.from_numpy(np.ascontiguousarray(values))
    return x.unsqueeze(1) if x.dtype == torch.uint8 and x.dim() == 3 else x


def number_classes(where: str, labels: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the number of every label's class, and the names of the classes in sorted order.

    >>> number_classes("pets.csv", np.array(["dog", "cat", "dog"]))
    (array([1, 0, 1]), ('cat', 'dog'))
    """
    if labels.dtype.kind == "f":  # a format without integers, or a table with missing values, now dropped
        if not ((labels == np.rint(labels)) & (np.abs(labels) < 2.0**63)).all():
            raise BadInput(f"{where}: the label holds fractions, but data.task = 'classification' needs classes")
        labels = labels.astype(np.int64)
    if labels.ndim != 1:
        raise BadInput(f"{where}: labels must have shape [n], found {list(labels.shape)}")
    values, numbers = np.unique(labels, return_inverse=True)
    return numbers.astype(np.int64), tuple(str(value) for value in values.tolist())


def refuse_unseen_classes(where: str, splits: Splits) -> Splits:
    """Refuse test data with a class that no training sample has; return the splits otherwise."""
    train, test = splits
    if train.labels is None or test.labels is None:
        if train.labels is not test.labels:
            raise BadInput(f"{where}: one of the training and the test data has classes, the other one numbers")
        return splits
    unseen = sorted(set(test.labels.ravel().tolist()) - set(train.labels.ravel().tolist()))
    if unseen:
        names = [train.class_names[each] if train.class_names else str(each) for each in unseen]
        word = "class" if len(names) == 1 else "classes"
        raise BadInput(
            f"{where}: the {word} {listed([repr(each) for each in names])} appear{'s' * (len(names) == 1)} only in "
            "the test data: add training samples, or drop the test samples"
        )
    return splits
