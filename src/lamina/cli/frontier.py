"""``lamina frontier``: accuracy against bytes, seconds on networks and ε, for several methods and codecs."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.base.workers import this_worker
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, TensorBoard, echo
from lamina.cli.compare import Names, OutFolder, chosen_settings, train
from lamina.cli.workers import Slurm, Workers, launch

if TYPE_CHECKING:
    from lamina.experiment.trials.frontier import FrontierRuns


@base.app.command()
@base.resumable
def frontier(
    file: base.File,
    overrides: Set = None,
    names: Names = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per method and codec", min=1)] = None,
    out_folder: OutFolder = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    workers: Workers = 1,
    slurm: Slurm = None,
) -> None:
    """Train methods with several codecs and levels of privacy; print accuracy against megabytes, seconds and ε.

    Started again, it skips the runs that are complete and resumes the others. Several of these commands at once, on
    any machines that share the folder, share the work.
    """
    from lamina.experiment.config import load
    from lamina.experiment.trials.compare import count_runs
    from lamina.experiment.trials.frontier import FrontierRuns, as_comparison
    from lamina.experiment.trials.trial import refuse_all_diverged

    experiment = load(file, chosen_settings(overrides, names, seeds))
    path, compared = out_folder or Path("runs") / f"{file.stem}-frontier", as_comparison(experiment)
    if launch(workers, slurm, count_runs(compared), path, [(path, compared.compare)] * overwrite):
        return
    stop = base.Stop()
    study = FrontierRuns(experiment, path, stop=stop, overwrite=overwrite, tensorboard=tensorboard)
    finished = train(study, stop)
    if study.entries and this_worker().number == 1:
        show(study)
    if not finished:
        shown = "; table and picture are of the finished runs" if study.entries else ""
        raise Interrupted(f"stopped after a round{shown}; {base.how_to_resume(overwrite)}")
    refuse_all_diverged(study.entries)


def show(study: FrontierRuns) -> None:
    """Save table, picture and report of the finished runs; print the table and which entry is the fastest."""
    from lamina.base.atomic import write_file
    from lamina.data.drawing import save_picture
    from lamina.report.build import build
    from lamina.report.figures import frontier_figure
    from lamina.report.frontier import read_frontier
    from lamina.report.save import save_page
    from lamina.report.tables import to_csv
    from lamina.storage.files import writing_to
    from lamina.storage.leases import turn

    result, page = read_frontier(study.folder), study.folder / "report.html"
    assert result is not None
    table, has_plotly = result.table(), importlib.util.find_spec("plotly") is not None
    with turn(study.folder):  # other processes may write there
        save_picture(frontier_figure(result), study.folder / "frontier.png")
        with writing_to(study.folder):
            write_file(study.folder / "frontier.csv", to_csv(table).encode())
        if has_plotly:
            targets = [] if result.target is None else [result.target]
            save_page(dataclasses.replace(build(study.runs, targets=targets), frontiers=[result]), page)
    right = table.head[2:-1]
    base.out.print(base.table(table.head, table.rows, right=right, no_wrap=right, title=table.title))
    for line in filter(None, [result.sentence(), *(f"note: {note}" for note in [*study.notes(), *result.notes])]):
        echo(line)
    echo(f"runs, picture and tables in {study.folder}/")
    echo(f"report: {page}" if has_plotly else "for an interactive report: pip install -e '.[report]'")
