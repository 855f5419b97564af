"""Read a table of the user's own from CSV or Parquet files: features, a label, and perhaps the client of every row."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, missing_extra, nearest, short_repr
from lamina.base.text import listed, plural
from lamina.data.convert import remaining_columns, without_gaps
from lamina.data.dataset import Splits
from lamina.data.readers.files import own_path
from lamina.data.readers.labels import Task, make_splits, mark_test_rows

log = logging.getLogger(__name__)

PARQUET_SUFFIXES = (".parquet", ".pq")


def read(
    root: Path,
    *,
    path: str,
    label: str,
    test: str | float | None = None,
    split: str | None = None,
    features: list[str] | None = None,
    categorical: list[str] | None = None,
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
        standardise: Give the numeric columns mean 0 and standard deviation 1 in the training data.
        task: ``classification`` or ``regression``; regression for a column of floats if None.
        client: The column that names the client of every row.
    """
    categorical = categorical or []
    given = {"label": [label], "client": [client] if client else [], "split": [split] if split else []}
    given |= {"features": features or [], "categorical": categorical}
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
    twice = [name for name in features if name in reserved] + [name for name in categorical if name == label]
    if twice:
        raise BadInput(f"{where}: column '{twice[0]}' is a feature and has another role as well: name it once")
    if not features and not categorical:
        raise BadInput(f"{where}: no column is left for the features; name some with data.features")
    for where_part, part in parts:  # each by itself, to name its file and row
        for name in features:
            _check_numbers(where_part, part, name)
        for name in (*categorical, *given["client"], label):
            without_gaps(where_part, part, name, is_optional=name in categorical)
    if len(parts) > 1:
        import pandas

        where = " and ".join(where_part for where_part, _ in parts)
        frame = pandas.concat([part[frame.columns] for _, part in parts], ignore_index=True)
    is_typed = all(_is_parquet(Path(where_part)) for where_part, _ in parts)
    blocks = [np.asarray(frame[name].to_numpy(), np.float64) for name in features]
    if standardise:
        blocks = [_standardised(values, is_test) for values in blocks]
    for name in categorical:
        texts, values = _categories(frame[name], is_typed, is_test)
        unseen = np.flatnonzero(~np.isin(texts, values))
        if len(unseen):
            log.warning(
                "%s: column '%s' has a value that no training row has in %s, such as %s: all its features are 0 there",
                parts[-1][0], name, plural(len(unseen), "test row"), short_repr(str(texts[unseen[0]])),
            )  # fmt: skip
        blocks.append(texts[:, None] == np.array(values))
    x = np.concatenate([block.reshape(len(frame), -1) for block in blocks], axis=1).astype(np.float32)
    kept = {client: _identifiers(frame[client], is_typed)} if client else {}
    y = _numbers(frame[label], is_typed)
    if y is None or (task or ("regression" if y.dtype.kind == "f" else "classification")) == "classification":
        y = _identifiers(frame[label], is_typed)
    return make_splits(where, x, y, is_test, task=task, columns=kept, name=Path(path).stem)


def _read_files(root: Path, path: str, test: str | float | None, texts: set[str]) -> list[tuple[str, Any]]:
    """Return the name and the data frame of the file and, if `test` names one, of the file with the test data."""
    files = [own_path(root, each) for each in (path, test) if isinstance(each, str)]
    frames = [_read_file(file, texts) for file in files]
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


def _read_file(file: Path, texts: set[str]) -> Any:
    """Return one file as a data frame with at least one row; of a CSV file, the columns in `texts` stay text.

    pandas would guess their type for each file: beside a word, 1 stays "1", and beside 0.5 it becomes 1.0.
    """
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("pandas", "table", f"reading {file}") from error
    if file.is_dir():
        raise BadInput(f"'{file}' is a folder: data.path must name a CSV or Parquet file")
    is_parquet = _is_parquet(file)
    try:
        if is_parquet:
            frame = pandas.read_parquet(file)
        else:
            separator = "\t" if ".tsv" in file.suffixes else ","
            with warnings.catch_warnings():
                # rows with more fields than the header: pandas would drop the last ones
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                frame = pandas.read_csv(file, sep=separator, index_col=False, dtype=dict.fromkeys(texts, str))
    except ImportError as error:
        raise missing_extra("pyarrow", "table", f"reading {file}") from error
    except Exception as error:  # pandas, pyarrow and the decompressors each have their own exceptions
        kind = "Parquet file" if is_parquet else "CSV file in UTF-8"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file} is not a readable {kind} ({reason}): it is damaged or of another kind") from error
    if not len(frame):
        raise BadInput(f"{file} has no rows; give at least one sample")
    return frame


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() in PARQUET_SUFFIXES


def _numbers(column: Any, is_typed: bool) -> NDArray[Any] | None:
    """Return a column as numbers, in which True is 1; None if some are not, or do not fit 64 bits.

    The text of a CSV file is read as numbers, that of typed data is not.
    """
    import pandas

    if column.dtype.kind not in "iufb":
        try:
            texts = column.replace({"(?i)^true$": "1", "(?i)^false$": "0"}, regex=True)
            column = column if is_typed else pandas.to_numeric(texts)
        except ValueError:
            return None
    values = column.to_numpy()
    return np.asarray(values * 1) if values.dtype.kind in "iufb" else None


def _categories(column: Any, is_typed: bool, is_test: NDArray[np.bool_]) -> tuple[NDArray[np.str_], list[str]]:
    """Return the texts of a column, with 1.0 as 1, and the different ones in the training data: its features."""
    numbers = _numbers(column, is_typed)
    spelled = column.astype(str).str.replace(r"^([+-]?\d+)\.0*$", r"\1", regex=True).to_numpy(dtype=np.str_)
    # Numbers are ordered by the text of their value, so that 01, 02, 10 have the order 1, 10, 2.
    order = spelled if numbers is None else numbers.astype(np.str_)
    pairs = sorted(set(zip(order[~is_test].tolist(), spelled[~is_test].tolist(), strict=True)))
    return spelled, list(dict.fromkeys(value for _, value in pairs))


def _identifiers(column: Any, is_typed: bool) -> NDArray[Any]:
    """Return a column of classes or clients: numbers, or text where two different texts would be the same number."""
    numbers = _numbers(column, is_typed)
    if numbers is None or len(np.unique(numbers)) < column.nunique():
        return np.asarray(column.astype(str).to_numpy(dtype=np.str_))
    return numbers


def _check_numbers(where: str, frame: Any, name: str) -> None:
    """Refuse a column of features that holds something else than numbers."""
    column = without_gaps(where, frame, name)
    if column.dtype.kind in "iufb":
        return
    wrong = [row for row, value in enumerate(column) if not _is_finite(value)] or [0]  # numbers stored as text
    what = f"{where}: column '{name}' holds no number in row {wrong[0] + 1} (counted from 1 below the header)"
    more = f", and {plural(len(wrong) - 1, 'other row')}" if len(wrong) > 1 else ""
    advice = f"{more}: correct it or drop the row, list the column in data.categorical, or leave it out"
    raise BadInput(f"{what}, {short_repr(column.iloc[wrong[0]])}{advice}", without_data=what + advice)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _standardised(values: NDArray[np.float64], is_test: NDArray[np.bool_]) -> NDArray[np.float64]:
    spread = values[~is_test].std()
    return np.asarray((values - values[~is_test].mean()) / (spread if spread > 0 else 1.0))
