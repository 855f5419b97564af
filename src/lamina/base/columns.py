"""Rows of numbers stored by column: a million rounds take a hundred megabytes, as dicts they take two thousand."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, float | int]
Column = np.ma.MaskedArray[Any, Any]  # of whole numbers or floats; a row that lacks the value is masked
NOT_FINITE = type(None)  # in place of NaN and infinity, which JSON lacks
MISSING: Any = object()  # in place of a value that a row does not have


class Columns(Sequence[Row]):
    """A table that behaves like a list of dicts; rows may lack names that others have. It does not change.

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
        if len(names) > 1 and set(map(len, rows)) == {len(names)}:
            with contextlib.suppress(KeyError):  # all rows have the same names, as is usual: several times faster
                by_column = zip(*map(operator.itemgetter(*names), rows), strict=True)
                return cls(dict(zip(names, map(_column, by_column), strict=True)), len(rows))
        names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        return cls({name: _column([row.get(name, MISSING) for row in rows]) for name in names}, len(rows))

    @classmethod
    def joined(cls, tables: Sequence[Columns]) -> Columns:
        """Return a table with the rows of several."""
        names = dict.fromkeys(itertools.chain.from_iterable(table.names for table in tables))
        join: Any = np.ma.concatenate  # numpy gives it no types
        return cls({name: join([table._column(name) for table in tables]) for name in names}, sum(map(len, tables)))

    def _column(self, name: str) -> Column:
        """Return one column; all of it is masked if no row has this name."""
        if name not in self._columns:
            return np.ma.array(np.zeros(self._length, np.int8), mask=True)
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        """Return the names in the order in which they first appear."""
        return list(self._columns)

    def floats(self, name: str) -> NDArray[np.float64]:
        """Return one column, NaN where a row has no such value."""
        floats: NDArray[np.float64] = np.ma.filled(self._column(name).astype(np.float64), np.nan)
        return floats

    def cells(self, name: str) -> list[Any]:
        """Return one column as Python's numbers, None where a row has no such value."""
        cells: list[Any] = self._column(name).tolist()
        return cells

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Columns: ...
    def __getitem__(self, index: int | slice) -> Row | Columns:
        if isinstance(index, slice):
            part = {name: column[index] for name, column in self._columns.items()}
            return Columns(part, len(range(self._length)[index]))
        place = range(self._length)[index]
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[Row]:
        for row in zip(*map(self.cells, self._columns), strict=True):
            yield {name: value for name, value in zip(self._columns, row, strict=True) if value is not None}


def _column(values: Sequence[Any]) -> Column:
    """Return values as they are in rows as a column; refuse anything but finite numbers and None."""
    mask: Any = np.ma.nomask
    kinds = set(map(type, values))
    if type(MISSING) in kinds:
        mask = [value is MISSING for value in values]
        values = [0 if value is MISSING else value for value in values]
        kinds -= {type(MISSING)}
    if not kinds <= {int, float, NOT_FINITE}:
        raise TypeError("a row holds something that is not a number")
    if kinds == {int}:
        with contextlib.suppress(OverflowError):  # a whole number of more than 64 bits becomes a float
            return np.ma.array(np.array(values, np.int64), mask=mask)
    floats = np.array(values, np.float64)  # None becomes NaN
    not_finite = values.count(None) if NOT_FINITE in kinds else 0
    if np.count_nonzero(np.isfinite(floats)) + not_finite != len(values):
        raise ValueError("a row holds a number that is not finite")
    return np.ma.array(floats, mask=mask)
