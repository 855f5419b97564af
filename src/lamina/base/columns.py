"""Rows of numbers stored by column: a million rounds take a hundred megabytes, as dicts they take two thousand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, float | int]


@dataclass(frozen=True)
class Column:
    """The values of one name, a whole number or a float for every row."""

    values: NDArray[Any]
    has_value: NDArray[np.bool_] | None = None  # None: every row has one

    def floats(self) -> NDArray[np.float64]:
        """Return the values as floats, NaN where a row has none."""
        floats = self.values.astype(np.float64)
        if self.has_value is not None:
            floats[~self.has_value] = np.nan
        return floats

    def part(self, rows: slice) -> Column:
        """Return the column of some of the rows."""
        return Column(self.values[rows], None if self.has_value is None else self.has_value[rows])


class Columns(Sequence[Row]):
    """A table that behaves like a list of dicts; rows may lack names that others have.

    >>> table = Columns.from_rows([{"round": 1, "loss": 0.5}, {"round": 2}])
    >>> table[1], table.floats("loss").tolist()
    ({'round': 2}, [0.5, nan])
    """

    def __init__(self, columns: Mapping[str, Column] | None = None, length: int = 0) -> None:
        self._columns, self._length = dict(columns or {}), length

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, float | int | None]]) -> Columns:
        """Return the table of some rows; None stands for NaN. Raise an error for anything that is not a finite number.

        The error is a TypeError, a ValueError or an OverflowError.
        """
        layouts = dict.fromkeys(map(tuple, rows))
        names = dict.fromkeys(itertools.chain.from_iterable(layouts))
        if len(layouts) == 1:  # several times faster
            by_column: Iterable[Sequence[Any]] = zip(*map(dict.values, rows), strict=True)
        else:
            by_column = ([row.get(name, _MISSING) for row in rows] for name in names)
        return cls(dict(zip(names, map(_column, by_column), strict=True)), len(rows))

    @classmethod
    def joined(cls, tables: Sequence[Columns]) -> Columns:
        """Return the rows of several tables as one table."""
        names = dict.fromkeys(name for table in tables for name in table.names)
        return cls({name: _join(name, tables) for name in names}, sum(map(len, tables)))

    @property
    def names(self) -> list[str]:
        """Return the names in the order in which they first appear."""
        return list(self._columns)

    def floats(self, name: str) -> NDArray[np.float64]:
        """Return one column, NaN where a row has no such value."""
        column = self._columns.get(name)
        return np.full(self._length, np.nan) if column is None else column.floats()

    def cells(self, name: str) -> list[float | int | None]:
        """Return one column, None where a row has no such value."""
        column = self._columns.get(name)
        if column is None:
            return [None] * self._length
        values: list[float | int | None] = column.values.tolist()
        if column.has_value is None:
            return values
        return [value if there else None for value, there in zip(values, column.has_value.tolist(), strict=True)]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Columns: ...
    def __getitem__(self, index: int | slice) -> Row | Columns:
        if isinstance(index, slice):
            length = len(range(*index.indices(self._length)))
            return Columns({name: column.part(index) for name, column in self._columns.items()}, length)
        place = range(self._length)[index]
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[Row]:
        names = self.names
        if not names:
            yield from ({} for _ in range(self._length))
            return
        for row in zip(*map(self.cells, names), strict=True):
            yield {name: value for name, value in zip(names, row, strict=True) if value is not None}


_MISSING: Any = object()  # in place of a value that a row does not have; None is a value that is not finite


def _column(values: Sequence[Any]) -> Column:
    """Return a column of values as they are in rows."""
    has_value = None
    kinds = set(map(type, values))
    if type(_MISSING) in kinds:
        has_value = np.array([value is not _MISSING for value in values])
        values = [0 if value is _MISSING else value for value in values]
        kinds -= {type(_MISSING)}
    if not kinds <= {int, float, type(None)}:
        raise TypeError("a row holds something that is not a number")
    if kinds == {int}:
        with contextlib.suppress(OverflowError):  # a whole number of more than 64 bits becomes a float
            return Column(np.array(values, np.int64), has_value)
    floats = np.array(values, np.float64)  # None becomes NaN
    not_finite = values.count(None) if type(None) in kinds else 0
    if np.count_nonzero(np.isfinite(floats)) + not_finite != len(values):
        raise ValueError("a row holds a number that is not finite")
    return Column(floats, has_value)


def _join(name: str, tables: Sequence[Columns]) -> Column:
    """Return the column of a name in several tables, one after the other."""
    parts = [table._columns.get(name) or _without_values(len(table)) for table in tables]
    values = np.concatenate([part.values for part in parts])
    if all(part.has_value is None for part in parts):
        return Column(values)
    everywhere = [np.ones(len(part.values), bool) if part.has_value is None else part.has_value for part in parts]
    return Column(values, np.concatenate(everywhere))


def _without_values(length: int) -> Column:
    """Return the column of a name that no row has."""
    return Column(np.zeros(length, np.int8), np.zeros(length, bool))
