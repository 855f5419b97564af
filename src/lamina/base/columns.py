"""Rows of numbers stored by column: a million rounds take a hundred megabytes, as dicts they take two thousand."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, float | int]
NOT_FINITE = type(None)  # in place of NaN and infinity, which JSON lacks
MISSING: Any = object()  # in place of a value that a row does not have


@dataclass(frozen=True)
class Column:
    """The values of one name, whole numbers or floats, with room for more at the end."""

    values: NDArray[Any]
    has_value: NDArray[np.bool_] | None = None  # None: every row has one

    @classmethod
    def of(cls, values: Sequence[Any]) -> Column:
        """Return a column of values as they are in rows; refuse anything but finite numbers and None."""
        has_value = None
        kinds = set(map(type, values))
        if type(MISSING) in kinds:
            has_value = np.array([value is not MISSING for value in values])
            values = [0 if value is MISSING else value for value in values]
            kinds -= {type(MISSING)}
        if not kinds <= {int, float, NOT_FINITE}:
            raise TypeError("a row holds something that is not a number")
        if kinds == {int}:
            with contextlib.suppress(OverflowError):  # a whole number of more than 64 bits becomes a float
                return cls(_smallest(np.array(values, np.int64)), has_value)
        floats = np.array(values, np.float64)  # None becomes NaN
        not_finite = values.count(None) if NOT_FINITE in kinds else 0
        if np.count_nonzero(np.isfinite(floats)) + not_finite != len(values):
            raise ValueError("a row holds a number that is not finite")
        return cls(floats, has_value)

    @classmethod
    def without_values(cls, length: int) -> Column:
        """Return the column of a name that no row has."""
        return cls(np.zeros(length, np.int8), np.zeros(length, bool))

    def part(self, rows: slice) -> Column:
        """Return the column of some of the rows."""
        return Column(self.values[rows], None if self.has_value is None else self.has_value[rows])

    def extended(self, length: int, other: Column) -> Column:
        """Return the first `length` rows of this column and then those of another."""
        values = _append(self.values, length, other.values)
        if self.has_value is None and other.has_value is None:
            return Column(values)
        ours, theirs = (
            np.ones(len(one.values), bool) if one.has_value is None else one.has_value for one in (self, other)
        )
        return Column(values, _append(ours, length, theirs))


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
        names = list(rows[0]) if rows else []
        by_column: Iterable[Sequence[Any]]
        if len(names) > 1 and set(map(len, rows)) == {len(names)}:
            with contextlib.suppress(KeyError):  # all rows have the same names, as is usual: several times faster
                by_column = zip(*map(operator.itemgetter(*names), rows), strict=True)
                return cls(dict(zip(names, map(Column.of, by_column), strict=True)), len(rows))
        names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        by_column = ([row.get(name, MISSING) for row in rows] for name in names)
        return cls(dict(zip(names, map(Column.of, by_column), strict=True)), len(rows))

    def extend(self, other: Columns) -> None:
        """Append the rows of another table. Parts of this one that were taken before do not change."""
        for name in dict.fromkeys([*self._columns, *other._columns]):
            ours = self._columns.get(name) or Column.without_values(self._length)
            theirs = other._columns.get(name) or Column.without_values(len(other))
            self._columns[name] = ours.extended(self._length, theirs)
        self._length += len(other)

    @property
    def names(self) -> list[str]:
        """Return the names in the order in which they first appear."""
        return list(self._columns)

    def floats(self, name: str) -> NDArray[np.float64]:
        """Return one column, NaN where a row has no such value."""
        if name not in self._columns:
            return np.full(self._length, np.nan)
        column = self._columns[name].part(slice(self._length))
        floats = column.values.astype(np.float64)
        if column.has_value is not None:
            floats[~column.has_value] = np.nan
        return floats

    def cells(self, name: str) -> list[float | int | None]:
        """Return one column, None where a row has no such value."""
        if name not in self._columns:
            return [None] * self._length
        column = self._columns[name].part(slice(self._length))
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
            rows = range(self._length)[index]
            part = slice(rows.start, None if rows.stop < 0 else rows.stop, rows.step)
            return Columns({name: column.part(part) for name, column in self._columns.items()}, len(rows))
        place = range(self._length)[index]
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[Row]:
        names = self.names
        for row in zip(*map(self.cells, names), strict=True):
            yield {name: value for name, value in zip(names, row, strict=True) if value is not None}


def _smallest(values: NDArray[np.int64]) -> NDArray[Any]:
    """Return whole numbers with 32 bits if they fit."""
    return values.astype(np.int32) if len(values) and abs(values).max() < 1 << 31 else values


def _append(values: NDArray[Any], length: int, more: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose first numbers are `length` of the given ones and then more, with room for as many again.

    The given array is only written to behind `length`, and only if it has room and the type for all.
    """
    kind, needed = np.promote_types(values.dtype, more.dtype), length + len(more)
    if len(values) < needed or values.dtype != kind:
        enlarged = np.empty(max(needed, 2 * length), kind)  # memory that is never written to takes no room
        enlarged[:length] = values[:length]
        values = enlarged
    values[length:needed] = more
    return values
