"""Read a table of the user's own from CSV or Parquet files: features, a label, and perhaps the client of every row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.base.errors import BadInput, nearest, short_repr
from lamina.base.text import listed
from lamina.data.dataset import Splits
from lamina.data.preprocessing import (
    Missing,
    TablePreprocessing,
    as_numbers,
    is_parquet,
    read_file,
    remaining_columns,
    without_gaps,
)
from lamina.data.readers.files import own_path
from lamina.data.readers.labels import Task, make_splits, mark_test_rows


def read(
    root: Path,
    *,
    path: str,
    label: str,
    test: str | float | None = None,
    split: str | None = None,
    features: list[str] | None = None,
    categorical: list[str] | None = None,
    dates: list[str] | None = None,
    date_format: str | None = None,
    missing: Missing | None = None,
    standardise: bool = False,
    task: Task | None = None,
    client: str | None = None,
) -> Splits:
    """Read a table.

    Args:
        root: The folder that relative paths start at.
        path: The CSV (``.csv``, ``.tsv``, also compressed) or Parquet file.
        label: The column with the class or the target of every row.
        test: A file with the test data, or the fraction of the rows to hold out (0.2 if there is no `split`).
        split: The column that says of every row whether it belongs to ``train`` or ``test``.
        features: The numeric columns; all other columns if None.
        categorical: The columns to encode as one 0/1 feature for each value that occurs in the training data. 1 and
            1.0 are the same value, 1 and 01 are not.
        dates: The columns of dates, which become days since the earliest one in the training data.
        date_format: How dates are written, such as ``%d.%m.%Y``; ISO 8601 (``2026-01-31``) if None.
        missing: Fill missing values of features with the ``mean`` of the training rows (of a category, the most
            frequent value) or with the ``most_frequent`` value; a further 0/1 feature marks them. None: refuse them.
        standardise: Give the columns of numbers and dates mean 0 and standard deviation 1 in the training data.
        task: ``classification`` or ``regression``; regression for a column of floats if None.
        client: The column that names the client of every row.
    """
    categorical, dates = categorical or [], dates or []
    given = {"label": [label], "client": [client] if client else [], "split": [split] if split else []}
    given |= {"features": features or [], "categorical": categorical, "dates": dates}
    reserved = {name for option, names in given.items() if option != "features" for name in names}
    parts = _read_files(root, path, test, reserved)
    where, frame = parts[0]
    for option, names in given.items():
        for name in names:
            if name not in frame:
                columns = listed([str(each) for each in frame.columns], most=20)
                suggestion = nearest(name, map(str, frame.columns))
                raise BadInput(f"{where} has no column '{name}' (data.{option}){suggestion} (columns: {columns})")
    is_test = _test_rows(parts, test, split)
    if features is None:
        features = remaining_columns(where, frame, reserved)
    twice = [name for name in features if name in reserved] + [name for name in (*categorical, *dates) if name == label]
    if twice:
        raise BadInput(f"{where}: column '{twice[0]}' is a feature and has another role as well: name it once")
    if not features and not categorical and not dates:
        raise BadInput(f"{where}: no column is left for the features; name some with data.features")
    for where_part, part in parts:  # each by itself, to name its file and row
        for name in (*given["client"], label):
            without_gaps(where_part, part, name, is_optional=False)
    preprocessing = TablePreprocessing.fit(
        frame, features, categorical=categorical, dates=dates, missing=missing, standardise=standardise,
        date_format=date_format, rows=~is_test[: len(frame)], where=where,
    )  # fmt: skip
    x = torch.cat([preprocessing.transform(part, where_part) for where_part, part in parts])
    if len(parts) > 1:
        import pandas

        where = " and ".join(where_part for where_part, _ in parts)
        frame = pandas.concat([part[frame.columns] for _, part in parts], ignore_index=True)
    is_typed = all(is_parquet(Path(where_part)) for where_part, _ in parts)
    kept = {client: identifiers(frame[client], is_typed)} if client else {}
    y = as_numbers(frame[label], is_typed)
    if y is None or (task or ("regression" if y.dtype.kind == "f" else "classification")) == "classification":
        y = identifiers(frame[label], is_typed)
    splits = make_splits(where, x.numpy(), y, is_test, task=task, columns=kept, name=Path(path).stem)
    return Splits(*(dataclasses.replace(data, preprocessing=preprocessing) for data in splits))


def _read_files(root: Path, path: str, test: str | float | None, texts: set[str]) -> list[tuple[str, Any]]:
    """Return the name and the data frame of the file and, if `test` names one, of the file with the test data."""
    files = [own_path(root, each) for each in (path, test) if isinstance(each, str)]
    frames = [read_file(file, texts) for file in files]
    missing = [name for name in frames[0].columns if name not in frames[-1]]
    if missing:
        raise BadInput(f"{files[1]} has no column '{missing[0]}', which {files[0]} has: give both the same columns")
    return list(zip(map(str, files), frames, strict=True))


def _test_rows(parts: list[tuple[str, Any]], test: str | float | None, split: str | None) -> NDArray[np.bool_]:
    """Return which of all rows are test data."""
    where, frame = parts[0]
    if split is None:
        return mark_test_rows(where, len(frame), len(parts[1][1]) if len(parts) > 1 else None, test)
    if test is not None:
        raise BadInput("data.test and data.split both say which rows are test data: take one out")
    rows = without_gaps(where, frame, split, is_optional=False).astype(str).str.strip().str.lower()
    wrong = sorted(set(rows) - {"train", "test"})
    if wrong:
        raise BadInput(f"{where}: column '{split}' must say 'train' or 'test', found {short_repr(wrong[0])}")
    return np.asarray(rows == "test")


def identifiers(column: Any, is_typed: bool) -> NDArray[Any]:
    """Return a column of classes or clients: numbers, or text where two different texts would be the same number."""
    numbers = as_numbers(column, is_typed)
    if numbers is None or len(np.unique(numbers)) < column.nunique():
        return np.asarray(column.astype(str).to_numpy(dtype=np.str_))
    return numbers
