"""Read arrays of the user's own from .npz and .safetensors files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed, plural
from lamina.data.dataset import Splits
from lamina.data.readers.files import own_path
from lamina.data.readers.labels import Task, make_splits, mark_test_rows
from lamina.objective.losses import IGNORED

Arrays = dict[str, NDArray[Any]]


def read(
    root: Path,
    *,
    path: str,
    features: str = "x",
    label: str = "y",
    test: str | float | None = None,
    task: Task | None = None,
    ignore_index: int = IGNORED,
    client: str | None = None,
) -> Splits:
    """Read arrays.

    A file with test data of its own holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``. Further arrays with one
    value per sample become columns of the training data; there, ``site_train`` is the column ``site``.

    Args:
        root: The folder that relative paths start at.
        path: The .npz or .safetensors file.
        features: The name of the array with the inputs, without ``_train`` and ``_test``.
        label: The name of the array with the labels or targets.
        test: A file with the test data, or the fraction of the samples to hold out: 0.2 if there is no ``x_test``.
        task: ``classification`` or ``regression``; regression for floats if None, even whole ones.
        ignore_index: The integer that marks pixels or tokens without a label.
        client: The name of the array that names the client of every training sample.
    """
    file = own_path(root, path)
    where, where_test, arrays, held_out = str(file), str(test), read_file(file), None
    if f"{features}_train" in arrays and features not in arrays:
        if test is not None:
            raise BadInput(f"{file} holds '{features}_train': take data.test out, its test data are '{features}_test'")
        where, where_test = (f"{file} (of its arrays, those with {end})" for end in ("_train", "_test"))
        arrays, held_out = (
            {name.removesuffix(end): values for name, values in arrays.items() if name.endswith(end)}
            for end in ("_train", "_test")
        )
    elif isinstance(test, str):
        held_out = read_file(own_path(root, test))
    _check_arrays(where, arrays, [features, label, *([client] if client else [])])
    if held_out is not None:
        _check_arrays(where_test, held_out, [features, label])
    samples = len(arrays[features])
    is_test = mark_test_rows(str(file), samples, None if held_out is None else len(held_out[features]), test)
    x, y = (_joined(str(file), name, arrays, held_out) for name in (features, label))
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    splits = make_splits(str(file), x, y, is_test, task=task, ignore_index=ignore_index, name=file.stem)
    others = {n: v for n, v in arrays.items() if n not in (features, label) and v.shape == (samples,)}
    columns = {name: values[~is_test[:samples]] for name, values in others.items()}
    return splits._replace(train=dataclasses.replace(splits.train, columns=columns))


def read_file(file: Path) -> Arrays:
    """Return all arrays of a file by name; nothing is unpickled."""
    if file.suffix not in (".npz", ".safetensors"):
        raise BadInput(f"'{file}' is neither a .npz nor a .safetensors file")
    try:
        if file.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(file))
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except Exception as error:  # zip, zlib, numpy and safetensors each have their own exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file} is not a readable {file.suffix} file ({reason}): write it again") from error


def _check_arrays(where: str, arrays: Arrays, names: list[str]) -> None:
    """Refuse a file that lacks one of these arrays, or in which they do not have one row of numbers per sample."""
    for name in names:
        if name not in arrays:
            hint = f"{nearest(name, arrays)} (arrays: {listed(list(arrays), most=20) or 'none'})"
            raise BadInput(
                f"{where}: there is no array '{name}'{hint}; correct data.features, data.label or data.client"
            )
        values, features = arrays[name], arrays[names[0]]
        if not values.ndim or not len(values):
            raise BadInput(f"{where}: the array '{name}' is empty; give at least one sample")
        if len(values) != len(features):
            counts = f"{plural(len(values), 'row')}, and '{names[0]}' has {len(features)}"
            raise BadInput(f"{where}: the array '{name}' has {counts}; give one row per sample")
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            sample = int(np.argwhere(~finite)[0, 0])
            raise BadInput(f"{where}: sample {sample} of '{name}' holds a NaN or an infinity; clean or drop it")


def _joined(where: str, name: str, arrays: Arrays, held_out: Arrays | None) -> NDArray[Any]:
    if held_out is None:
        return arrays[name]
    train, test = arrays[name], held_out[name]
    if train.shape[1:] != test.shape[1:] or train.dtype.kind != test.dtype.kind:
        kinds = [f"{list(values.shape[1:])} {values.dtype}" for values in (train, test)]
        raise BadInput(
            f"{where}: samples of '{name}' are {kinds[0]} in the training data and {kinds[1]} in the test data: give "
            "all of them one shape and type"
        )
    return np.concatenate([train, test])
