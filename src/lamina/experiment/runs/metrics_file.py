"""Read a run's ``metrics.jsonl``: a line per finished round, which may be half-written, damaged or still growing."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from lamina.base.columns import Columns
from lamina.base.errors import BadInput

# what a line that is not a row of finite numbers may raise
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class MetricsFile:
    """The rounds of a metrics file as of the last `read`.

    `rows` stop before the first `damaged` line. A last line without its end is half-written and ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = Columns()
        self.damaged: int | None = None
        self._ends = [0]
        self._version: tuple[int, ...] = ()  # of the file that was read

    def end_of(self, number: int) -> int:
        """Return the byte at which the line of a round ends; of round 0, the first byte."""
        return self._ends[number]

    def read(self) -> MetricsFile:
        """Read the file, unless it is the same as the last time."""
        with open_to_read(self.path) as file:
            status = os.fstat(file.fileno())
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
            if version != self._version:
                self._parse(file.read().split(b"\n")[:-1])
                self._version = version
        return self

    def _parse(self, lines: list[bytes]) -> None:
        rows: list[dict[str, Any]] = []
        self.damaged = None
        for number, line in enumerate(lines, 1):
            try:
                rows.append(_row(line, number))
            except DAMAGE:
                self.damaged = number
                break
        self.rows = Columns.from_rows(rows)
        self._ends = list(itertools.accumulate((len(line) + 1 for line in lines[: len(rows)]), initial=0))


def _row(line: bytes, number: int) -> dict[str, Any]:
    """Return the row of a line; raise one of `DAMAGE` if it is not a row of finite numbers of this round."""
    row: dict[str, Any] = from_json(line, allow_inf_nan=False)
    if row["round"] != number:
        raise ValueError("a round is missing")
    if not all(value is None or (type(value) in (int, float) and math.isfinite(value)) for value in row.values()):
        raise ValueError("a row holds something that is not a finite number")
    return row


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
