"""``lamina tune``: try values for keys of an experiment and keep the best."""

from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lamina.cli.base import (
    File,
    Interrupted,
    Overwrite,
    Quiet,
    Set,
    Stop,
    app,
    interruptible,
    out,
    plain_table,
    progress_bar,
    say,
    tell,
    tell_progress,
)
from lamina.cli.run import TO_GO_ON
from lamina.data import picture
from lamina.experiment import tune as tuning
from lamina.experiment.config import load
from lamina.experiment.records import Record
from lamina.experiment.settings import short_names, shown, written
from lamina.experiment.trials import Job
from lamina.text import plural

RATE = "train.lr"


@app.command()
@interruptible(f"finished rounds are kept; {TO_GO_ON}")
def tune(
    file: File,
    overrides: Set = None,
    grid: Annotated[
        str | None, typer.Option("--grid", metavar="NAME", help=f"a paper's grid: {', '.join(tuning.GRIDS)}")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per trial; their mean decides", min=1)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, picture and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Try a grid of values, or let Optuna propose them; prints all scores and saves the best configuration.

    Started again, it skips the runs that are complete and goes on with the others. With Optuna, several of these
    commands at once share the work.
    """
    chosen = list(overrides or [])
    if grid is not None:
        chosen += ["tune.sampler=grid", f'tune.grid="{grid}"']
    if seeds is not None:
        chosen.append(f"tune.seeds={seeds}")
    experiment = load(file, chosen)
    path = out_folder or Path("runs") / f"{file.stem}-tune"
    stop = Stop()
    made = tuning.Tuning(experiment, path, overwrite=overwrite, stop=stop)
    with stop, progress_bar(made.count * experiment.tune.seeds * experiment.train.rounds, quiet) as advance:
        made.on_round = lambda job, row: advance(job.label, row)
        if not (quiet or advance.live):
            made.on_end = functools.partial(tell_ending, made)
        finished = made.run()
    with made.turn():
        save_picture(made)
    if not quiet:
        show(made, finished)
        for line in made.edges():
            say("warning", line)
    if not finished:
        raise Interrupted(f"stopped after a round; {TO_GO_ON}{' without --overwrite' * overwrite}")
    made.refuse_all_diverged()


def tell_ending(made: tuning.Tuning, job: Job, record: Record) -> None:
    """Print how a run ended, as progress without a terminal."""
    how = f"{made.score_name} {record.history.best(made.metric, optional=True):.4f}"
    if record.diverged:
        how = f"diverged in round {len(record.history) + 1}"
    elif not record.complete:
        how += f", pruned after round {len(record.history)}"
    tell_progress(f"{job}: {how}")


def show(made: tuning.Tuning, finished: bool) -> None:
    """Print every trial, the choice, and notes about it."""
    out.print(table(made))
    best = made.best
    tell(f"chosen on {made.chosen_on()}")
    unfinished = sum(trial.remark == "not finished" for trial in made.trials)
    if finished and unfinished:
        tell(f"other workers still run {plural(unfinished, 'trial')}: the last of them writes the final tables")
    if best is None:
        tell("no trial ran to its end: nothing is chosen")
    else:
        tell(f"best: {written(best.settings)}; {made.score_name} {best.score:.4f}")
        ties = sum(trial.score == best.score for trial in made.trials) - 1
        if ties:
            tell(f"note: {ties} more with the same score; the first is taken")
        tell(f"run it with: lamina run {made.folder / 'best.toml'}")
    tell(f"runs, picture and tables in {made.folder}/")


def table(made: tuning.Tuning) -> Table:
    """Return every trial's values, best and last score, and how it ended."""
    unit = ", %" if made.metric == "accuracy" else ""
    headings = [*short_names(made.keys), f"{made.score_name}{unit}", f"last{unit}", ""]
    rows = []
    for trial in made.trials:
        values = [shown(trial.settings[key]) if key in trial.settings else "" for key in made.keys]
        scores = [_mean(numbers, made.metric) for numbers in (trial.best, trial.last)]
        rows.append([*values, *scores, "best" if trial is made.best else trial.remark])
    return plain_table(headings, rows, right=headings[:-1])


def _mean(numbers: list[float], metric: str) -> str:
    """Return the mean and, of several numbers, the standard deviation."""
    scale = 100 if metric == "accuracy" else 1
    parts = [statistics.fmean(numbers), *([statistics.stdev(numbers)] if len(numbers) > 1 else [])] if numbers else []
    return " ± ".join(f"{scale * part:.4g}" for part in parts) or "–"


def save_picture(made: tuning.Tuning) -> None:
    """Draw the score over the learning rate, a line for every choice of the other values, if rates were tried."""
    others = [key for key in made.keys if key != RATE]
    if RATE not in made.keys or not any(trial.best for trial in made.trials):
        return
    from lamina.report import figures, rates  # imported here: matplotlib takes a second

    # Optuna rarely takes a value of a range twice, so that a line through such points would mean nothing.
    ranges = [key for key in others if not made.space[key].choices]
    by_others: dict[str, list[rates.Tried]] = {}
    for trial in made.trials:
        if RATE in trial.settings:
            same = {key: trial.settings[key] for key in others if key not in ranges}
            tried = rates.Tried(trial.settings[RATE], trial.best or [math.nan], trial.remark)
            by_others.setdefault(written(same) or made.title, []).append(tried)
    found = [
        rates.Response(label, made.spec.select, sorted(tried, key=lambda one: one.lr), (), made.metric, not ranges)
        for label, tried in by_others.items()
    ]
    picture.save_picture(figures.rates_figure(found), made.folder / "learning-rates.png")
