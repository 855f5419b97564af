"""Tables as model inputs: numbers, dates and categories, with the statistics that training rows have given them."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.base.errors import BadInput, is_number, is_whole, missing_extra, nearest, short_repr, unknown
from lamina.base.registry import refuse_unknown_options
from lamina.base.text import listed, plural

log = logging.getLogger(__name__)

PARQUET_SUFFIXES = (".parquet", ".pq")
SAVED_INDEX = "Unnamed: 0"  # pandas' name for the first column of a CSV file, if it has none
FORMAT = 1  # of the JSON
Missing = Literal["mean", "most_frequent"]
FILLS: tuple[Missing, ...] = ("mean", "most_frequent")
OPTIONS = ("categorical", "dates", "missing", "standardise", "date_format")


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes features."""

    name: str
    kind: Literal["number", "date", "category"]
    values: tuple[str, ...] = ()  # of a category: one 0/1 feature each
    shift: float = 0.0  # a number v, or a date in days since 1970, becomes (v - shift) / scale
    scale: float = 1.0
    fill: float | str | None = None  # replaces a missing value; None: a missing value is refused
    has_indicator: bool = False  # whether one more feature is 1 where the value is missing

    @property
    def features(self) -> list[str]:
        """The names of the features."""
        names = [f"{self.name}={value}" for value in self.values] if self.kind == "category" else [self.name]
        return [*names, f"{self.name} is missing"] if self.has_indicator else names


@dataclass(frozen=True)
class TablePreprocessing:
    """How tables become model inputs; fitted to training rows, and the same for all later tables.

    >>> import pandas
    >>> rows = pandas.DataFrame({"age": [30, None, 50], "ward": ["a", "b", "a"]})
    >>> fitted = TablePreprocessing.fit(rows, categorical=["ward"], missing="mean")
    >>> fitted.features
    ['age', 'age is missing', 'ward=a', 'ward=b']
    >>> TablePreprocessing.from_json(fitted.to_json()).transform(rows[1:2]).tolist()
    [[40.0, 1.0, 0.0, 1.0]]
    """

    columns: tuple[Column, ...]
    date_format: str | None = None  # None: ISO 8601, as in 2026-01-31 or 2026-01-31T12:00:00

    @property
    def has_statistics(self) -> bool:
        """Whether anything was computed from the rows; numbers that stay as they are have nothing."""
        return any(column != Column(column.name, column.kind) for column in self.columns)

    @classmethod
    def fit(
        cls,
        table: Any,
        features: Sequence[str] | None = None,
        *,
        categorical: Sequence[str] = (),
        dates: Sequence[str] = (),
        missing: Missing | None = None,
        standardise: bool = False,
        date_format: str | None = None,
        rows: NDArray[np.bool_] | None = None,
        where: str = "the table",
    ) -> TablePreprocessing:
        """Return the preprocessing with the statistics of a pandas table.

        Args:
            table: The table with the training rows.
            features: The columns of numbers; all that are not listed elsewhere if None.
            categorical: The columns that become one 0/1 feature for each of their values.
            dates: The columns of dates, which become days since the earliest one. pandas' own dates need not be listed.
            missing: What replaces missing values: "mean" (of a category, the most frequent value) or "most_frequent".
                A column with missing values gets one more feature, which is 1 where the value is missing.
            standardise: Give the columns of numbers and dates mean 0 and standard deviation 1.
            date_format: How dates are written, such as "%d.%m.%Y"; ISO 8601 if None.
            rows: Which rows are training rows; None: all.
            where: What messages call the table.
        """
        rows = np.ones(len(table), np.bool_) if rows is None else rows
        if missing is not None and missing not in FILLS:
            raise unknown("way to fill missing values", str(missing), FILLS)
        table = table.rename(columns=str)
        encoded = [*dates, *categorical]
        numbers = remaining_columns(where, table, encoded) if features is None else list(features)
        names = [*numbers, *encoded]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise BadInput(f"{where}: column '{twice[0]}' is listed twice: it is a number, a date or a category")
        kinds = ["number"] * len(numbers) + ["date"] * len(dates) + ["category"] * len(categorical)
        bare = cls(tuple(map(Column, names, kinds)), date_format)  # type: ignore[arg-type]
        fitted = (bare._fitted(where, table, each, rows, missing, standardise) for each in bare.columns)
        return cls(tuple(fitted), date_format)

    def _fitted(
        self, where: str, table: Any, column: Column, rows: NDArray[np.bool_], missing: Missing | None,
        standardise: bool,
    ) -> Column:  # fmt: skip
        """Return a column with the statistics of the training rows."""
        raw = _column(where, table, column.name)
        if column.kind == "number" and raw.dtype.kind == "M":
            column = dataclasses.replace(column, kind="date")
        if missing is None:
            without_gaps(where, table, column.name)
        present = rows & ~raw.isna().to_numpy()
        if not present.any():
            raise BadInput(f"{where}: column '{column.name}' holds no value in any training row: leave it out")
        has_indicator = bool((rows & ~present).any())
        if column.kind == "category":
            values, texts = _ordered(raw[present]), _spelled(raw[present])
            fill = None if missing is None else max(values, key=lambda value: int((texts == value).sum()))
            return dataclasses.replace(column, values=values, fill=fill, has_indicator=has_indicator)
        numbers = self._numbers(where, raw, column)[present]
        if column.kind == "date":
            column = dataclasses.replace(column, shift=float(numbers.min()))
        if missing is not None:
            different, counts = np.unique(numbers, return_counts=True)
            number = float(numbers.mean() if missing == "mean" else different[counts.argmax()])
            column = dataclasses.replace(column, fill=number, has_indicator=has_indicator)
            numbers = np.concatenate([numbers, np.full(int(rows.sum()) - len(numbers), number)])
        if standardise:
            spread = float(numbers.std())
            column = dataclasses.replace(column, shift=float(numbers.mean()), scale=spread if spread > 0 else 1.0)
        return column

    @property
    def features(self) -> list[str]:
        """The names of the features, in the order of the model's inputs."""
        return [feature for column in self.columns for feature in column.features]

    def transform(self, table: Any, where: str | None = None) -> Tensor:
        """Return the model's inputs [rows, features] for a pandas table, or a CSV or Parquet file.

        Columns are found by name and others are ignored. A category that no training row had gives zeros and a warning.
        """
        if isinstance(table, str | Path):
            where, table = where or str(table), self.read(Path(table))
        where, table = where or "the table", table.rename(columns=str)
        x, start = np.empty((len(table), len(self.features)), np.float32), 0
        for column in self.columns:
            end = start + len(column.features)
            x[:, start:end], start = self._block(where, table, column), end
        return torch.from_numpy(x)

    def read(self, file: Path) -> Any:
        """Return a CSV or Parquet file as a pandas table, with its categories and dates as they are written."""
        return read_file(file, {column.name for column in self.columns if column.kind != "number"})

    def _block(self, where: str, table: Any, column: Column) -> NDArray[np.float64]:
        """Return the features of one column [rows, features]."""
        raw = _column(where, table, column.name)
        is_missing = raw.isna().to_numpy()
        if column.fill is None:
            without_gaps(where, table, column.name)
        elif is_missing.any() and not column.has_indicator:
            count = plural(int(is_missing.sum()), "row")
            log.warning(
                "%s: column '%s' has no value in %s, and had all in training: filled with %s",
                where, column.name, count, short_repr(column.fill),
            )  # fmt: skip
        if column.kind == "category":
            texts = np.where(is_missing, str(column.fill), _spelled(raw))
            unseen = np.flatnonzero(~np.isin(texts, column.values))
            if len(unseen):
                log.warning(
                    "%s: column '%s' has a value that no training row has in %s, such as %s: all its features are 0 "
                    "there", where, column.name, plural(len(unseen), "row"), short_repr(str(texts[unseen[0]])),
                )  # fmt: skip
            block = (texts[:, None] == np.array(column.values)).astype(np.float64)
        else:
            numbers = self._numbers(where, raw, column)
            filled = np.where(is_missing, float(column.fill or 0), numbers)
            block = ((filled - column.shift) / column.scale)[:, None]
        return np.concatenate([block, is_missing[:, None]], axis=1) if column.has_indicator else block

    def _numbers(self, where: str, raw: Any, column: Column) -> NDArray[np.float64]:
        """Return a column of numbers, or of dates in days since 1970, with NaN where a value is missing."""
        if column.kind == "number":
            return _numbers(where, raw, column.name)
        import pandas

        how = self.date_format or "ISO8601"
        dates = pandas.to_datetime(raw, utc=True, errors="coerce", format=None if raw.dtype.kind == "M" else how)
        wrong = np.flatnonzero((dates.isna() & ~raw.isna()).to_numpy())
        if len(wrong):
            form = f"of the form {self.date_format}" if self.date_format else "as 2026-01-31 (see date_format)"
            raise _wrong_values(where, raw, column.name, f"no date {form}", wrong.tolist(), "correct it, drop the row")
        days = (dates - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)
        return np.asarray(days.to_numpy(np.float64))

    def to_json(self) -> str:
        """Return the preprocessing as text, for `from_json`."""
        columns = [dataclasses.asdict(column) for column in self.columns]
        return json.dumps({"format": FORMAT, "date_format": self.date_format, "columns": columns}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> TablePreprocessing:
        """Return the preprocessing that `to_json` wrote."""
        try:
            record = json.loads(text)
            if record["format"] != FORMAT:
                raise ValueError(f"it has format {short_repr(record['format'])}, not {FORMAT}")
            columns = [Column(**{**each, "values": tuple(each["values"])}) for each in record["columns"]]
            return cls(tuple(columns), record["date_format"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"this is no stored preprocessing of a table ({str(error).splitlines()[0]})") from error


def read_frame(
    name: str,
    frame: Any,
    x: Sequence[str] | str | None,
    y: str | None,
    columns: Sequence[str],
    preprocessing: TablePreprocessing | Mapping[str, Any] | None,
) -> tuple[Tensor, Any, dict[str, NDArray[Any]], TablePreprocessing]:
    """Return the features, the targets and the other columns of a pandas table, and how the features were made."""
    frame = frame.rename(columns=str)  # numbers, unless somebody named them
    names = list(frame.columns)
    y = str(y) if is_whole(y) else y
    if not isinstance(y, str):
        advice = "as_dataset(table, y=…)" if y is None else "one of them: several targets are given as arrays, (x, y)"
        raise BadInput(f"{name}: name the target column, {advice} (columns: {listed(names)})")
    repeated = [column for column in names if names.count(column) > 1]
    if repeated:
        raise BadInput(f"{name}: the table has two columns '{repeated[0]}': rename or drop one")
    wanted = [x] if isinstance(x, str) else list(x or ())
    options: Mapping[str, Any] = {} if isinstance(preprocessing, TablePreprocessing) else preprocessing or {}
    refuse_unknown_options("preprocessing", options, OPTIONS)
    encoded = {each for option in ("categorical", "dates") for each in options.get(option, ())}
    for column in (*wanted, y, *columns):
        if column not in names:
            raise BadInput(f"{name}: no column '{column}'{nearest(column, names)} (columns: {listed(names)})")
    without_gaps(name, frame, y, is_optional=False)
    if not isinstance(preprocessing, TablePreprocessing):
        numbers = wanted or remaining_columns(name, frame, {y, *columns, *encoded})
        preprocessing = TablePreprocessing.fit(frame, numbers, **options, where=name)
    features = preprocessing.transform(frame, where=name)
    used = {y, *(column.name for column in preprocessing.columns)}
    others = {column: frame[column].to_numpy() for column in names if column not in used}
    return features, frame[y].to_numpy(), others, preprocessing


def remaining_columns(where: str, frame: Any, reserved: Collection[str]) -> list[Any]:
    """Return the columns of a table that have no other role: its features; the row numbers that pandas saves are none.

    `where` names the table in messages.
    """
    names = [column for column in frame.columns if column not in reserved]
    if SAVED_INDEX in names and frame[SAVED_INDEX].dtype.kind == "i":
        log.warning(
            "%s: the first column has no name and holds row numbers, as pandas saves them: it is not used as a feature",
            where,
        )
        names.remove(SAVED_INDEX)
    return names


def without_gaps(where: str, frame: Any, name: str, *, is_optional: bool = True) -> Any:
    """Return a column of a table; refuse it if values are missing or infinite.

    `where` names the table in messages, and `is_optional` says whether the column may be left out, as features may.
    """
    column = frame[name]
    missing = np.flatnonzero(column.isna().to_numpy())
    if len(missing):
        advice = "fill it (missing = 'mean'), drop the row, or leave the column out"
        raise _odd_rows(where, name, "a missing value", missing, advice if is_optional else "fill it, or drop the row")
    if column.dtype.kind == "f":
        _refuse_infinite(where, name, column.to_numpy(np.float64))
    return column


def _refuse_infinite(where: str, name: str, values: NDArray[np.float64]) -> None:
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise _odd_rows(where, name, "an infinite value", infinite, "correct it, or drop the row")


def _odd_rows(where: str, name: str, what: str, rows: Sequence[int] | NDArray[Any], advice: str) -> BadInput:
    more = f", and {plural(len(rows) - 1, 'other row')}" if len(rows) > 1 else ""
    row = f"row {rows[0] + 1} (counted from 1 below the header)"
    return BadInput(f"{where}: column '{name}' has {what} in {row}{more}: {advice}")


def read_file(file: Path, texts: Collection[str]) -> Any:
    """Return one file as a data frame with at least one row; of a CSV file, the columns in `texts` stay text.

    pandas would guess their type for each file: beside a word, 1 stays "1", and beside 0.5 it becomes 1.0.
    """
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("pandas", "table", f"reading {file}") from error
    if file.is_dir():
        raise BadInput(f"'{file}' is a folder: data.path must name a CSV or Parquet file")
    if not file.exists():
        raise BadInput(f"there is no file '{file}'")
    parquet = is_parquet(file)
    try:
        if parquet:
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
        kind = "Parquet file" if parquet else "CSV file in UTF-8"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file} is not a readable {kind} ({reason}): it is damaged or of another kind") from error
    if not len(frame):
        raise BadInput(f"{file} has no rows; give at least one sample")
    return frame


def is_parquet(file: Path) -> bool:
    """Return whether a file's name ends as those of Parquet files, whose values have types."""
    return file.suffix.lower() in PARQUET_SUFFIXES


def as_numbers(column: Any, is_typed: bool) -> NDArray[Any] | None:
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


def _column(where: str, table: Any, name: str) -> Any:
    if name not in table:
        names = list(table.columns)
        raise BadInput(f"{where}: no column '{name}'{nearest(name, names)} (columns: {listed(names, most=20)})")
    if list(table.columns).count(name) > 1:
        raise BadInput(f"{where}: two columns have the name '{name}': rename or drop one")
    return table[name]


def _numbers(where: str, column: Any, name: str) -> NDArray[np.float64]:
    """Return a column as floats, with NaN where a value is missing; refuse one that holds something else than numbers.

    Infinite numbers are refused as well.
    """
    present = np.flatnonzero(column.notna().to_numpy())
    if column.dtype.kind not in "iufb" and not all(is_number(column.iloc[row]) for row in present):
        wrong = [int(row) for row in present if not _is_finite(column.iloc[row])]
        if not wrong:
            advice = f"convert it, pandas.to_numeric(table[{name!r}]), list the column in categorical"
            raise _wrong_values(where, column, name, "numbers as text", [int(present[0])], advice)
        advice = "correct it or drop the row, list the column in categorical or dates"
        raise _wrong_values(where, column, name, "no number", wrong, advice)
    values = np.asarray(column.to_numpy(np.float64, na_value=np.nan))
    _refuse_infinite(where, name, values)
    return values


def _wrong_values(where: str, column: Any, name: str, problem: str, rows: Sequence[int], advice: str) -> BadInput:
    what = f"{where}: column '{name}' holds {problem} in row {rows[0] + 1} (counted from 1 below the header)"
    more = f", and {plural(len(rows) - 1, 'other row')}" if len(rows) > 1 else ""
    rest = f"{more}: {advice}, or leave the column out"
    return BadInput(f"{what}, {short_repr(column.iloc[rows[0]])}{rest}", without_data=what + rest)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _spelled(column: Any) -> NDArray[np.str_]:
    """Return the texts of a column, with 1.0 as 1."""
    return np.asarray(
        column.astype(str).str.replace(r"^([+-]?\d+)\.0*$", r"\1", regex=True).to_numpy(dtype=np.str_, na_value="")
    )


def _ordered(column: Any) -> tuple[str, ...]:
    """Return the different texts of a column in order.

    Numbers are ordered by the text of their value, so that 01, 02, 10 have the order 1, 10, 2.
    """
    spelled, numbers = _spelled(column), as_numbers(column, is_typed=False)
    order = spelled if numbers is None else numbers.astype(np.str_)
    pairs = sorted(set(zip(order.tolist(), spelled.tolist(), strict=True)))
    return tuple(dict.fromkeys(value for _, value in pairs))
