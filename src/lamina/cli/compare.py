"""``lamina compare``: several algorithms on the same clients and batches."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
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
    plain_table,
    tell,
    tell_progress,
    wanted_trackers,
)
from lamina.cli.run import TO_GO_ON
from lamina.experiment import compare as comparing
from lamina.experiment.config import Experiment, load
from lamina.experiment.records import Record
from lamina.experiment.settings import shown_name
from lamina.experiment.trials import Job, refuse_all_diverged
from lamina.history import History, Row
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
    trackers = wanted_trackers(tensorboard, mlflow)
    comparison, finished = run_comparison(experiment, path, Stop(), overwrite, quiet, trackers)
    if not finished:
        shown = "; table, picture and CSV are of the finished runs" if comparison.entries else ""
        raise Interrupted(f"stopped after a round{shown}; {TO_GO_ON}{' without --overwrite' * overwrite}")
    refuse_all_diverged(comparison.entries)


def run_comparison(
    experiment: Experiment, path: Path, stop: Stop, overwrite: bool, quiet: bool, trackers: Sequence[str] = ()
) -> tuple[comparing.Comparison, bool]:
    """Run a comparison and show it; return it and whether it was finished, not stopped."""
    comparison = comparing.Comparison(experiment, path, overwrite=overwrite, stop=stop, trackers=trackers)
    with stop, contextlib.ExitStack() as stack:
        if not quiet and err.is_terminal:
            table = stack.enter_context(LiveTable(experiment))
            comparison.on_round, comparison.on_end = table.round_finished, table.run_ended
        elif not quiet:
            comparison.on_end = functools.partial(tell_ending, experiment.compare.select)
        finished = comparison.run()
    if comparison.entries:
        show_comparison(comparison, quiet)
    return comparison, finished


def show_comparison(comparison: comparing.Comparison, quiet: bool) -> None:
    """Save the picture and the report of the finished runs; print their table and notes about them."""
    from lamina.report import comparison as report  # imported here: matplotlib takes a second

    data, path = comparison.experiment.data, comparison.folder
    extra = ", ".join(f"{key}={value}" for key, value in data.partition.options().items())
    dealt = f"{data.partition.name} ({extra})" if extra else data.partition.name
    title = f"{data.name}, {dealt}, {plural(comparison.clients, 'client')}"
    report.picture(comparison.entries, path / "comparison.png", title)
    if not quiet:
        ascii_only = not out.encoding.startswith("utf")
        out.print(
            fit_columns(
                lambda left_out: report.table(comparison.entries, comparison.target, left_out, ascii_only),
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
    """Write the HTML report into the comparison's folder, if plotly is installed."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from lamina.report import build, save

    page = comparison.folder / "report.html"
    targets = [comparison.experiment.compare.target] if comparison.metric == "accuracy" else []
    save.save_page(build.build(comparison.runs, targets=targets), page)
    return page


def tell_ending(select: str, job: Job, record: Record) -> None:
    """Print how a run ended, as progress without a terminal; tuning runs are evaluated on the data of `select`."""
    data, metric = select if job.tuning else "test", record.history.metric
    best = f"best {data} {metric} {record.history.best(metric, optional=True):.4f}"
    how = f"diverged in round {len(record.history) + 1}" if record.diverged else best
    which = f"tuning {job}, {plural(job.rounds, 'round')}" if job.tuning else str(job)
    tell_progress(f"{which}: {how}")


class LiveTable:
    """Progress of a comparison on a terminal: a table with a row for every algorithm."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._rows = {name: ["waiting", "", "", "", "", "", ""] for name in experiment.compare.algorithms}
        self._titles = {name: algorithms.find(name).card.title for name in self._rows}
        self._running: dict[Job, Row] = {}  # the last round of every run that trains now
        self._ended: dict[str, dict[int, Record]] = {name: {} for name in self._rows}  # by seed
        self._began = self._heard = time.perf_counter()  # start of these runs, and the last event
        self._rounds = 0
        self._metric = "accuracy"
        self._live = Live(console=err, transient=True, refresh_per_second=5, get_renderable=self._table)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def round_finished(self, job: Job, row: Row) -> None:
        """Show the runs that train side by side as one row."""
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
        headings = ("algorithm", "", "lr", "seed", "round", self._metric, "rounds/s", "left")
        rows = [(shown_name(name, self._titles[name]), *row) for name, row in self._rows.items()]
        return fit_columns(
            lambda left_out: plain_table(headings, rows, left_out=left_out, right=headings[2:]),
            ("rounds/s", "seed", "lr", "left"),
            err,
        )


def _range(values: list[str]) -> str:
    """Return the first and the last of a few values."""
    return values[0] if len(values) == 1 else f"{values[0]}…{values[-1]}"
