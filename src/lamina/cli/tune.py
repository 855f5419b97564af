"""``lamina tune``: try values for keys of an experiment and keep the best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.base.workers import this_worker
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, echo, out
from lamina.cli.compare import print_ending, print_wait
from lamina.cli.workers import Slurm, Workers, launch

if TYPE_CHECKING:
    from lamina.experiment.trials.tune import Tuning


@base.app.command()
@base.resumable
def tune(
    file: base.File,
    overrides: Set = None,
    grid: Annotated[
        str | None, typer.Option("--grid", metavar="NAME", help="a paper's grid: lamb-paper, lada-alpha")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per trial; their mean decides", min=1)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, picture and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    workers: Workers = 1,
    slurm: Slurm = None,
) -> None:
    """Try a grid of values, or let Optuna propose them; prints all scores and saves the best configuration.

    Started again, it skips the runs that are complete and resumes the others. Several of these commands at once, on
    any machines that share the folder, share the work.
    """
    from lamina.experiment.config import load
    from lamina.experiment.trials.trial import refuse_all_diverged
    from lamina.experiment.trials.tune import Tuning, count_runs
    from lamina.storage.leases import turn

    chosen = list(overrides or [])
    if grid is not None:
        chosen += ["tune.sampler=grid", f'tune.grid="{grid}"']
    if seeds is not None:
        chosen.append(f"tune.seeds={seeds}")
    experiment = load(file, chosen)
    path = out_folder or Path("runs") / f"{file.stem}-tune"
    if launch(workers, slurm, count_runs(experiment), path, [(path, experiment.tune)] * overwrite):
        return
    stop, worker = base.Stop(), this_worker()
    tuning = Tuning(experiment, path, overwrite=overwrite, stop=stop)
    rounds = tuning.count * experiment.tune.seeds * experiment.train.rounds
    with stop, base.round_bars(["tuning"], total=rounds) as bars:
        tuning.on_round = lambda job, row: bars.update("tuning", row, advance=1, state=job.label)
        if not bars.live:
            tuning.on_end = lambda job, record: print_ending(job.label, record, tuning.score_name)
        tuning.on_wait = print_wait
        finished = tuning.run()
    if worker.number == 1:
        with turn(tuning.folder):  # other processes may write tables there
            save_picture(tuning)
    show(tuning)
    if not finished:
        raise Interrupted(f"stopped after a round; {base.how_to_resume(overwrite)}")
    refuse_all_diverged(tuning.trials, any)


def show(tuning: Tuning) -> None:
    """Print every trial, the choice, and notes about it."""
    from lamina.report.tables import trials_table

    _, headings, rows, _ = trials_table(tuning)
    out.print(base.table(headings, rows, right=headings[:-1]))
    for line in tuning.notes():
        echo(f"note: {line}")
    if tuning.best is None:
        echo("no trial ran to its end: nothing is chosen")
    else:
        echo(f"run the best with: lamina run {tuning.folder / 'best.toml'}")
    echo(f"runs, picture and tables in {tuning.folder}/")


def save_picture(tuning: Tuning) -> None:
    """Draw the score over the learning rate, if rates were tried."""
    from lamina.report.rates import tuning_responses

    responses = tuning_responses(tuning)
    if not responses:
        return
    from lamina.data.drawing import save_picture as save
    from lamina.report import figures

    save(figures.rates_figure(responses), tuning.folder / "learning-rates.png")
