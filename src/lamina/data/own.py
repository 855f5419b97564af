"""Load data of the user's own: with a function of theirs, or from files in a common format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamina.data import arrays, folders, hub_reader, leaf, table
from lamina.data.dataset import Dataset, Splits, as_dataset
from lamina.data.files import data_directory
from lamina.data.labels import number_classes, refuse_unseen_classes
from lamina.data.options import check_names, check_types, parameters_of
from lamina.errors import BadInput, LaminaError
from lamina.named import import_named

GIVE_A_PAIR = "return (train, test), each a lamina.Dataset, a pair (x, y) or (x, y, {'column': values})"


@dataclass(frozen=True)
class Format:
    """A file format: what it holds, and the function that reads it, whose keyword arguments are its options."""

    description: str
    read: Callable[..., Splits]
    natural_clients: str | None = None
    """The column with the clients, for a format that always has them."""


FORMATS: dict[str, Format] = {
    "table": Format("your own CSV or Parquet file, with label, feature and client columns", table.read),
    "images": Format("your own pictures in one folder per class", folders.read),
    "leaf": Format("your own JSON files in LEAF's format; its users are the clients", leaf.read, leaf.USER_COLUMN),
    "arrays": Format("your own arrays in a .npz or .safetensors file", arrays.read),
    "hub": Format("a Hugging Face data set by name, with a mapping of its columns", hub_reader.read),
}


def check_options(name: str, options: Mapping[str, Any], other_keys: Mapping[str, Any]) -> None:
    """Refuse options that a format does not have, lacks or cannot use; a function's are checked when it is loaded.

    Args:
        name: the name of a format.
        options: the options by name.
        other_keys: the other keys of `[data]` with their values; a format takes those that it has a parameter for.
    """
    read = FORMATS[name].read
    check_names(name, read, options, {**other_keys, "online": None})
    check_types(read, options)


def load_format(name: str, data_dir: Any, options: Mapping[str, Any], client: str | None, *, online: bool) -> Splits:
    """Read files of a format; relative paths start at `data_dir`, else at the current folder."""
    check_options(name, options, {"client": client})
    root = Path() if data_dir is None else data_directory(data_dir)
    more = {"client": client, "online": online}
    known, _ = parameters_of(FORMATS[name].read)
    return FORMATS[name].read(root, **options, **{key: value for key, value in more.items() if key in known})


def load_own(name: str, data_dir: Any, options: Mapping[str, Any], client: str | None) -> Splits:
    """Call the user's function ``package.module:function`` and convert what it returns.

    The function gets the options by name, and `dir` and `client` of `[data]` if it has arguments of these names.
    """
    function = import_named("data", name)
    if not callable(function):
        raise BadInput(f"the data '{name}' are of type {type(function).__name__}: name a function that returns them")
    given = {"dir": data_dir, "client": client}
    check_names(name, function, options, given)
    known, _ = parameters_of(function)
    try:
        result = function(**options, **{key: value for key, value in given.items() if key in known})
    except LaminaError:
        raise
    except Exception as error:  # the user's function may raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise BadInput(f"cannot load the data '{name}': {type(error).__name__}: {reason}") from error
    return as_splits(name, result)


def as_splits(name: str, result: Any) -> Splits:
    """Return training and test data in one of the forms that a user's function may return.

    >>> train, test = as_splits("m:load", (([[0.0], [1.0]], ["no", "yes"]), ([[2.0]], ["yes"])))
    >>> test.y, test.class_names
    (tensor([1]), ('no', 'yes'))
    """
    if isinstance(result, Mapping) and {"train", "test"} <= set(result):
        result = (result["train"], result["test"])
    if not isinstance(result, tuple | list) or len(result) != 2:
        found = (
            f"{len(result)} values"
            if isinstance(result, tuple | list)
            else f"an object of type {type(result).__name__}"
        )
        raise BadInput(f"the data '{name}' returned {found}: {GIVE_A_PAIR}")
    parts = [_with_columns(part) for part in result]
    class_names = None
    targets = [np.asarray(part[1]) for part, _ in parts if _is_pair(part) and not isinstance(part[1], torch.Tensor)]
    if len(targets) == 2 and all(each.dtype.kind in "OUS" and each.ndim == 1 for each in targets):
        numbers, class_names = number_classes(f"the data '{name}'", np.concatenate(targets))
        bounds = len(targets[0])
        parts = [
            ((part[0], chosen), columns)
            for (part, columns), chosen in zip(parts, (numbers[:bounds], numbers[bounds:]), strict=True)
        ]
    splits = []
    for which, (part, columns) in zip(("training", "test"), parts, strict=True):
        try:
            splits.append(_dataset(name, part, columns, class_names))
        except BadInput as error:
            raise BadInput(f"the {which} data of '{name}': {error}") from error
    return refuse_unseen_classes(f"the data '{name}'", Splits(*splits))


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple | list) and len(part) == 2


def _with_columns(part: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a part without the columns that a triple (x, y, columns) carries, and the columns."""
    if isinstance(part, tuple | list) and len(part) == 3 and isinstance(part[2], Mapping):
        return (part[0], part[1]), part[2]
    return part, {}


def _dataset(name: str, part: Any, columns: Mapping[str, Any], class_names: tuple[str, ...] | None) -> Dataset:
    if isinstance(part, Dataset):
        return part
    data = as_dataset(part, name=name, classes=None if class_names is None else len(class_names))
    if not columns and class_names is None:
        return data
    return dataclasses.replace(data, columns={**data.columns, **columns}, class_names=class_names)
