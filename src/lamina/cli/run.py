"""``lamina run``: train one experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    best_and_last,
    interruptible,
    progress_bar,
    tell,
    wanted_trackers,
)
from lamina.experiment import build as building
from lamina.experiment import run as running
from lamina.experiment.config import Experiment, load
from lamina.experiment.folder import RunFolder
from lamina.experiment.log_lines import LogLines
from lamina.experiment.trackers import Trackers
from lamina.history import Row
from lamina.simulation import Simulation
from lamina.text import plural

TO_GO_ON = "to go on, start the same command again"


@app.command()
@interruptible(f"finished rounds are kept; {TO_GO_ON}")
def run(
    file: File,
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for the records")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    mlflow: MLflow = False,
) -> None:
    """Train one experiment; its metrics and the trained model go to a folder. Started again, it goes on."""
    experiment = load(file, overrides or [])
    path = out_folder or Path(experiment.run.out or default_folder(file, experiment))
    experiment, ranks = running.join_ranks(experiment)
    quiet = quiet or ranks.rank > 0
    trackers = Trackers(wanted_trackers(tensorboard, mlflow) if ranks.rank == 0 else [], path)
    with LogLines() as lines:
        simulation = building.build(experiment)  # before the folder is opened: a wrong name is reported first
        config = building.resolved(experiment, simulation)
        folder = running.open_folder(path, config, overwrite=overwrite, lines=lines, trackers=trackers)
        try:
            train(simulation, folder, experiment, path, quiet, TO_GO_ON + " without --overwrite" * overwrite)
        finally:
            folder.close()


def train(
    simulation: Simulation,
    folder: RunFolder | running.RankFolder,
    experiment: Experiment,
    path: Path,
    quiet: bool,
    to_go_on: str,
) -> None:
    """Train the remaining rounds of a run, and print how it ended."""
    if isinstance(folder, RunFolder) and folder.ended:
        if folder.diverged is not None:
            raise folder.diverged
        if not quiet:
            finished = plural(len(folder.history), "round")
            tell(f"{path}/ is complete: {finished}; more with train.rounds, anew with --overwrite")
        return
    done = running.go_on([simulation], [folder])
    if done and not quiet:
        tell(f"going on after round {done}")
    with Stop() as stop, progress_bar(experiment.train.rounds, quiet, done) as advance:

        def on_round(_: int, row: Row) -> None:
            advance(experiment.algorithm.name, row)

        stopped = running.train([simulation], [folder], experiment, stop=stop, on_round=on_round)
    if folder.diverged:
        raise folder.diverged
    if stopped:
        raise Interrupted(f"stopped after round {simulation.state.round} of {experiment.train.rounds}; {to_go_on}")
    if not quiet:
        history = simulation.history
        sent, seconds = history.total("bytes_down") + history.total("bytes_up"), history.total("seconds")
        tell(
            f"{simulation.algorithm.card.title}: {plural(len(history), 'round')}, {best_and_last(history)}, "
            f"{sent / 1e6:.1f} MB sent, {seconds:.1f} s"
        )
        tell(f"records and model in {path}/")


def default_folder(file: Path, experiment: Experiment) -> str:
    """Return the folder of a run unless one is given."""
    return f"runs/{file.stem}-{experiment.algorithm.name.replace(':', '.')}-seed{experiment.train.seed}"
