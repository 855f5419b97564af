"""Read a run's ``metrics.jsonl``: a line per finished round, which may be half-written, damaged or still growing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from lamina.base.columns import Columns
from lamina.base.errors import BadInput

CHUNK_BYTES = 1 << 19  # that are read at a time
LONGEST_LINE_BYTES = 1 << 24
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
            if self.damaged is not None or self._read_last_line(file) != self._last_line:
                self._forget()
            end = self.end_of(len(self.rows))
            file.seek(end)
            tables, ends, count = [self.rows], [self.ends], len(self.rows)
            for lines in _whole_lines(file):
                tables.append(self._parse(lines, count))
                ends.append(_line_ends(lines)[: len(tables[-1])] + end)
                count, end = count + len(tables[-1]), end + len(lines)
                if self.damaged is not None:
                    break
            self.rows, self.ends = Columns.joined(tables), np.concatenate(ends)
            self._last_line = self._read_last_line(file)
        return self

    def _read_last_line(self, file: BinaryIO) -> bytes:
        """Return what is now at the place of the last known line."""
        start = self.end_of(max(0, len(self.rows) - 1))
        file.seek(start)
        return file.read(self.end_of(len(self.rows)) - start)

    def _parse(self, lines: bytes, before: int) -> Columns:
        """Return the rows of some lines, up to a damaged one."""
        with contextlib.suppress(*DAMAGE):
            return Columns.from_rows(_rows(lines, before))
        tables = [Columns()]
        for number, line in enumerate(lines.split(b"\n")[:-1], before):
            try:
                tables.append(Columns.from_rows(_rows(line + b"\n", number)))
            except DAMAGE:
                self.damaged = number + 1
                break
        return Columns.joined(tables)


def _rows(lines: bytes, before: int) -> list[dict[str, Any]]:
    """Return the rows of lines that follow `before` others; raise one of `DAMAGE` if a line is not the next row."""
    # One call for many lines is several times faster than one for each.
    rows: list[dict[str, Any]] = from_json(b"[" + lines[:-1].replace(b"\n", b",") + b"]", allow_inf_nan=False)
    if len(rows) != lines.count(b"\n") or set(map(type, rows)) != {dict}:
        raise ValueError("a line is not a row")
    if [row["round"] for row in rows] != list(range(before + 1, before + 1 + len(rows))):
        raise ValueError("a round is missing")
    return rows


def _line_ends(lines: bytes) -> NDArray[np.int64]:
    """Return the bytes at which lines end."""
    return np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")).astype(np.int64) + 1


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a file, many at a time."""
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            yield lines + newline
        if len(rest) > LONGEST_LINE_BYTES:  # this is not a row
            yield rest + b"\n"
            return


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
