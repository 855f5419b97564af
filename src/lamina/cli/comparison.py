"""Run a comparison for `lamina compare` and `lamina reproduce`: its progress, its table, its picture and its report."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lamina.cli.base import Stop, out, round_bars, table, tell, tell_progress
from lamina.experiment.compare import Comparison
from lamina.experiment.config import Experiment
from lamina.experiment.records import Record
from lamina.experiment.trials import Job, Trial
from lamina.history import Row
from lamina.report.tables import NEVER, NONE, algorithms_table
from lamina.text import plural

ASCII = str.maketrans({"±": "+-", NEVER: "inf", NONE: "-"})  # for terminals without these characters


class Follower:
    """Show the progress of a comparison: a bar for every algorithm on a terminal, else a line for every ended run."""

    def __init__(self, experiment: Experiment) -> None:
        self._data = {True: experiment.compare.select, False: "test"}
        self._seeds = experiment.compare.seeds
        self._best: dict[str, dict[int, float]] = {name: {} for name in experiment.compare.algorithms}  # by seed
        self.bars = round_bars(self._best)

    def round_finished(self, job: Job, row: Row) -> None:
        """Move the algorithm's bar; runs that train side by side share it."""
        state = "tuning" if job.tuning else "running"
        self.bars.update(job.algorithm, row, state=state, completed=row["round"], total=job.rounds)

    def run_ended(self, job: Job, record: Record) -> None:
        """Print how a run ended; on a terminal, show an algorithm whose runs have all ended as done."""
        if not self.bars.live:
            which = f"tuning {job}, {plural(job.rounds, 'round')}" if job.tuning else str(job)
            tell_ending(which, record, f"best {self._data[job.tuning]} {record.history.metric}")
        if not job.tuning:
            best = self._best[job.algorithm]
            best[job.seed] = record.history.best(record.history.metric, optional=True)
            if len(best) == self._seeds:
                self.bars.update(job.algorithm, state="done", score=f"best {statistics.fmean(best.values()):.3f}")


def tell_ending(run: str, record: Record, score_name: str) -> None:
    """Print how a run ended, as progress without a terminal."""
    rounds, metric = len(record.history), record.history.metric
    how = f"{score_name} {record.history.best(metric, optional=True):.4f}"
    if record.diverged:
        how = f"diverged in round {rounds + 1}"
    elif not record.complete:
        how += f", pruned after round {rounds}"
    tell_progress(f"{run}: {how}")


def run_comparison(
    experiment: Experiment, path: Path, stop: Stop, overwrite: bool, trackers: Sequence[str] = ()
) -> tuple[Comparison, bool]:
    """Run a comparison and show it; return it and whether it was finished, not stopped."""
    follower = Follower(experiment)
    comparison = Comparison(experiment, path, overwrite=overwrite, stop=stop, trackers=trackers)
    comparison.on_round, comparison.on_end = follower.round_finished, follower.run_ended
    with stop, follower.bars:
        finished = comparison.run()
    if comparison.entries:
        show(comparison)
    return comparison, finished


def show(comparison: Comparison) -> None:
    """Save the picture and the report of the finished runs; print their table and notes about them."""
    from lamina.data.picture import save_picture  # imported here: matplotlib takes a second
    from lamina.report.build import describe_partition
    from lamina.report.figures import comparison_figure

    data, path = comparison.experiment.data, comparison.folder
    dealt = describe_partition(data.partition.name, **data.partition.options())
    title = f"{data.name}, {dealt}, {plural(comparison.clients, 'client')}"
    save_picture(comparison_figure(comparison.entries, title), path / "comparison.png")
    out.print(comparison_table(comparison.entries, comparison.target))
    for line in comparison.notes():
        tell(f"note: {line}")
    page = write_page(comparison)
    tell(f"runs, picture and tables in {path}/")
    tell(f"report: {page}" if page else "for an interactive report: pip install -e '.[report]'")


def write_page(comparison: Comparison) -> Path | None:
    """Write the HTML report into the comparison's folder, if plotly is installed."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from lamina.report.build import build
    from lamina.report.save import save_page

    page = comparison.folder / "report.html"
    targets = [] if comparison.target is None else [comparison.target]
    save_page(build(comparison.runs, targets=targets), page)
    return page


def comparison_table(entries: Sequence[Trial], target: float | None, console: Console = out) -> Table:
    """Return the table of a comparison for a console: narrow ones show fewer columns, some cannot show all characters.

    Args:
        entries: the algorithms, a row each.
        target: value of the metric on the test data; None leaves its columns out.
        console: where the table will be printed.
    """
    _, headings, rows, title = algorithms_table(entries, target)
    if not console.encoding.startswith("utf"):
        title, rows = title.translate(ASCII), [[row[0], *(cell.translate(ASCII) for cell in row[1:])] for row in rows]
    return table(
        headings,
        rows,
        right=headings[1:],
        no_wrap=headings[1:],
        optional=[headings[-1], headings[-2], *headings[3:4] * (target is not None), "lr"],
        title=title,
        console=console,
    )
