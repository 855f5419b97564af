"""Read a table of the user's own from CSV or Parquet files: features, a label, and perhaps the client of every row."""

from __future__ import annotations

import codecs
import logging
import re
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

MANY_VALUES = 20  # of a categorical column, also in a short table
PARQUET_SUFFIXES = (".parquet", ".pq")
OTHER_SEPARATORS = (";", "\t", "|", ",")
NUMBER = re.compile(r"([+-]?)(?=\.?[0-9])(0|[1-9][0-9]*)?(\.[0-9]*)?")  # 01 is a code, and no number
BOOLEANS = {"true": "True", "TRUE": "True", "false": "False", "FALSE": "False"}  # the spellings that pandas reads


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
    parts, is_test = _read_rows(root, path, test, split)
    where, frame = parts[0]
    categorical = categorical or []
    given = {"label": [label], "client": [client] if client else [], "split": [split] if split else []}
    given |= {"features": features or [], "categorical": categorical}
    for option, names in given.items():
        for name in names:
            if name not in frame:
                columns = listed([str(each) for each in frame.columns], most=20)
                suggestion = nearest(name, map(str, frame.columns))
                raise BadInput(f"{where} has no column '{name}' (data.{option}){suggestion} (columns: {columns})")
    reserved = {name for option, names in given.items() if option != "features" for name in names}
    if features is None:
        features = remaining_columns(where, frame, reserved)
    twice = [name for name in features if name in reserved] + [name for name in categorical if name == label]
    if twice:
        raise BadInput(f"{where}: column '{twice[0]}' is a feature and has another role as well: name it once")
    if not features and not categorical:
        raise BadInput(f"{where}: no column is left for the features; name some with data.features")
    text_columns = list(dict.fromkeys([*categorical, *given["client"], label]))
    for where_part, part in parts:  # each by itself, to name its file and row
        for name in features:
            _check_numbers(where_part, part, name)
        for name in text_columns:
            without_gaps(where_part, part, name, is_optional=name in categorical)
    texts = _read_texts(parts, text_columns)
    if len(parts) > 1:
        import pandas

        where = " and ".join(where_part for where_part, _ in parts)
        frame = pandas.concat([part[frame.columns] for _, part in parts], ignore_index=True)
    blocks = [np.asarray(frame[name].to_numpy(), np.float64) for name in features]
    if standardise:
        blocks = [_standardised(values, is_test) for values in blocks]
    for name in categorical:
        values, codes = _categories(frame[name], texts[name], is_test)
        if len(values) > max(MANY_VALUES, len(frame) / 10):
            log.warning(
                "%s: column '%s' has %d different values for %d rows, and each becomes a feature; is it no category?",
                where, name, len(values), len(frame),
            )  # fmt: skip
        unseen = np.flatnonzero(codes < 0)
        if len(unseen):
            log.warning(
                "%s: column '%s' has a value that no training row has in %s, such as %s: all its features are 0 there",
                parts[-1][0], name, plural(len(unseen), "test row"), short_repr(texts[name].iloc[unseen[0]]),
            )  # fmt: skip
        blocks.append(codes[:, None] == np.arange(len(values)))
    x = np.concatenate([block.reshape(len(frame), -1) for block in blocks], axis=1).astype(np.float32)
    kept = {client: _identifiers(parts, frame, texts, client)} if client else {}
    y = _plain(frame[label])
    if (task or ("regression" if y.dtype.kind == "f" else "classification")) == "classification":
        y = _identifiers(parts, frame, texts, label)
    return make_splits(where, x, y, is_test, task=task, columns=kept, name=Path(path).stem)


def _read_rows(
    root: Path, path: str, test: str | float | None, split: str | None
) -> tuple[list[tuple[str, Any]], NDArray[np.bool_]]:
    """Return the name and the data frame of every file, and which of all rows are test data."""
    file = own_path(root, path)
    frame, where = _read_file(file), str(file)
    if test is not None and split is not None:
        raise BadInput("data.test and data.split both say which rows are test data: take one out")
    if isinstance(test, str):
        other_file = own_path(root, test)
        other = _read_file(other_file)
        missing = [name for name in frame.columns if name not in other]
        if missing:
            raise BadInput(f"{other_file} has no column '{missing[0]}', which {file} has: give both the same columns")
        return [(where, frame), (str(other_file), other)], mark_test_rows(where, len(frame), len(other))
    if split is None:
        return [(where, frame)], mark_test_rows(where, len(frame), None, test)
    if split not in frame:
        raise BadInput(f"{where} has no column '{split}' (data.split){nearest(split, map(str, frame.columns))}")
    parts = without_gaps(where, frame, split, is_optional=False).astype(str).str.strip().str.lower()
    wrong = sorted(set(parts) - {"train", "test"})
    if wrong:
        raise BadInput(f"{where}: column '{split}' must say 'train' or 'test', found {short_repr(wrong[0])}")
    return [(where, frame)], (parts == "test").to_numpy()


def _read_file(file: Path) -> Any:
    """Return one file as a data frame with at least one row."""
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
            columns = pandas.read_csv(file, sep=_separator(file), nrows=0).columns
            _check_separator(file, columns)
            _check_first_row(file, columns)
            frame = pandas.read_csv(file, sep=_separator(file))
    except BadInput:
        raise
    except ImportError as error:
        raise missing_extra("pyarrow", "table", f"reading {file}") from error
    except UnicodeDecodeError as error:
        encoding = "utf-16" if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin-1"
        raise BadInput(f"{file} is not UTF-8 text: {_how_to_convert(file, f'encoding={encoding!r}')}") from error
    except Exception as error:  # pandas, pyarrow and the decompressors each have their own exceptions
        kind = "Parquet" if is_parquet else "CSV"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file} is not a readable {kind} file ({reason}): it is damaged or of another kind") from error
    if not len(frame):
        raise BadInput(f"{file} has no rows; give at least one sample")
    return frame


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() in PARQUET_SUFFIXES


def _separator(file: Path) -> str:
    return "\t" if ".tsv" in file.suffixes else ","


def _check_separator(file: Path, columns: Any) -> None:
    """Refuse a file whose header is one name with another separator in it."""
    separator = next((each for each in OTHER_SEPARATORS if each in str(columns[0])), None)
    if len(columns) == 1 and separator is not None:
        more = "; add decimal=',' if it holds numbers such as 1,5" if separator == ";" else ""
        advice = _how_to_convert(file, f"sep={separator!r}")
        raise BadInput(f"{file} has {separator!r} between its columns: {advice}{more}")


def _check_first_row(file: Path, columns: Any) -> None:
    """Refuse a file whose first row has more fields than the header: pandas would shift the names to the right."""
    import pandas

    try:
        pandas.read_csv(file, sep=_separator(file), header=None, nrows=2)
    except pandas.errors.ParserError as error:
        if "Expected" not in str(error):
            raise
        raise BadInput(
            f"{file} has more fields in its first row than names in its header ({len(columns)}): name the missing "
            "column in the header, or remove the extra field from all rows"
        ) from error


def _how_to_convert(file: Path, option: str) -> str:
    return f"convert it, as with pandas.read_csv('{file}', {option}).to_csv('converted.csv', index=False)"


def _read_texts(parts: list[tuple[str, Any]], names: list[str]) -> Any:
    """Return columns of all files as text, as the files write them.

    pandas guesses the type of a column for each file: beside a text, 1 stays "1", and beside 0.5 it becomes 1.0.
    """
    import pandas

    texts = []
    for where, frame in parts:
        file = Path(where)
        if _is_parquet(file):
            texts.append(frame[names].astype(str))
        else:
            texts.append(pandas.read_csv(file, sep=_separator(file), usecols=names, dtype=str))
    return pandas.concat([each[names] for each in texts], ignore_index=True)


def _canonical(text: str) -> str:
    """Return the one spelling of a number or a boolean, and any other text as it is.

    >>> [_canonical(text) for text in ("1.0", "+1", "0.50", "01", "1e3", "TRUE", "red")]
    ['1', '1', '0.5', '01', '1e3', 'True', 'red']
    """
    number = NUMBER.fullmatch(text.strip())
    if number is None:
        return BOOLEANS.get(text, text)
    sign, whole, fraction = number.groups()
    if fraction and fraction.strip(".0"):
        return str(float(text))
    digits = whole or "0"
    return f"-{digits}" if sign == "-" and digits != "0" else digits  # not by float, which rounds long numbers


def _canonical_column(texts: Any) -> NDArray[np.str_]:
    spellings = {text: _canonical(text) for text in texts.unique()}
    return np.asarray(texts.map(spellings).to_numpy(dtype=np.str_))


def _categories(column: Any, texts: Any, is_test: NDArray[np.bool_]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the values of a column in the training data, and which of them each row has; -1: none of them."""
    spelled = _canonical_column(texts)
    # The canonical spelling must not change the order of the features, which is that of the values that pandas reads.
    pairs = sorted(set(zip(column.astype(str)[~is_test], spelled[~is_test].tolist(), strict=True)))
    places: dict[str, int] = {}
    for _, value in pairs:
        places.setdefault(value, len(places))
    return list(places), np.array([places.get(value, -1) for value in spelled.tolist()], np.int64)


def _identifiers(parts: list[tuple[str, Any]], frame: Any, texts: Any, name: str) -> NDArray[Any]:
    """Return a column of classes or clients: numbers, or text where two different texts would be the same number."""
    if not any(part[name].dtype.kind in "iufb" for _, part in parts):
        return np.asarray(texts[name].to_numpy(dtype=np.str_))
    values, spelled = _plain(frame[name]), _canonical_column(texts[name])
    is_lossy = values.dtype.kind == "U" or len(np.unique(values)) < len(np.unique(spelled))
    return spelled if is_lossy else values


def _plain(column: Any) -> NDArray[Any]:
    """Return a column as a numpy array of integers, floats or text."""
    kind = column.dtype.kind
    values = column.to_numpy() if kind in "iufb" else column.astype(str).to_numpy(dtype=np.str_)
    return np.asarray(values.astype(np.int64) if kind == "b" else values)


def _check_numbers(where: str, frame: Any, name: str) -> None:
    """Refuse a column of features that holds something else than numbers."""
    import pandas

    column = without_gaps(where, frame, name)
    if column.dtype.kind in "iufb":
        return
    values = column.astype(object)
    try:
        numbers = pandas.to_numeric(values, errors="coerce")
    except OverflowError as error:  # a whole number of hundreds of digits
        row = next(row for row, value in enumerate(values) if _is_beyond_floats(value))
        raise BadInput(
            f"{where}: column '{name}' has a number too large for a float in row {row + 1} (counted from 1 below the "
            "header): scale it, drop the row, or leave the column out"
        ) from error
    wrong = np.flatnonzero(numbers.isna())
    if not 0 < len(wrong) < len(column):
        raise BadInput(
            f"{where}: column '{name}' holds text or dates: list it in data.categorical, or name the numeric columns "
            "in data.features"
        )
    what = f"{where}: column '{name}' holds text in row {wrong[0] + 1} (counted from 1 below the header)"
    more = f", and {plural(len(wrong) - 1, 'other row')}" if len(wrong) > 1 else ""
    advice = f"{more}: correct it or drop the row, or list the column in data.categorical"
    raise BadInput(f"{what}, {short_repr(column.iloc[wrong[0]])}{advice}", without_data=what + advice)


def _is_beyond_floats(value: Any) -> bool:
    try:
        return bool(np.isinf(float(value)))
    except (TypeError, ValueError):
        return False
    except OverflowError:  # an int; a text becomes an infinity
        return True


def _standardised(values: NDArray[np.float64], is_test: NDArray[np.bool_]) -> NDArray[np.float64]:
    spread = values[~is_test].std()
    return np.asarray((values - values[~is_test].mean()) / (spread if spread > 0 else 1.0))
