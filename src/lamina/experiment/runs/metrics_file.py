"""Read a run's ``metrics.jsonl``: a line per finished round, which may be half-written, damaged or still growing."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from lamina.base.errors import BadInput
from lamina.training.history import Row

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
        self.rows: list[Row] = []
        self.ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self.damaged: int | None = None
        self._last_line = b""

    def end_of(self, number: int) -> int:
        """Return the byte at which the line of a round ends; of round 0, the first byte."""
        return int(self.ends[number - 1]) if number else 0

    def read(self) -> MetricsFile:
        """Read the lines after those that are known, or the whole file if it was cut back or replaced meanwhile."""
        with open_to_read(self.path) as file, _collector_paused():
            if self.damaged is not None or self._read_last_line(file) != self._last_line:
                self._forget()
            end = self.end_of(len(self.rows))
            file.seek(end)
            rows, ends = [*self.rows], [self.ends]
            for lines in _whole_lines(file):
                new = self._parse(lines, len(rows))
                ends.append(_line_ends(lines)[: len(new)] + end)
                rows, end = rows + new, end + len(lines)
                if self.damaged is not None:
                    break
            self.rows, self.ends = rows, np.concatenate(ends)
            self._last_line = self._read_last_line(file)
        return self

    def _read_last_line(self, file: BinaryIO) -> bytes:
        """Return what is now at the place of the last known line."""
        start = self.end_of(max(0, len(self.rows) - 1))
        file.seek(start)
        return file.read(self.end_of(len(self.rows)) - start)

    def _parse(self, lines: bytes, before: int) -> list[Row]:
        """Return the rows of some lines, up to a damaged one."""
        with contextlib.suppress(*DAMAGE):
            return _rows(lines, before)
        rows: list[Row] = []
        for number, line in enumerate(lines.split(b"\n")[:-1], before):
            try:
                rows += _rows(line + b"\n", number)
            except DAMAGE:
                self.damaged = number + 1
                break
        return rows


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: it would visit millions of dicts, which hold no cycles, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rows(lines: bytes, before: int) -> list[Row]:
    """Return the rows of lines that follow `before` others; raise one of `DAMAGE` if a line is not the next row."""
    # One call for many lines is several times faster than one for each.
    rows: list[dict[str, Any]] = from_json(b"[" + lines[:-1].replace(b"\n", b",") + b"]", allow_inf_nan=False)
    if len(rows) != lines.count(b"\n") or set(map(type, rows)) != {dict}:
        raise ValueError("a line is not a row")
    if [row["round"] for row in rows] != list(range(before + 1, before + 1 + len(rows))):
        raise ValueError("a round is missing")
    return [{name: _number(value) for name, value in row.items()} for row in rows]


def _number(value: Any) -> float | int:
    """Return a value of a row; null stands for a NaN or an infinity, which JSON lacks."""
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a row holds something that is not a finite number")
    return value  # type: ignore[no-any-return]


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


def sound_lines(path: Path) -> dict[int, bytes]:
    """Return the lines of a metrics file that are rows, by their round, wherever they are; none if there is no file."""
    lines: dict[int, bytes] = {}
    if path.exists():
        with open_to_read(path) as file:
            for line in file:
                with contextlib.suppress(*DAMAGE):
                    number = from_json(line)["round"]
                    _rows(line.rstrip(b"\n") + b"\n", number - 1)
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
