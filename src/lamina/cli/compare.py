"""``lamina compare``: several algorithms on the same clients and batches."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import io
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lamina import algorithms
from lamina.cli.base import (
    File,
    Interrupted,
    MLflow,
    Overwrite,
    Quiet,
    Set,
    Stop,
    TensorBoard,
    app,
    err,
    fit_columns,
    interruptible,
    out,
    tell,
    tell_progress,
    wanted_trackers,
)
from lamina.cli.run import TO_GO_ON
from lamina.experiment import compare as comparing
from lamina.experiment.config import Experiment, load
from lamina.experiment.records import Record
from lamina.experiment.settings import shown_name
from lamina.experiment.tuner import Job
from lamina.history import History, Row
from lamina.storage.files import cannot_write, write_file
from lamina.text import plural


@app.command()
@interruptible(f"finished rounds are kept; {TO_GO_ON}")
def compare(
    file: File,
    overrides: Set = None,
    names: Annotated[str | None, typer.Option("--algorithms", help="comma-separated names")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per algorithm", min=1)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, picture and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    mlflow: MLflow = False,
) -> None:
    """Compare algorithms on the same clients and batches; prints the table and saves the picture.

    Started again, it skips the runs that are complete and goes on with the others.
    """
    chosen = list(overrides or [])
    if names is not None:
        chosen.append(f"compare.algorithms={[name.strip() for name in names.split(',') if name.strip()]}")
    if seeds is not None:
        chosen.append(f"compare.seeds={seeds}")
    experiment = load(file, chosen)
    path = out_folder or Path("runs") / f"{file.stem}-compare"
    stop = Stop()
    watcher = comparing.Watcher() if quiet else LiveTable(experiment) if err.is_terminal else Lines(experiment)
    trackers = wanted_trackers(tensorboard, mlflow)
    comparison = comparing.Comparison(
        experiment, path, overwrite=overwrite, watcher=watcher, stop=stop, trackers=trackers
    )
    with stop, watcher if isinstance(watcher, LiveTable) else contextlib.nullcontext():
        finished = comparison.run()
    if comparison.entries:
        show_comparison(comparison, quiet)
    if not finished:
        shown = "; table, picture and CSV are of the finished runs" if comparison.entries else ""
        raise Interrupted(f"stopped after a round{shown}; {TO_GO_ON}{' without --overwrite' * overwrite}")
    comparing.refuse_all_diverged(comparison.entries)


def show_comparison(comparison: comparing.Comparison, quiet: bool) -> None:
    """Save the picture of the finished runs; print their table and what a reader should know about them."""
    from lamina.report import comparison as report  # matplotlib takes a second to import: only here

    data, path = comparison.experiment.data, comparison.folder
    extra = ", ".join(f"{key}={value}" for key, value in data.partition.options().items())
    dealt = f"{data.partition.name} ({extra})" if extra else data.partition.name
    image = io.BytesIO()
    report.picture(comparison.entries, image, f"{data.name}, {dealt}, {plural(comparison.clients, 'client')}")
    try:
        write_file(path / "comparison.png", image.getvalue())
    except OSError as error:
        raise cannot_write(path, error) from error
    if not quiet:
        symbols = report.Symbols() if out.encoding.startswith("utf") else report.ASCII
        out.print(
            fit_columns(
                lambda left_out: report.table(comparison.entries, comparison.target, symbols, left_out),
                report.LEFT_OUT_FIRST,
                out,
            )
        )
        for line in comparison.notes():
            tell(f"note: {line}")
    page = write_page(comparison)
    if not quiet:
        tell(f"runs, picture and tables in {path}/")
        tell(f"report: {page}" if page else "for an interactive report: pip install -e '.[report]'")


def write_page(comparison: comparing.Comparison) -> Path | None:
    """Write the HTML report of its runs into the comparison's folder, if the library it needs is installed."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from lamina.report import build

    page = comparison.folder / "report.html"
    targets = [comparison.experiment.compare.target] if comparison.metric == "accuracy" else []
    build.save_page(build.build(comparison.runs, targets=targets), page)
    return page


class Lines(comparing.Watcher):
    """A comparison as it goes, off a terminal: a plain line for every run that has ended."""

    def __init__(self, experiment: Experiment) -> None:
        self._data = {True: experiment.compare.select, False: "test"}

    def run_ended(self, job: Job, record: Record) -> None:
        """Say how a run ended."""
        metric = record.history.metric
        best = f"best {self._data[job.tuning]} {metric} {record.history.best(metric, optional=True):.4f}"
        how = f"diverged in round {len(record.history) + 1}" if record.diverged else best
        which = f"tuning {job}, {plural(job.rounds, 'round')}" if job.tuning else str(job)
        tell_progress(f"{which}: {how}")


class LiveTable(comparing.Watcher):
    """A comparison as it goes, on a terminal: a line for every algorithm."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._rows = {name: ["waiting", "", "", "", "", "", ""] for name in experiment.compare.algorithms}
        self._titles = {name: algorithms.find(name).card.title for name in self._rows}
        self._running: dict[Job, Row] = {}  # the last round of every run of the present group
        self._ended: dict[str, dict[int, Record]] = {name: {} for name in self._rows}  # by seed
        self._began = self._heard = time.perf_counter()  # of the runs that are shown; when there was news before
        self._rounds = 0
        self._metric = "accuracy"
        self._live = Live(console=err, transient=True, refresh_per_second=5, get_renderable=self._table)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def round_finished(self, job: Job, row: Row) -> None:
        """Show the runs that train side by side as one line."""
        stage = job.algorithm, job.tuning, job.rounds
        if not any((other.algorithm, other.tuning, other.rounds) == stage for other in self._running):
            self._running, self._rounds, self._began = {}, 0, self._heard
        self._heard = time.perf_counter()
        self._running[job] = row
        self._rounds += 1
        jobs = list(self._running)
        self._metric = History([row]).metric if "loss" in row else self._metric
        scores = [row[self._metric] for row in self._running.values() if self._metric in row]
        speed = self._rounds / max(self._heard - self._began, 1e-9)
        left = sum(other.rounds - row["round"] for other, row in self._running.items()) / speed
        self._rows[job.algorithm] = [
            "tuning" if job.tuning else "running",
            _range([f"{lr:g}" for lr in dict.fromkeys(job.lr for job in jobs)]),
            _range([str(seed) for seed in dict.fromkeys(job.seed for job in jobs)]),
            f"{row['round']}/{job.rounds}",
            f"{statistics.fmean(scores):.3f}" if scores else "–",
            f"{speed:.1f}",
            str(datetime.timedelta(seconds=round(left))),
        ]

    def run_ended(self, job: Job, record: Record) -> None:
        """Show an algorithm whose runs have all ended as done."""
        self._heard = time.perf_counter()
        if not job.tuning:
            self._ended[job.algorithm][job.seed] = record
            ended = self._ended[job.algorithm]
            if len(ended) == self._experiment.compare.seeds:
                best = statistics.fmean(
                    other.history.best(other.history.metric, optional=True) for other in ended.values()
                )
                rounds = max(len(other.history) for other in ended.values())
                seeds = _range([str(seed) for seed in ended])
                self._rows[job.algorithm] = ["done", f"{job.lr:g}", seeds, str(rounds), f"best {best:.3f}", "", ""]

    def _table(self) -> Table:
        return fit_columns(self._table_without, ("rounds/s", "seed", "lr", "left"), err)

    def _table_without(self, left_out: Sequence[str]) -> Table:
        made = Table(box=None, pad_edge=False)
        headings = ("algorithm", "", "lr", "seed", "round", self._metric, "rounds/s", "left")
        for heading in headings:
            if heading not in left_out:
                made.add_column(heading, justify="left" if heading in ("algorithm", "") else "right")
        for name, row in self._rows.items():
            cells = [shown_name(name, self._titles[name]), *row]
            made.add_row(*(escape(cell) for at, cell in zip(headings, cells, strict=True) if at not in left_out))
        return made


def _range(values: list[str]) -> str:
    """A few values as one: the first and the last."""
    return values[0] if len(values) == 1 else f"{values[0]}…{values[-1]}"
