"""The history of a run: one row of metrics per round."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from lamina.errors import missing_extra

Row = Mapping[str, float | int]


class History(Sequence[Row]):
    """A table with one row per round; behaves as a list of dicts.

    >>> history = History([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.9}])
    >>> history.best("accuracy"), history.rounds_to(0.8), history[-1]["round"]
    (0.9, 2, 2)
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows: list[Row] = list(rows)

    def append(self, row: Row) -> None:
        """Add the row of a finished round."""
        self.rows.append(row)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Row | History:
        return History(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def columns(self) -> list[str]:
        """All column names, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> list[float]:
        """One column; NaN where a round has no such value (it was not evaluated)."""
        return [float(row.get(name, math.nan)) for row in self.rows]

    def best(self, name: str = "accuracy") -> float:
        """The largest value of a column, NaN if there is none."""
        return max((v for v in self.column(name) if not math.isnan(v)), default=math.nan)

    def last(self, name: str = "accuracy") -> float:
        """The newest value of a column, NaN if there is none."""
        return next((v for v in reversed(self.column(name)) if not math.isnan(v)), math.nan)

    def total(self, name: str) -> float:
        """The sum of a column (bytes, seconds)."""
        return sum(v for v in self.column(name) if not math.isnan(v))

    def rounds_to(self, target: float, name: str = "accuracy") -> int | None:
        """The first round whose value reaches the target, or None."""
        return next((int(row["round"]) for row in self.rows if row.get(name, -math.inf) >= target), None)

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise missing_extra("pandas", "table", "history.to_pandas()") from error
        return pandas.DataFrame(self.rows)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        names = [n for n in ("round", "accuracy", "loss", "train_loss", "consistency", "seconds") if n in self.columns]
        lines = ["  ".join(f"{n:>11}" for n in names)]
        for row in self.rows:
            lines.append("  ".join(f"{row.get(n, math.nan):>11.5g}" for n in names))
        return "\n".join(lines)
