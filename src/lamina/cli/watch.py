"""``lamina watch``: the progress of runs, read from their folders."""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.cli.base import app, out, table
from lamina.cli.export import short
from lamina.storage.leases import is_held
from lamina.training.metrics import is_metric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lamina.experiment.runs.metrics_file import MetricsFile
    from lamina.experiment.runs.records import Record

EVERY = 1.0  # seconds between two frames
RECENT = 20  # rounds, or frames, that the speed is measured over
BARS = "▁▂▃▄▅▆▇█"
LEFT_OUT_FIRST = ("curve", "rounds/s", "best", "left", "round")  # on a narrow terminal
COLOURS = {"running": "green", "complete": "blue", "stopped": "yellow", "diverged": "red"}


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder, or a folder of such folders")],
    once: Annotated[bool, typer.Option("--once", help="print how it stands now, and end")] = False,
) -> None:
    """Show runs while they train: rounds, curves, speed, time left. Ends with the last of them, or on Ctrl-C."""
    view = View(folder)
    if once:
        out.print(view.frame())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(view.frame(), console=out, auto_refresh=False) as live:
        while view.is_active:
            time.sleep(EVERY)
            live.update(view.frame(), refresh=True)


class View:
    """The view of a folder; every frame reads it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_active = False  # whether any process writes here, as of the last frame
        self._records: list[Record] = []
        self._files: dict[Path, MetricsFile] = {}  # so that a frame reads only what is new
        self._looks: dict[Path, deque[tuple[float, int]]] = {}  # when, and how many rounds there were

    def frame(self) -> RenderableType:
        """Return the present state of the runs."""
        from lamina.experiment.runs.records import find_records

        # before the records, so that a run that ends in between is read as ended
        busy = any(is_held(folder) for folder in {lease.parent for lease in self.folder.rglob("lease*")})
        try:
            self._records = find_records([self.folder], self._files)
        except BadInput:
            if not busy:  # else a run that is about to begin, or to be replaced
                raise
        # Running ones first: a terminal shows no more rows than it has lines.
        states = sorted(
            ((state(record), record) for record in self._records), key=lambda one: list(COLOURS).index(one[0])
        )
        self.is_active = busy or any(how == "running" for how, _ in states)
        for record in self._records:
            looks = self._looks.setdefault(record.folder, deque(maxlen=RECENT))
            looks.append((time.monotonic(), len(record.history)))
        if not states:
            return Text(f"{self.folder}: waiting for the first round")
        return self._details(*states[0]) if len(states) == 1 else self._overview(states)

    def _details(self, how: str, record: Record) -> RenderableType:
        """Return everything about a single run."""
        from lamina.experiment.trials.settings import shown_name

        history, rounds = record.history, int(record.config["train"]["rounds"])
        finished, speed, left = self._progress(how, record)
        lines = Table.grid(padding=(0, 2))
        lines.add_row("round", Group(finished, ProgressBar(rounds, len(history), width=40)))
        data = "validation" if record.on_validation_data else "test"
        metrics = dict.fromkeys([history.metric, *filter(is_metric, history.columns)])
        titles = {name: f"{data} {name}" for name in metrics} | {"train_loss": "training loss"}
        for name, title in titles.items():
            values = finite(history.array(name, optional=True))
            if len(values):
                best = history.best(name, optional=True)
                lines.add_row(title, f"{sparkline(values, 40)}  {values[-1]:.4g}, best {best:.4g}")
        lines.add_row("speed", f"{speed} rounds/s")
        if left:
            lines.add_row("time left", left)
        name = shown_name(record.algorithm, record.title)
        settings = f": {name} lr {record.lr:g} seed {record.seed}, "
        heading = Text.assemble(short(record.folder), settings, (how, COLOURS[how]))
        remark = record.diverged or (
            "no process writes here: run the same command again to resume" * (how == "stopped")
        )
        return Group(heading, lines, *([Text(remark, COLOURS[how])] if remark else []))

    def _overview(self, states: Sequence[tuple[str, Record]]) -> RenderableType:
        """Return a table of several runs, a row each."""
        metrics = {record.history.metric for _, record in states}
        judged = metrics.pop() if len(metrics) == 1 else "score"  # each run by its own metric
        headings = ("run", "state", "round", judged, "best", "curve", "rounds/s", "left")
        rows: list[list[str | Text]] = []
        for how, record in states:
            metric = record.history.metric
            scores = finite(record.history.array(metric, optional=True))
            last, best = (scores[-1], record.history.best(metric)) if len(scores) else (math.nan, math.nan)
            finished, *progress = self._progress(how, record)
            name = str(record.folder.relative_to(self.folder.resolve()))
            numbers = ["–" if math.isnan(value) else f"{value:.4f}" for value in (last, best)]
            if judged != metric:
                numbers[0] = f"{metric} {numbers[0]}"
            rows.append([name, Text(how, COLOURS[how]), finished, *numbers, sparkline(scores, 20), *progress])
        right = [heading for heading in headings[2:] if heading != "curve"]
        counts = [f"{count} {how}" for how in COLOURS if (count := [one for one, _ in states].count(how))]
        return Group(
            table(headings, rows, optional=LEFT_OUT_FIRST, right=right, no_wrap=headings[1:]),
            Text(f"{plural(len(states), 'run')}: {', '.join(counts)}"),
        )

    def _progress(self, how: str, record: Record) -> tuple[str, str, str]:
        """Return as text the finished rounds, rounds per second, and the time left if it runs."""
        finished, rounds, speed = len(record.history), int(record.config["train"]["rounds"]), self._speed(record)
        left = str(datetime.timedelta(seconds=round((rounds - finished) / speed))) if speed else "–"
        return f"{finished}/{rounds}", f"{speed:.3g}" if speed else "–", left * (how == "running")

    def _speed(self, record: Record) -> float:
        """Return rounds per second as observed, else as recorded (too low for runs side by side); 0 if unknown."""
        looks = self._looks[record.folder]
        (first, before), (last, now) = looks[0], looks[-1]
        if now > before:
            return (now - before) / (last - first)
        recent = record.history[-RECENT:]
        if "seconds" not in recent.columns:  # of a private run with secret cohorts
            return 0.0
        seconds = recent.total("seconds", optional=True) + recent.total("evaluation_seconds", optional=True)
        return len(recent) / seconds if seconds else 0.0


def state(record: Record) -> str:
    """Return the state of a run, one of COLOURS."""
    if record.diverged is not None:
        return "diverged"
    if record.complete:
        return "complete"
    return "running" if is_held(record.folder) else "stopped"


def finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values that can be drawn."""
    return values[abs(values) < math.inf]  # which a NaN is not


def sparkline(values: Sequence[float] | NDArray[np.float64], width: int) -> str:
    """Return a curve of one line; with more values than characters, each shows the mean of a few.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20), sparkline([0, 0, 1, 1], 2), sparkline([5.0], 9), sparkline([], 9)
    ('▁▂▃▄▅▆▇█', '▁█', '▁', '')
    """
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)] if width else [0]
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    places = ((mean - low) * scale for mean in means)
    return "".join(BARS[round(place) if math.isfinite(place) else 0] for place in places)
