"""``lamina run``: train one experiment."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.base.text import plural
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, echo

if TYPE_CHECKING:
    from lamina.training.history import Row


@base.app.command()
@base.resumable
def run(
    file: base.File,
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for the records")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: base.TensorBoard = False,
) -> None:
    """Train one experiment; its metrics and the trained model go to a folder. Started again, it resumes.

    With a run's config.json in place of an experiment file, train the same experiment again in a new folder.
    """
    from lamina.experiment.build import build, resolved
    from lamina.experiment.config import load
    from lamina.experiment.runs import again
    from lamina.experiment.runs import run as running
    from lamina.experiment.runs.folder import RunFolder
    from lamina.experiment.runs.log_lines import LogLines
    from lamina.experiment.runs.records import kept_engine
    from lamina.experiment.runs.tensorboard import TensorBoard
    from lamina.training.privacy import spends_too_much
    from lamina.training.progress import IntervalLines

    is_again = file.suffix == ".json"
    experiment = again.load_again(file, overrides or []) if is_again else load(file, overrides or [])
    name, seed, rounds = experiment.algorithm.name, experiment.train.seed, experiment.train.rounds
    is_beside = is_again and out_folder is None and experiment.run.out is None
    if out_folder is not None:
        path = out_folder
    elif is_beside:
        path = again.folder_of_again(file, overwrite=overwrite)
    else:
        path = Path(experiment.run.out or f"runs/{file.stem}-{name.replace(':', '.')}-seed{seed}")
    how_to_resume = base.how_to_resume(overwrite) + f" with --out {path}" * is_beside
    experiment, ranks = running.join_ranks(experiment)
    base.be_quiet(quiet or ranks.rank > 0)
    events = TensorBoard(path) if tensorboard and ranks.rank == 0 else None  # names a missing package at once
    with contextlib.ExitStack() as opened:
        lines = opened.enter_context(LogLines())
        if not overwrite:
            experiment = experiment.changed(run={"engine": kept_engine(path, experiment.run.engine)})
        simulation = build(experiment)  # before the folder is opened: a wrong name is reported first
        config = resolved(experiment, simulation)
        changes = again.changes_since(file, config) if is_again else ""
        if changes:
            base.print_problem("note", f"not the same as {file}: {changes}")
        folder = running.open_folder(path, config, overwrite=overwrite, lines=lines, tensorboard=events)
        opened.callback(folder.close)
        if isinstance(folder, RunFolder) and folder.ended:
            if folder.diverged is not None:
                raise folder.diverged
            train = experiment.train
            has_stalled = folder.history.has_stalled(train.patience, experiment.run.evaluate_every)
            if len(folder.history) < train.rounds and not has_stalled:
                spent = plural(len(folder.history), "round")
                echo(f"{path}/ is complete: {spent}; one more would exceed the privacy budget")
            else:
                base.print_complete(path, folder.history, "train.patience" if has_stalled else "train.rounds")
            return
        done = running.resume([simulation], [folder])
        if done:
            echo(f"resuming after round {done}")
        with base.Stop() as stop, base.round_bars([name], state="", total=rounds, completed=done) as bars:
            lines_at_intervals = IntervalLines(name, rounds, done, base.echo_progress)

            def show(_: int, row: Row) -> None:
                bars.update(name, row, completed=row["round"])
                if not bars.live:
                    lines_at_intervals.round_finished(row)

            stopped = running.train([simulation], [folder], experiment, stop=stop, on_round=show)
    if folder.diverged:
        raise folder.diverged
    if stopped:
        raise Interrupted(f"stopped after round {simulation.state.round} of {rounds}; {how_to_resume}")
    base.print_summary(simulation.history, f"{simulation.algorithm.card.title}: ")
    if simulation.has_stopped and len(simulation.history) < rounds:
        why = f"no better {simulation.metric} in {plural(simulation.patience or 0, 'evaluation')}"
        if spends_too_much(simulation.accountant, simulation.protocol.privacy, len(simulation.history) + 1):
            why = "one more round would exceed the privacy budget"
        echo(f"stopped early: {why}")
    if simulation.objective.frozen:
        echo(f"the model {simulation.objective.frozen_note()}")
    echo(f"records and model in {path}/")
