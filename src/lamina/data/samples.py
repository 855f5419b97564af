"""What samples look like, as a run's folder stores it, and new samples for a trained model in the same form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed
from lamina.data import convert
from lamina.data.dataset import Dataset, as_dataset
from lamina.data.matching import inherit_normalisation, match
from lamina.objective.batch import Inputs, map_batch, named_tensors, tensors

NEW = "the new data"  # what messages call them
FIELDS = ("name", "classes", "class_names", "labels_are_names", "mean", "std", "column_names")  # stored as they are


def describe_samples(data: Dataset) -> dict[str, Any]:
    """Return shapes, types, classes, normalisation and column names of a data set, as JSON can hold them."""
    fields = {name: getattr(data, name) for name in FIELDS}
    return {"inputs": _kinds(data.x), "targets": _kinds(data.y), **fields}


def sample_like(facts: Mapping[str, Any]) -> Dataset:
    """Return a data set of one sample of zeros that `describe_samples` describes in the same way."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    fields["column_names"] = {what: tuple(names) for what, names in facts["column_names"].items()}
    return Dataset(_zeros(facts["inputs"]), _zeros(facts["targets"]), **{name: fields[name] for name in FIELDS})


def _kinds(batch: Inputs) -> Any:
    """Return shape and type of one tensor, or of several in a list or by name."""

    def kind(values: Tensor) -> dict[str, Any]:
        return {"shape": list(values.shape[1:]), "dtype": str(values.dtype).removeprefix("torch.")}

    kinds = map_batch(kind, batch)
    return {"named": kinds} if isinstance(batch, dict) else kinds


def _zeros(kinds: Any) -> Any:
    """Return one sample of zeros."""
    if isinstance(kinds, list | tuple):
        return tuple(map(_zeros, kinds))
    if "named" in kinds:
        return {name: _zeros(kind) for name, kind in kinds["named"].items()}
    return torch.zeros(1, *kinds["shape"], dtype=getattr(torch, kinds["dtype"]))


def new_inputs(x: Any, like: Dataset) -> Dataset:
    """Return raw inputs without targets as the training data's samples are: types, normalisation, order of columns.

    `x` is anything that the training data could be: arrays, tensors, lists, pictures, tables, token ids, a tuple or a
    dict of them, or a `Dataset`, whose targets do not count. Of a table and a dict, only what the model needs is taken.
    """
    if isinstance(x, Dataset):
        return in_form_of(x, like)
    if isinstance(x, torch.utils.data.Dataset):
        return in_form_of(as_dataset(x, class_names=like.class_names, classes=like.classes, name=NEW), like)
    x = _chosen(x, like)
    first: Any = (
        next(iter(x.values() if isinstance(x, Mapping) else x), None) if isinstance(like.x, dict | tuple) else x
    )
    if not hasattr(first, "__len__") or getattr(first, "ndim", 1) == 0:
        raise BadInput(
            f"{NEW} are of type {type(x).__name__}: give arrays or tensors with the samples on the first axis"
        )
    wanted = tensors(like.x)[0].shape[1:]
    if wanted and tuple(getattr(first, "shape", ())) == wanted:
        raise BadInput(f"{NEW} are one sample of shape {list(wanted)}: give samples on the first axis, x[None]")
    targets = map_batch(lambda values: values.new_zeros(len(first), *values.shape[1:]), like.y)
    return in_form_of(as_dataset((x, targets), class_names=like.class_names, classes=like.classes, name=NEW), like)


def in_form_of(new: Dataset, like: Dataset) -> Dataset:
    """Return new data matched to the training data as test data are; refuse inputs of another kind."""
    given, wanted = named_tensors(new.x), named_tensors(like.x)
    if list(given) != list(wanted):
        raise BadInput(
            f"{NEW} have the inputs {listed(list(given))}, and the model was trained on {listed(list(wanted))}"
        )
    for what, values in given.items():
        if values.dim() != wanted[what].dim():
            shape = ", ".join(map(str, ["samples", *wanted[what].shape[1:]]))
            raise BadInput(f"{what} of {NEW} has the shape {list(values.shape)}, and the model takes [{shape}]")
        if values.is_floating_point() and wanted[what].dtype == torch.int64:
            raise BadInput(f"{what} holds {values.dtype}, and the model was trained on whole numbers: convert it")
    try:
        new = match(inherit_normalisation(new, like), like)
    except BadInput as error:
        raise BadInput(str(error).replace("the test data", NEW).replace("test labels", "new labels")) from error
    kinds = iter(wanted.values())

    def as_trained(values: Tensor) -> Tensor:
        wants_floats = next(kinds).is_floating_point() and not values.is_floating_point()
        return values.to(torch.float32) if wants_floats else values  # a new table may hold whole numbers only

    return dataclasses.replace(new, x=map_batch(as_trained, new.x))


def _chosen(x: Any, like: Dataset) -> Any:
    """Return the inputs that the model was trained on, of a dict; and of tables, their columns."""
    if isinstance(like.x, dict):
        if not hasattr(x, "keys"):
            raise BadInput(f"{NEW} are of type {type(x).__name__}: give a dict with {listed(list(like.x), most=20)}")
        missing = [key for key in like.x if key not in x]
        if missing:
            raise BadInput(f"{NEW} have no '{missing[0]}'{nearest(missing[0], map(str, x))}")
        return {key: _columns_of(x[key], f"x[{key!r}]", like) for key in like.x}
    if isinstance(like.x, tuple):
        if not isinstance(x, tuple | list) or len(x) != len(like.x):
            raise BadInput(f"{NEW} must be a tuple of {len(like.x)} inputs, as in training")
        return tuple(_columns_of(part, f"x[{i}]", like) for i, part in enumerate(x))
    if isinstance(x, tuple) and len(x) == 2 and all(getattr(part, "ndim", 0) for part in x):
        raise BadInput(f"{NEW} are a pair: give the inputs alone, and the pair (x, y) to evaluate")
    if isinstance(x, Mapping):
        raise BadInput(f"{NEW} are of type {type(x).__name__}, and the model takes one array: give that")
    return _columns_of(x, "x", like)


def _columns_of(values: Any, what: str, like: Dataset) -> Any:
    """Return the columns of a table that the training data had; anything else as it is."""
    names = like.column_names.get(what)
    if names is None or not convert.is_frame(values):
        return values
    values = values.rename(columns=str)
    columns = list(values.columns)
    for name in names:
        if name not in columns:
            raise BadInput(
                f"{NEW} have no column '{name}'{nearest(name, columns)} (columns: {listed(columns, most=20)})"
            )
    return values[list(names)]
