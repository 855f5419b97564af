"""Read arrays of the user's own from .npz and .safetensors files, and from folders of .npy files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed, plural
from lamina.data.dataset import Splits
from lamina.data.mapped import Mapped, is_mapped
from lamina.data.readers.files import own_path
from lamina.data.readers.labels import Task, make_splits, mark_test_rows
from lamina.objective.losses import IGNORED

Arrays = dict[str, NDArray[Any]]
SAFETENSORS_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


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
    mmap: bool = False,
) -> Splits:
    """Read arrays.

    A file with test data of its own holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``. Further arrays with one
    value per sample become columns of the training data; there, ``site_train`` is the column ``site``.

    Args:
        root: The folder that relative paths start at.
        path: The .npz or .safetensors file, or a folder with an .npy file for each array.
        features: The name of the array with the inputs, without ``_train`` and ``_test``.
        label: The name of the array with the labels or targets.
        test: A file with the test data, or the fraction of the samples to hold out: 0.2 if there is no ``x_test``.
        task: ``classification`` or ``regression``; regression for floats if None, even whole ones.
        ignore_index: The integer that marks pixels or tokens without a label.
        client: The name of the array that names the client of every training sample.
        mmap: Leave the inputs on disk, in a .safetensors file or .npy files, and read batches when they are used.
    """
    file = own_path(root, path)
    where, where_test, arrays, held_out = str(file), str(test), read_file(file, mmap), None
    if f"{features}_train" in arrays and features not in arrays:
        if test is not None:
            raise BadInput(f"{file} holds '{features}_train': take data.test out, its test data are '{features}_test'")
        where, where_test = (f"{file} (of its arrays, those with {end})" for end in ("_train", "_test"))
        arrays, held_out = (
            {name.removesuffix(end): values for name, values in arrays.items() if name.endswith(end)}
            for end in ("_train", "_test")
        )
    elif isinstance(test, str):
        held_out = read_file(own_path(root, test), mmap)
    _check_arrays(where, arrays, [features, label, *([client] if client else [])])
    if held_out is not None:
        _check_arrays(where_test, held_out, [features, label])
    samples = len(arrays[features])
    is_test = mark_test_rows(str(file), samples, None if held_out is None else len(held_out[features]), test)
    for part in (arrays, *([held_out] if held_out else [])):
        part[label] = np.array(part[label])  # only the inputs stay on disk
    x, y = (_joined(str(file), name, arrays, held_out) for name in (features, label))
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    splits = make_splits(str(file), x, y, is_test, task=task, ignore_index=ignore_index, name=file.stem)
    others = {n: np.array(v) for n, v in arrays.items() if n not in (features, label) and v.shape == (samples,)}
    columns = {name: values[~is_test[:samples]] for name, values in others.items()}
    return splits._replace(train=dataclasses.replace(splits.train, columns=columns))


def read_file(file: Path, mmap: bool = False) -> Arrays:
    """Return all arrays of a file by name; nothing is unpickled."""
    if not file.is_dir() and file.suffix not in (".npz", ".safetensors"):
        raise BadInput(f"'{file}' is neither a .npz nor a .safetensors file, nor a folder of .npy files")
    if mmap and file.suffix == ".npz":
        raise BadInput(
            f"{file} cannot be memory-mapped: save every array in a folder (numpy.save('{file.stem}/x.npy', x))"
        )
    try:
        if file.is_dir():
            files = sorted(file.glob("*.npy"))
            return {f.stem: np.load(f, mmap_mode="r" if mmap else None, allow_pickle=False) for f in files}
        if file.suffix == ".safetensors" and mmap:
            return _map_safetensors(file)
        if file.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(file))
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except Exception as error:  # zip, zlib, numpy and safetensors each have their own exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file} is not a readable {file.suffix or '.npy'} file ({reason}): write it again") from error


def _map_safetensors(file: Path) -> Arrays:
    """Return the arrays of a .safetensors file without reading them."""
    from safetensors import safe_open

    with safe_open(file, "numpy") as checked:  # refuses a damaged file
        names = list(checked.keys())
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    arrays = {}
    for name in names:
        about, start = header[name], 8 + length + header[name]["data_offsets"][0]
        kind, shape = np.dtype(SAFETENSORS_TYPES[about["dtype"]]), tuple(about["shape"])
        arrays[name] = np.memmap(file, kind, "r", start, shape) if all(shape) else np.empty(shape, kind)
    return arrays


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
        if is_mapped(values) and name == names[0]:
            continue  # a `Dataset` checks it, a few samples at a time
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            sample = int(np.argwhere(~finite)[0, 0])
            raise BadInput(f"{where}: sample {sample} of '{name}' holds a NaN or an infinity; clean or drop it")


def _joined(where: str, name: str, arrays: Arrays, held_out: Arrays | None) -> Any:
    if held_out is None:
        return Mapped.of(where, name, arrays[name]) if is_mapped(arrays[name]) else arrays[name]
    train, test = arrays[name], held_out[name]
    if train.shape[1:] != test.shape[1:] or train.dtype.kind != test.dtype.kind:
        kinds = [f"{list(values.shape[1:])} {values.dtype}" for values in (train, test)]
        raise BadInput(
            f"{where}: samples of '{name}' are {kinds[0]} in the training data and {kinds[1]} in the test data: give "
            "all of them one shape and type"
        )
    if is_mapped(train):
        return Mapped.joined([Mapped.of(where, name, part) for part in (train, test)])
    return np.concatenate([train, test])
