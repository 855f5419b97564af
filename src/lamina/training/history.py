"""The history of a run: one row of metrics per round."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lamina.base.columns import Columns
from lamina.base.columns import Row as Row
from lamina.base.errors import BadInput, MissingExtra, missing_extra, nearest, short_repr
from lamina.base.text import html_table
from lamina.training.metrics import is_metric, judged_column, of_column, smaller_is_better

LONGEST_SHOWN, SHOWN_AT_ENDS = 30, 5  # rows of a history that is printed
LAST_ROUNDS = 10  # of a final value: the best round alone would favour methods whose curve swings
SETTLING_ROUNDS = 5  # measured rounds in the trailing mean that has to stay at a target
NOT_EVALUATED = "none of these rounds was evaluated; pass test data (test=...) and see evaluate_every"


def score_key(value: float, name: str) -> float:
    """Return a score of a column's value: larger is better, and NaN is the worst.

    >>> score_key(0.9, "accuracy"), score_key(0.9, "loss"), score_key(math.nan, "loss")
    (0.9, -0.9, -inf)
    """
    if math.isnan(value):
        return -math.inf
    return -value if smaller_is_better(name) else value


def data_frame(rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]], purpose: str) -> Any:
    """Return rows, or columns by name, as a pandas DataFrame; `purpose` names the call that needs pandas."""
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("pandas", "table", purpose) from error
    return pandas.DataFrame(rows)


def mean(numbers: Iterable[float]) -> float:
    """Return the mean; infinity or NaN if the sum is beyond the range of a float.

    >>> mean([1.0, 2.0]), mean([1e308, 1e308])
    (1.5, inf)
    """
    numbers = list(numbers)
    try:
        return statistics.fmean(numbers)
    except (OverflowError, ValueError):  # the latter: of infinite numbers
        return sum(numbers) / len(numbers)


def values(histories: Iterable[History], of: Callable[[History], float]) -> list[float]:
    """Return a number per history, without NaN: a seed that diverged in its first round has none."""
    numbers = [of(history) for history in histories if len(history)]
    return [number for number in numbers if not math.isnan(number)]


class History(Sequence[Row]):
    """A table with one row per round; it behaves like a list of dicts.

    >>> history = History([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.9}])
    >>> history.best("accuracy"), history.rounds_to(0.8), history[-1]["round"]
    (0.9, 2, 2)
    >>> history.final(), history.settling_round(0.7)
    (0.7, 2)
    """

    def __init__(self, rows: Sequence[Row] = (), metric: str | None = None) -> None:
        # Rounds read from a file stay in columns, which take a tenth of the memory, until a round is added.
        self.rows: Sequence[Row] = rows if isinstance(rows, Columns) else list(rows)
        self._metric = metric

    def append(self, row: Row) -> None:
        """Add the row of a finished round."""
        if not isinstance(self.rows, list):
            self.rows = list(self.rows)
        self.rows.append(row)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Row | History:
        if isinstance(index, str):
            raise BadInput(f"history[…] takes the number of a row: history.array('{index}') returns a column")
        return History(self.rows[index], self._metric) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def columns(self) -> list[str]:
        """All column names, in order of appearance."""
        if isinstance(self.rows, Columns):
            return self.rows.names
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def metric(self) -> str:
        """The column that tells how good the model is: of the run's first metric, or of the loss where there is none.

        If clients have models of their own, or only they have test data, it is the mean over clients.
        """
        name = self._metric
        if name is None:
            names = [metric.name for metric in map(of_column, self.columns) if metric is not None]
            name = next((one for one in names if one != "loss"), "loss" if names else "accuracy")
        return judged_column(name, self._has)

    def _has(self, column: str) -> bool:
        """Return whether some row has a column."""
        return column in self.rows.names if isinstance(self.rows, Columns) else any(column in row for row in self.rows)

    def column(self, name: str, *, optional: bool = False) -> list[float]:
        """Return one column, with NaN where a round has no such value (it was not evaluated).

        A name that no row has is refused; with `optional` it is a column of NaN.
        """
        values: list[float] = self.array(name, optional=optional).tolist()
        return values

    def array(self, name: str, *, optional: bool = False) -> NDArray[np.float64]:
        """Return one column as an array; the arguments are those of `column`."""
        if isinstance(self.rows, Columns):
            values = self.rows.floats(name)
        else:
            values = np.array([float(row.get(name, math.nan)) for row in self.rows])
        if len(self.rows) and not optional and not self._has(name):
            raise self._no_column(name)
        return values

    def best(self, name: str | None = None, *, optional: bool = False) -> float:
        """Return the best value of a column, NaN if there is none: the smallest loss, the largest accuracy.

        The column is `metric` unless given.
        """
        name = self.metric if name is None else name
        values = self._finite(name, optional)
        best = values.min if smaller_is_better(name) else values.max
        return float(best()) if len(values) else math.nan

    def final(self, name: str | None = None, *, optional: bool = False) -> float:
        """Return the mean of the values measured in the last ten rounds; NaN if the column has no value.

        The column is `metric` unless given. If none of these rounds was evaluated, the newest value counts.
        """
        values = self.array(self.metric if name is None else name, optional=optional)
        measured = values[-LAST_ROUNDS:][~np.isnan(values[-LAST_ROUNDS:])]
        return mean(measured.tolist()) if len(measured) else self.last(name, optional=optional)

    def last(self, name: str | None = None, *, optional: bool = False) -> float:
        """Return the newest value of a column, `metric` unless given; NaN if there is none."""
        name = self.metric if name is None else name
        values = self._finite(name, optional)
        return float(values[-1]) if len(values) else math.nan

    def total(self, name: str, *, optional: bool = False) -> float:
        """Return the sum of a column (bytes, seconds)."""
        values = self._finite(name, optional)
        with np.errstate(over="ignore"):
            return float(np.cumsum(values)[-1]) if len(values) else 0.0  # one by one: `np.sum` rounds differently

    def rounds_to(self, target: float, name: str | None = None, *, optional: bool = False) -> int | None:
        """Return the first round whose value reaches the target (a loss: falls to it), or None."""
        name = self.metric if name is None else name
        return self._first_round(self.array(name, optional=optional), target, name)

    def settling_round(self, target: float, name: str | None = None, *, optional: bool = False) -> int | None:
        """Return the first round from which the mean of five rounds stays at the target until the end, or None.

        The mean is that of a round and the four rounds measured before it, as far as there are any. It stays at the
        target if it is never below it again (a loss: above it).
        """
        name = self.metric if name is None else name
        return self._first_round(self.kept_level(name, optional=optional), target, name)

    def kept_level(self, name: str | None = None, *, optional: bool = False) -> NDArray[np.float64]:
        """Return what the mean of five rounds stays at from each round on: its worst value from there to the end.

        Rounds without a value have NaN. `settling_round` is the first round whose kept level reaches the target.
        """
        name = self.metric if name is None else name
        levels = self.array(name, optional=optional)
        is_measured = ~np.isnan(levels)
        if not is_measured.any():
            return levels
        before = np.full(SETTLING_ROUNDS - 1, math.nan)
        windows = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([before, levels[is_measured]]), SETTLING_ROUNDS
        )
        with np.errstate(over="ignore", invalid="ignore"):
            # The bounds correct rounding: a constant value is its own mean.
            means = np.clip(np.nanmean(windows, axis=1), np.nanmin(windows, axis=1), np.nanmax(windows, axis=1))
        worst = np.maximum if smaller_is_better(name) else np.minimum
        levels[is_measured] = worst.accumulate(means[::-1])[::-1]
        return levels

    def has_stalled(self, patience: int | None, every: int = 1) -> bool:
        """Return whether none of the last `patience` values of `metric` is better than all before; False if None.

        Only the evaluations of every n-th round count, so that it makes no difference where `run` ended between them.

        >>> history = History([{"round": i + 1, "loss": loss} for i, loss in enumerate([0.9, 0.5, 0.5, 0.6])])
        >>> history.has_stalled(2), history.has_stalled(3)
        (True, False)
        """
        if patience is None or not len(self.rows):
            return False
        values = self.array(self.metric, optional=True)
        values = values[~np.isnan(values) & (self.array("round") % every == 0)]
        if not len(values):
            return False
        best = values.argmin() if smaller_is_better(self.metric) else values.argmax()  # the first of equal values
        return len(values) - 1 - int(best) >= patience

    def _first_round(self, values: NDArray[np.float64], target: float, name: str) -> int | None:
        """Return the first round whose value of a column reaches a target, or None."""
        sign = -1 if smaller_is_better(name) else 1
        reached = np.flatnonzero(sign * values >= sign * target)
        return int(self.rows[int(reached[0])]["round"]) if len(reached) else None

    def _finite(self, name: str, optional: bool) -> NDArray[np.float64]:
        """Return the values of a column without NaN."""
        values = self.array(name, optional=optional)
        return values[~np.isnan(values)]

    def _no_column(self, name: str) -> BadInput:
        """Build the error for a column that no row has."""
        columns = self.columns
        if is_metric(name) and "loss" not in columns:
            return BadInput(f"the history has no column '{name}': {NOT_EVALUATED}")
        names = dict.fromkeys("trust_ratio/…" if column.startswith("trust_ratio/") else column for column in columns)
        return BadInput(f"the history has no column '{name}'{nearest(name, columns)} (columns: {', '.join(names)})")

    def plot(self, *columns: str, ax: Any = None, **style: Any) -> Any:
        """Draw columns against the round, and return matplotlib's axes.

        Args:
            columns: their names; `metric` unless given. Rounds without a value are left out.
            ax: the axes to draw on, to compare several histories; new ones unless given.
            style: for matplotlib's `plot`, such as ``label="fedavg"``.
        """
        for name in columns:
            if not isinstance(name, str):
                raise BadInput(f"history.plot() takes names, such as plot('loss', 'accuracy'), not {short_repr(name)}")
        columns = columns or (self.metric,)
        lines = {name: self.array(name) for name in columns}
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise MissingExtra("history.plot() needs matplotlib: pip install matplotlib") from error
            _, ax = pyplot.subplots()
        rounds = self.array("round")
        for name, values in lines.items():
            drawn = ~np.isnan(values)
            marker = {"marker": "o"} if drawn.sum() == 1 else {}  # a line of one point is invisible
            ax.plot(rounds[drawn], values[drawn], **{"label": name, **marker, **style})
        ax.set_xlabel("round")
        ax.set_ylabel(", ".join(columns))
        if len(ax.lines) > 1:
            ax.legend()
        return ax

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame."""
        return data_frame(list(self.rows), "history.to_pandas()")

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and cells of the usual columns; of a long history the first and last rows."""
        columns = self.columns
        metrics = [self.metric, *(name for name in columns if is_metric(name))]
        usual = dict.fromkeys(["round", *metrics, "train_loss", "consistency", "seconds"])
        names = [name for name in usual if name in columns]
        shown: list[Row | None] = []
        if len(self.rows) > LONGEST_SHOWN:
            shown += [*self.rows[:SHOWN_AT_ENDS], None, *self.rows[-SHOWN_AT_ENDS:]]
        else:
            shown += self.rows
        cells = [["…"] * len(names) if row is None else [f"{row.get(n, math.nan):.5g}" for n in names] for row in shown]
        return names, cells

    def __repr__(self) -> str:
        names, cells = self._shown()
        return "\n".join("  ".join(f"{cell:>11}" for cell in line) for line in [names, *cells])

    def _repr_html_(self) -> str:
        names, cells = self._shown()
        return html_table(names, cells)
