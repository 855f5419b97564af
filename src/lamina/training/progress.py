"""Show the progress of training: live bars on a terminal or in a notebook, lines at intervals in a log."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lamina.base.text import printable
from lamina.training.history import History, Row

LINE_INTERVAL_S = 30  # between two lines of a log
NOTEBOOK_REFRESH_S = 0.2


def score_of(row: Row) -> str:
    """Return the score of a finished round in words; empty if it was not evaluated."""
    metric = History([row]).metric
    return f"{metric} {row[metric]:.3f}" if metric in row else ""


class Bars:
    """Live bars, one for each name, with the last score and the time left.

    Args:
        names: of the bars.
        console: where they are drawn.
        is_shown: whether anything is drawn.
        options: of every bar: its `total` of rounds, those `completed`, its `state` in words.
    """

    def __init__(self, names: Iterable[str], console: Console, *, is_shown: bool, **options: Any) -> None:
        self.live = is_shown
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),  # markup would also replace :heart: in a name
            TextColumn("{task.fields[state]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not is_shown,
        )
        options = {"total": None, "state": "waiting", "score": "–", **options}
        self._tasks = {name: self._bars.add_task(name, **options) for name in names}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:  # else older versions of rich may print an empty line
            self._bars.stop()

    def update(self, name: str, row: Row | None = None, **changes: Any) -> None:
        """Change a bar as `rich.progress.Progress.update` does; the row of a finished round gives its score."""
        if row and score_of(row):
            changes["score"] = score_of(row)
        self._bars.update(self._tasks[name], **changes)


class NotebookBars(Bars):
    """The same bars in a notebook's output; rich needs ipywidgets to draw them again by itself."""

    def __init__(self, names: Iterable[str], **options: Any) -> None:
        super().__init__(names, Console(), is_shown=False, **options)
        self.live = True
        self._handle: Any = None
        self._drawn_at = 0.0

    def __enter__(self) -> NotebookBars:
        self._ipython = importlib.import_module("IPython.display")
        self._handle = self._ipython.display(self._bars, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.update(self._ipython.HTML(""))

    def update(self, name: str, row: Row | None = None, **changes: Any) -> None:
        """Change a bar, and draw all bars again if the last drawing is not too recent."""
        super().update(name, row, **changes)
        now = time.monotonic()
        if self._handle is not None and now - self._drawn_at >= NOTEBOOK_REFRESH_S:
            self._drawn_at = now
            self._handle.update(self._bars)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"


def python_bars(names: Iterable[str], progress: bool | None, **options: Any) -> Bars:
    """Return bars for the Python API; `progress` is None for bars in a terminal or notebook only."""
    if in_notebook() and progress is not False:
        return NotebookBars(names, **options)
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    return Bars(names, Console(stderr=True, force_terminal=True), is_shown=progress, **options)


class IntervalLines:
    """Write a line every half minute where there is no terminal to draw a bar on."""

    def __init__(self, name: str, rounds: int, completed: int, write: Callable[[str], None]) -> None:
        self._name, self._rounds, self._write = name, rounds, write
        self._first, self._started = completed, time.monotonic()
        self._last = self._started

    def round_finished(self, row: Row) -> None:
        """Write a line if one is due after this round."""
        number, now = int(row["round"]), time.monotonic()
        if now - self._last < LINE_INTERVAL_S:
            return
        self._last = now
        left = (now - self._started) / (number - self._first) * (self._rounds - number)
        loss = f"train loss {row['train_loss']:.4g}" if "train_loss" in row else None  # none with differential privacy
        parts = [score_of(row), loss, f"{left:.0f} s left"]
        self._write(printable(f"{self._name}: round {number} of {self._rounds}, {', '.join(filter(None, parts))}"))
