"""``lamina tune``: try values for keys of an experiment and keep the best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, out, say, tell
from lamina.cli.compare import tell_ending
from lamina.text import plural

if TYPE_CHECKING:
    from lamina.experiment.tune import Tuning


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
) -> None:
    """Try a grid of values, or let Optuna propose them; prints all scores and saves the best configuration.

    Started again, it skips the runs that are complete and resumes the others. With Optuna, several of these
    commands at once share the work.
    """
    from lamina.experiment.config import load
    from lamina.experiment.tune import Tuning

    chosen = list(overrides or [])
    if grid is not None:
        chosen += ["tune.sampler=grid", f'tune.grid="{grid}"']
    if seeds is not None:
        chosen.append(f"tune.seeds={seeds}")
    experiment = load(file, chosen)
    stop = base.Stop()
    tuning = Tuning(experiment, out_folder or Path("runs") / f"{file.stem}-tune", overwrite=overwrite, stop=stop)
    rounds = tuning.count * experiment.tune.seeds * experiment.train.rounds
    with stop, base.round_bars(["tuning"], total=rounds) as bars:
        tuning.on_round = lambda job, row: bars.update("tuning", row, advance=1, state=job.label)
        if not bars.live:
            tuning.on_end = lambda job, record: tell_ending(str(job), record, tuning.score_name)
        finished = tuning.run()
    with tuning.turn():
        save_picture(tuning)
    show(tuning, finished)
    if not quiet:
        for line in tuning.edges():
            say("warning", line)
    if not finished:
        raise Interrupted(f"stopped after a round; {base.how_to_resume(overwrite)}")
    tuning.refuse_all_diverged()


def show(tuning: Tuning, finished: bool) -> None:
    """Print every trial, the choice, and notes about it."""
    from lamina.experiment.settings import written
    from lamina.report.tables import trials_table

    _, headings, rows, _ = trials_table(tuning)
    out.print(base.table(headings, rows, right=headings[:-1]))
    best = tuning.best
    tell(f"chosen on {tuning.chosen_on()}")
    unfinished = sum(trial.remark == "not finished" for trial in tuning.trials)
    if finished and unfinished:
        tell(f"other workers still run {plural(unfinished, 'trial')}: the last of them writes the final tables")
    if best is None:
        tell("no trial ran to its end: nothing is chosen")
    else:
        tell(f"best: {written(best.settings)}; {tuning.score_name} {best.score:.4f}")
        ties = sum(trial.score == best.score for trial in tuning.trials) - 1
        if ties:
            tell(f"note: {ties} more with the same score; the first is taken")
        tell(f"run it with: lamina run {tuning.folder / 'best.toml'}")
    tell(f"runs, picture and tables in {tuning.folder}/")


def save_picture(tuning: Tuning) -> None:
    """Draw the score over the learning rate, if rates were tried."""
    from lamina.report.rates import tuning_responses

    responses = tuning_responses(tuning)
    if not responses:
        return
    from lamina.data import picture
    from lamina.report import figures

    picture.save_picture(figures.rates_figure(responses), tuning.folder / "learning-rates.png")
