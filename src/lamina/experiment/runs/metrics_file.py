"""Read a run's ``metrics.jsonl``: a line per finished round, which may be half-written, damaged or still growing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from lamina.base.columns import Columns
from lamina.base.errors import BadInput

CHUNK_BYTES = 1 << 19  # that are read at a time
# what a line that is not a row of finite numbers may raise
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class MetricsFile:
    """The rounds of a metrics file as of the last `read`, which adds those written since.

    `rows` and `ends`, the byte at which each of them ends, stop before the first `damaged` line. A last line without
    its end is half-written and ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.rows = Columns()
        self.ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self.damaged: int | None = None
        self._last_line = b""

    def end_of(self, number: int) -> int:
        """Return the byte at which the line of a round ends; of round 0, the first byte."""
        return int(self.ends[number - 1]) if number else 0

    def read(self) -> MetricsFile:
        """Read the lines after those that are known, or the whole file if it was cut back or replaced meanwhile."""
        with open_to_read(self.path) as file:
            if self.damaged is not None or not self._is_as_known(file):
                self._forget()
            file.seek(self.end_of(len(self.rows)))
            tables, ends = [self.rows], [self.ends]
            for lines in _chunks_of_lines(file):
                table = self._parse(lines, sum(map(len, tables)))
                tables.append(table)
                ends.append(np.cumsum([len(line) + 1 for line in lines[: len(table)]], dtype=np.int64) + _last(ends))
                if len(table):
                    self._last_line = lines[len(table) - 1] + b"\n"
                if self.damaged is not None:
                    break
        self.rows, self.ends = Columns.joined(tables), np.concatenate(ends)
        return self

    def _is_as_known(self, file: BinaryIO) -> bool:
        """Return whether the last known line is still where it was."""
        file.seek(self.end_of(len(self.rows)) - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _parse(self, lines: list[bytes], before: int) -> Columns:
        """Return the rows of some lines, up to a damaged one."""
        try:
            return _rows(lines, before)
        except DAMAGE:
            pass
        tables: list[Columns] = []
        for number, line in enumerate(lines, before):
            try:
                tables.append(_rows([line], number))
            except DAMAGE:
                self.damaged = number + 1
                break
        return Columns.joined(tables)


def _rows(lines: list[bytes], before: int) -> Columns:
    """Return the rows of lines that follow so many others; raise one of `DAMAGE` if one of them is not such a row."""
    # One call for many lines is several times faster than one for each.
    rows = from_json(b"[" + b",".join(lines) + b"]", allow_inf_nan=False)
    if len(rows) != len(lines) or set(map(type, rows)) != {dict}:
        raise ValueError("a line is not a row")
    table = Columns.from_rows(rows)
    if not np.array_equal(table.floats("round"), np.arange(before + 1, before + 1 + len(lines))):
        raise ValueError("a round is missing")
    return table


def _last(ends: list[NDArray[np.int64]]) -> int:
    """Return the last number of several arrays, 0 if there is none."""
    return next((int(numbers[-1]) for numbers in reversed(ends) if len(numbers)), 0)


def _chunks_of_lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the complete lines of a file, many at a time."""
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines


def sound_lines(path: Path) -> dict[int, bytes]:
    """Return the lines of a metrics file that are rows, by their round, wherever they are; none if there is no file."""
    lines: dict[int, bytes] = {}
    if path.exists():
        with open_to_read(path) as file:
            for line in file:
                with contextlib.suppress(*DAMAGE):
                    number = from_json(line)["round"]
                    _rows([line.rstrip(b"\n")], number - 1)
                    lines[int(number)] = line.rstrip(b"\n") + b"\n"
    return lines


@contextlib.contextmanager
def open_to_read(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a run's folder; refuse a pipe or a device, since reading one may not end."""
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"cannot read '{path}': it is not a file")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise BadInput(f"'{path.parent}' is not a run's folder: it has no {path.name}") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror or error}") from error
