"""Read new data for a trained model from files: a table, arrays, or pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.data.convert import is_frame
from lamina.data.dataset import Dataset
from lamina.data.images import Pictures, stack_pictures
from lamina.data.preprocessing import TablePreprocessing, as_numbers, is_parquet, read_file
from lamina.data.readers import arrays, folders, table

ARRAYS = (".npz", ".safetensors")


class NewData(NamedTuple):
    """Raw inputs from a file, and the columns of a table of predictions that tell its rows apart."""

    x: Any
    columns: dict[str, list[Any]]


def read_inputs(
    path: Path, options: Mapping[str, Any], like: Dataset, preprocessing: TablePreprocessing | None
) -> NewData:
    """Return the inputs in a CSV or Parquet file, in a file of arrays, in a picture, or in a folder of pictures.

    Args:
        path: The file or folder.
        options: The run's `[data]` section.
        like: A sample of the training data.
        preprocessing: How the training table was prepared, if there was one.
    """
    if not path.exists():
        raise BadInput(f"there is no file or folder '{path}'")
    if path.suffix in (".toml", ".json", ".jsonl") or (path / "config.json").exists():
        what = "a run's folder" if path.is_dir() else f"a {path.suffix} file"
        raise BadInput(f"'{path}' is {what}, not data: give a CSV or Parquet file, arrays, or pictures")
    if path.suffix in ARRAYS or (path.is_dir() and any(path.glob("*.npy"))):
        return _read_arrays(path, options, like)
    if path.is_dir() or path.suffix.lower() in folders.SUFFIXES:
        return _read_pictures(path, options, like)
    frame = read_file(path, ()) if preprocessing is None else preprocessing.read(path)
    # of a CSV file, the columns as they are written: pandas would make 7 of 007
    shown = frame if is_parquet(path) else read_file(path, set(frame.columns)).fillna("")
    return NewData(frame, {str(name): shown[name].tolist() for name in shown.columns})


def _read_arrays(path: Path, options: Mapping[str, Any], like: Dataset) -> NewData:
    held = arrays.read_file(path)
    name = options.get("features", "x") if options.get("name") == "arrays" else "x"
    if isinstance(like.x, dict):
        x: Any = held
    elif name in held or len(held) == 1:
        x = held[name] if name in held else next(iter(held.values()))
    else:
        raise BadInput(f"{path} has no array '{name}' (arrays: {listed(list(held), most=20)})")
    count = len(next(iter(x.values())) if isinstance(x, Mapping) else x)
    return NewData(x, {"row": list(range(count))})


def _read_pictures(path: Path, options: Mapping[str, Any], like: Dataset) -> NewData:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in folders.SUFFIXES)
        if not files:
            raise BadInput(f"'{path}' holds no pictures ({', '.join(folders.SUFFIXES)})")
    size = options.get("size") if options.get("name") == "images" else None
    pictures = Pictures(files, "replace or remove it", size)
    is_colour = not isinstance(like.x, dict | tuple) and like.x.dim() == 4 and like.x.shape[1] == 3
    x = stack_pictures(pictures, len(files), lambda i: str(files[i]), colour=is_colour)
    return NewData(x, {"file": [str(file.relative_to(path) if path.is_dir() else file.name) for file in files]})


def read_labelled(data: Any, options: Mapping[str, Any], like: Dataset, preprocessing: TablePreprocessing) -> Dataset:
    """Return a table with its label column, given as a pandas table or a file, prepared as the training table was."""
    label = options.get("label") if options.get("name") == "table" else None
    if label is None:
        raise BadInput(
            "the run does not know which column is the label: give lamina.data.as_dataset(table, y=…, "
            "preprocessing=run.preprocessing)"
        )
    where, frame = "the table", data
    if not is_frame(data):
        texts = {column.name for column in preprocessing.columns if column.kind != "number"} | {label}
        where, frame = str(data), read_file(Path(data), texts)
    if label not in frame:
        raise BadInput(f"{where} has no column '{label}' with the label (columns: {listed(list(map(str, frame)))})")
    is_typed = is_frame(data) or is_parquet(Path(where))
    y = as_numbers(frame[label], is_typed)
    if like.classes is not None:
        labels = table.identifiers(frame[label], is_typed)
        # the names of classes are whole numbers as text, as `number_classes` has them
        y = np.array([str(int(one)) if labels.dtype.kind == "f" else str(one) for one in labels.tolist()], object)
    elif y is None:
        raise BadInput(f"{where}: the column '{label}' holds text, and the model predicts numbers")
    else:
        y = y.astype(np.float32)
    x = preprocessing.transform(frame, where)
    return Dataset(
        x, y, name=where, class_names=like.class_names, classes=like.classes, preprocessing=preprocessing,
        column_names={"x": tuple(preprocessing.features)},
    )  # fmt: skip
