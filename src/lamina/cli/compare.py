"""``lamina compare`` and ``lamina demo``: several algorithms on the same clients and batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lamina.base.errors import unknown
from lamina.base.text import plural
from lamina.base.workers import this_worker
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, TensorBoard, echo
from lamina.cli.workers import Slurm, Workers, launch

if TYPE_CHECKING:
    from lamina.api.results import ComparisonResult
    from lamina.experiment.config import Experiment
    from lamina.experiment.runs.records import Record
    from lamina.experiment.trials.compare import Comparison
    from lamina.experiment.trials.trial import Trial
    from lamina.experiment.trials.trials import Job


Names = Annotated[str | None, typer.Option("--algorithms", help="comma-separated names")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="folder for runs, picture and tables")]


@base.app.command()
@base.resumable
def compare(
    file: base.File,
    overrides: Set = None,
    names: Names = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per algorithm", min=1)] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="NAME", help="show differences to this algorithm, by seed"),
    ] = None,
    out_folder: OutFolder = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    workers: Workers = 1,
    slurm: Slurm = None,
) -> None:
    """Compare algorithms on the same clients and batches; prints the table and saves the picture.

    Started again, it skips the runs that are complete and resumes the others. Several of these commands at once, on
    any machines that share the folder, share the work.
    """
    from lamina.experiment.config import load
    from lamina.experiment.trials.compare import count_runs
    from lamina.experiment.trials.trial import refuse_all_diverged

    experiment = load(file, chosen_settings(overrides, names, seeds))
    if baseline is not None and baseline not in experiment.compare.algorithms:
        raise unknown("algorithm in this comparison", baseline, experiment.compare.algorithms)
    path = out_folder or Path("runs") / f"{file.stem}-compare"
    if launch(workers, slurm, count_runs(experiment), path, [(path, experiment.compare)] * overwrite):
        return
    comparison, finished = run_comparison(experiment, path, base.Stop(), overwrite, tensorboard, baseline)
    if not finished:
        shown = "; table, picture and CSV are of the finished runs" if comparison.entries else ""
        raise Interrupted(f"stopped after a round{shown}; {base.how_to_resume(overwrite)}")
    refuse_all_diverged(comparison.entries)


@base.app.command()
def demo() -> None:
    """Compare five optimisers on handwritten digits, as the README shows, and write to runs/demo-compare.

    Started again, it skips the runs that are complete and resumes the others.
    """
    compare(Path(__file__).with_name("demo.toml"))


def chosen_settings(overrides: list[str] | None, names: str | None, seeds: int | None) -> list[str]:
    """Return the keys that a command's options set: `--set`, `--algorithms` and `--seeds`."""
    chosen = list(overrides or [])
    if names is not None:
        chosen.append(f"compare.algorithms={[name.strip() for name in names.split(',') if name.strip()]}")
    if seeds is not None:
        chosen.append(f"compare.seeds={seeds}")
    return chosen


def run_comparison(
    experiment: Experiment,
    path: Path,
    stop: base.Stop,
    overwrite: bool,
    tensorboard: bool = False,
    baseline: str | None = None,
) -> tuple[Comparison, bool]:
    """Run a comparison and show it; return it and whether it was finished, not stopped."""
    from lamina.experiment.trials.compare import Comparison

    comparison = Comparison(experiment, path, stop=stop, overwrite=overwrite, tensorboard=tensorboard)
    finished = train(comparison, stop)
    if comparison.entries and this_worker().number == 1:
        show(comparison, baseline)
    return comparison, finished


def train(comparison: Comparison, stop: base.Stop) -> bool:
    """Run a comparison; return whether it was finished, not stopped.

    Progress is a bar for every algorithm on a terminal, else a line for every run that has ended.
    """
    from lamina.api.results import follow

    spec = comparison.experiment.compare

    def print_end(job: Job, record: Record) -> None:
        which = f"tuning {job.label}, {plural(job.rounds, 'round')}" if job.tuning else job.label
        data = spec.select if job.tuning else "test"
        print_ending(which, record, f"final {data} {record.history.metric}")

    with stop, base.round_bars(spec.algorithms) as bars:
        follow(comparison, bars)
        if not bars.live:
            comparison.on_end = print_end
        comparison.on_wait = print_wait
        return comparison.run()


def print_wait(runs: int) -> None:
    """Print that only runs of other processes are left."""
    base.echo_progress(f"waiting for {plural(runs, 'run')} of other processes")


def print_ending(run: str, record: Record, score_name: str) -> None:
    """Print how a run ended, as progress without a terminal."""
    rounds = len(record.history)
    how = f"{score_name} {record.final():.4f}"
    if record.diverged:
        how = f"diverged in round {rounds + 1}"
    elif not record.complete:
        how += f", pruned after round {rounds}"
    base.echo_progress(f"{run}: {how}")


def show(comparison: Comparison, baseline: str | None = None) -> None:
    """Save the picture and the report of the finished runs; print their table and notes about them."""
    from lamina.api.results import ComparisonResult
    from lamina.storage.leases import turn

    result = ComparisonResult(comparison)
    baseline = baseline if baseline in result.histories else None  # it may have no finished run yet
    with turn(result.folder):  # other processes may write there
        result.plot(result.folder / "comparison.png")
        page = write_page(result, baseline)
    base.out.print(comparison_table(comparison.entries, comparison.target, baseline))
    for line in result.notes:
        echo(f"note: {line}")
    echo(f"runs, picture and tables in {result.folder}/")
    echo(f"report: {page}" if page else "for an interactive report: pip install -e '.[report]'")


def write_page(result: ComparisonResult, baseline: str | None = None) -> Path | None:
    """Write the HTML report into the comparison's folder, if plotly is installed."""
    page = result.folder / "report.html"
    return result.report(page, baseline=baseline) if importlib.util.find_spec("plotly") else None


def comparison_table(entries: Sequence[Trial], target: float | None, baseline: str | None = None) -> Table:
    """Return the table of a comparison for the terminal: narrow ones show fewer columns.

    Without a `target`, a value of the metric on the test data, its columns are left out; without a `baseline`, the
    name of an algorithm, that of the differences to it.
    """
    from lamina.report.tables import algorithms_table

    _, headings, rows, title = algorithms_table(entries, target, baseline)
    return base.table(
        headings,
        rows,
        right=headings[1:],
        no_wrap=headings[1:],
        optional=[headings[-1], headings[-2], *headings[3:4] * (target is not None), "lr"],
        title=title,
    )
