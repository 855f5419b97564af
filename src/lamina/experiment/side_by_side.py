"""Several runs, each in a folder of its own: as populations where they can be stacked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.data.dataset import Splits
from lamina.engines.stacked.engine import Stacked
from lamina.errors import BadInput
from lamina.experiment.config import Experiment
from lamina.experiment.folder import CHOOSE_ANOTHER, LogLines, RunFolder, is_ours, unreadable_config
from lamina.experiment.records import Record, read_json, read_record, refuse_format
from lamina.experiment.run import build, go_on, resolved, train
from lamina.experiment.trackers import Trackers
from lamina.history import Row
from lamina.population import mismatch
from lamina.simulation import Simulation
from lamina.storage.files import PARTIAL, check_writable

MOST_AT_ONCE = 64  # runs that are open together: each holds a few files and its model


@dataclass(frozen=True)
class Planned:
    """A run to be made, or gone on with, in its folder."""

    experiment: Experiment
    splits: Splits
    folder: Path
    name: str = ""  # for trackers; else the folder's


@dataclass(frozen=True)
class Started:
    """A run with something left to do."""

    number: int  # among those planned
    experiment: Experiment
    simulation: Simulation
    folder: RunFolder
    trackers: Trackers


def run_side_by_side(
    runs: Sequence[Planned],
    *,
    stop: Callable[[], bool],
    on_round: Callable[[int, Row], None],
    on_end: Callable[[int, Record], None],
    trackers: Sequence[str] = (),
) -> bool:
    """Run what is left of some runs, as populations where they can be stacked; whether they were finished.

    Both callbacks get the number of the run in the list; `on_end` is called for those that had ended before, too.
    """
    for first in range(0, len(runs), MOST_AT_ONCE):
        with LogLines() as lines, contextlib.ExitStack() as opened:
            left: list[Started] = []
            for number, run in enumerate(runs[first : first + MOST_AT_ONCE], first):
                lines.about = run.folder  # whatever is said while it is made
                simulation = build(run.experiment, run.splits, like=_alike(run.experiment, left))
                config = resolved(run.experiment, simulation)
                folder = RunFolder(run.folder, config, lines=lines)
                opened.callback(folder.close)
                tracked = opened.enter_context(Trackers(trackers, run.folder, run.name))
                if folder.complete or folder.diverged is not None:
                    if len(folder.history):
                        tracked.write(folder.history)  # asked for only now, or killed before the last round was written
                    on_end(number, read_record(run.folder))
                else:
                    left.append(Started(number, run.experiment, simulation, folder, tracked))
            lines.about = None
            if not all(_train(group, stop, on_round, on_end) for group in stackable(left)):
                return False
    return True


def _train(
    group: list[Started],
    stop: Callable[[], bool],
    on_round: Callable[[int, Row], None],
    on_end: Callable[[int, Record], None],
) -> bool:
    """Train runs side by side; whether they were finished."""
    simulations, folders = [run.simulation for run in group], [run.folder for run in group]
    go_on(simulations, folders)

    def finished(i: int, row: Row) -> None:
        on_round(group[i].number, row)

    trackers = [run.trackers for run in group]
    ended = train(simulations, folders, group[0].experiment, stop=stop, on_round=finished, trackers=trackers)
    if ended.stopped:
        return False
    for run in group:
        on_end(run.number, read_record(run.folder.path))
    return True


def _alike(experiment: Experiment, runs: list[Started]) -> Simulation | None:
    """A run that differs in no more than its numbers."""
    return next((run.simulation for run in runs if _protocol(run.experiment) == _protocol(experiment)), None)


def stackable(runs: list[Started]) -> list[list[Started]]:
    """Runs in groups that can train as one population; a run that cannot be stacked is a group of its own."""
    groups: list[list[Started]] = []
    for run in runs:
        fitting = (
            group
            for group in groups
            if _protocol(group[0].experiment) == _protocol(run.experiment)
            and not mismatch(group[0].simulation, run.simulation)
        )
        group = next(fitting, None) if isinstance(run.simulation.engine, Stacked) else None
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _protocol(experiment: Experiment) -> dict[str, Any]:
    """What the rows of a population have in common: all but the rate, the seed and the algorithm's numbers."""
    tree = experiment.model_dump(exclude={"compare": True, "algorithm": True, "train": {"lr", "seed"}})
    return {**tree, "algorithm": experiment.algorithm.name}


def check_folder(folder: Path, key: str, whose: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that cannot be written to, or whose config.json lacks the key that tells what it holds."""
    check_writable(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if all(name == "lock" or name.endswith(PARTIAL) for name in names):
        return
    config = read_json(folder / "config.json") if is_ours(folder) else {}
    if key not in config:
        holds = unreadable_config(folder) or f"other files than {whose}"
        raise BadInput(f"the folder '{folder}' holds {holds}: choose another with --out")
    if not overwrite:
        refuse_format(folder, config, CHOOSE_ANOTHER)
