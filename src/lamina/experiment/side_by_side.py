"""Train several runs, each in a folder of its own, as populations where they can be stacked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.data.dataset import Splits
from lamina.engines.stacked.engine import Stacked
from lamina.experiment.build import build, resolved
from lamina.experiment.config import Experiment
from lamina.experiment.folder import RunFolder
from lamina.experiment.log_lines import LogLines
from lamina.experiment.records import Record, read_record
from lamina.experiment.run import go_on, train
from lamina.experiment.settings import Settings
from lamina.experiment.trackers import Trackers
from lamina.history import Row
from lamina.population import mismatch
from lamina.simulation import Simulation

MOST_AT_ONCE = 64  # open runs: each holds a few files and its model


@dataclass(frozen=True, eq=False)
class Job:
    """One run to make or to resume."""

    experiment: Experiment
    settings: Settings  # the values that are tried with it
    folder: Path
    label: str  # for people
    tuning: bool  # whether it only helps to choose the settings

    def __str__(self) -> str:
        return self.label

    @property
    def algorithm(self) -> str:
        """Return the name of its algorithm."""
        return self.experiment.algorithm.name

    @property
    def lr(self) -> float:
        """Return its learning rate."""
        return float(self.experiment.train.lr)

    @property
    def seed(self) -> int:
        """Return its seed."""
        return int(self.experiment.train.seed)

    @property
    def rounds(self) -> int:
        """Return the number of its rounds."""
        return self.experiment.train.rounds


@dataclass(frozen=True)
class Started:
    """A job with rounds left to train."""

    job: Job
    simulation: Simulation
    folder: RunFolder
    trackers: Trackers


OnRound = Callable[[Job, Row], None]
OnEnd = Callable[[Job, Record], None]


def run_side_by_side(
    jobs: Sequence[Job],
    root: Path,
    splits_of: Callable[[Experiment], Splits],
    *,
    stop: Callable[[], bool],
    on_round: OnRound,
    on_end: OnEnd,
    trackers: Sequence[str] = (),
) -> bool:
    """Run what is left of some jobs, as populations where they can be stacked; return whether all finished.

    Args:
        jobs: the runs.
        root: the folder they have in common; trackers name runs relative to it.
        splits_of: returns the data of a run.
        stop: asked after every round whether to stop.
        on_round: called after every round.
        on_end: called when a run is complete or has diverged, also for those that had ended before.
        trackers: names of trackers that follow every run.
    """
    for first in range(0, len(jobs), MOST_AT_ONCE):
        with LogLines() as lines, contextlib.ExitStack() as opened:
            left: list[Started] = []
            for job in jobs[first : first + MOST_AT_ONCE]:
                lines.about = job.folder  # whatever is logged while it is built
                alike = (run.simulation for run in left if _protocol(run.job) == _protocol(job))
                simulation = build(job.experiment, splits_of(job.experiment), like=next(alike, None))
                folder = RunFolder(job.folder, resolved(job.experiment, simulation), lines=lines)
                opened.callback(folder.close)
                name = f"{root.name}/{job.folder.relative_to(root).as_posix()}"
                tracked = opened.enter_context(Trackers(trackers, job.folder, name))
                if folder.complete or folder.diverged is not None:
                    if len(folder.history):
                        tracked.write(folder.history)  # asked for only now, or killed before the last round was written
                    on_end(job, read_record(job.folder))
                else:
                    left.append(Started(job, simulation, folder, tracked))
            lines.about = None
            if not all(_train(group, stop, on_round, on_end) for group in stackable(left)):
                return False
    return True


def _train(group: list[Started], stop: Callable[[], bool], on_round: OnRound, on_end: OnEnd) -> bool:
    """Train runs side by side; return whether they finished."""
    simulations, folders = [run.simulation for run in group], [run.folder for run in group]
    go_on(simulations, folders)
    ended = train(
        simulations,
        folders,
        group[0].job.experiment,
        stop=stop,
        on_round=lambda i, row: on_round(group[i].job, row),
        trackers=[run.trackers for run in group],
    )
    if ended.stopped:
        return False
    for run in group:
        on_end(run.job, read_record(run.folder.path))
    return True


def stackable(runs: list[Started]) -> list[list[Started]]:
    """Return runs in groups that can train as one population; a run that cannot be stacked is a group of its own."""
    groups: list[list[Started]] = []
    for run in runs:
        fitting = (
            group
            for group in groups
            if _protocol(group[0].job) == _protocol(run.job) and not mismatch(group[0].simulation, run.simulation)
        )
        group = next(fitting, None) if isinstance(run.simulation.engine, Stacked) else None
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _protocol(job: Job) -> dict[str, Any]:
    """Return what the runs of a population have in common: all but the rate, the seed and the algorithm's numbers."""
    tree = job.experiment.model_dump(exclude={"compare": True, "algorithm": True, "train": {"lr", "seed"}})
    return {**tree, "algorithm": job.algorithm}
