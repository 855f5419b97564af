"""What comparisons and tunings share: run an experiment with several settings in one folder, and score the runs."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.data.dataset import Splits
from lamina.engines.stacked.engine import Stacked
from lamina.errors import BadInput
from lamina.experiment.build import build, load_data, resolved
from lamina.experiment.config import Compare, Experiment, Tune
from lamina.experiment.folder import RunFolder
from lamina.experiment.log_lines import LogLines
from lamina.experiment.records import Record, read_record
from lamina.experiment.run import go_on, train
from lamina.experiment.settings import Settings
from lamina.experiment.trackers import Trackers
from lamina.history import History, Row, rank
from lamina.population import mismatch
from lamina.simulation import Simulation
from lamina.storage.locks import Lock, lost

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


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and the runs with them so far, one per seed."""

    name: str  # of its folder
    settings: Settings
    metric: str  # "accuracy" or "loss"
    records: list[Record]
    seeds: int  # how many runs it should have
    pruned: bool = False

    @property
    def remark(self) -> str:
        """Return why the trial does not count; empty if it does."""
        if any(record.diverged for record in self.records):
            return "diverged"
        if self.pruned:
            return "pruned"
        is_complete = len(self.records) == self.seeds and all(record.complete for record in self.records)
        return "" if is_complete else "not finished"

    @property
    def best(self) -> list[float]:
        """Return the best value of every run that has any."""
        return self._values(lambda history: history.best(self.metric, optional=True))

    @property
    def last(self) -> list[float]:
        """Return the last value of every run that has any."""
        return self._values(lambda history: history.last(self.metric, optional=True))

    @property
    def score(self) -> float:
        """Return the mean of the best values, by which trials are chosen; NaN if the trial does not count."""
        return statistics.fmean(self.best) if self.best and not self.remark else math.nan

    @property
    def rank(self) -> float:
        """Return a number that is the larger, the better the trial is."""
        return rank(self.score, self.metric)

    def _values(self, of: Callable[[History], float]) -> list[float]:
        values = [of(record.history) for record in self.records]
        return [value for value in values if not math.isnan(value)]


class Tuner:
    """The runs of a comparison or a tuning in one folder.

    Args:
        experiment: the file.
        section: its [compare] or [tune] section, which says what data settings are chosen on.
        folder: where the runs are written.
        stop: asked after every round whether to stop.
        trackers: names of trackers that follow every run.
    """

    def __init__(
        self,
        experiment: Experiment,
        section: Compare | Tune,
        folder: Path,
        stop: Callable[[], bool],
        trackers: Sequence[str] = (),
    ) -> None:
        if experiment.data.validation is not None:
            kind = type(section).__name__.lower()
            raise BadInput(f"data.validation is for single runs: lamina {kind} holds out {kind}.validation by itself")
        self._section, self._folder, self._stop, self._trackers = section, folder, stop, trackers
        self._splits: dict[tuple[float | None, int], Splits] = {}  # by held-out fraction and seed
        self._ended: dict[Path, None] = {}  # the folders of runs that have ended
        self._lock: Lock | None = None

    def load(self, experiment: Experiment) -> Simulation:
        """Load the data and build one run, whose device all other runs use."""
        self._loaded = load_data(experiment)
        simulation = build(experiment, self._loaded)
        if simulation.test_data is not None:  # on the device already: else every run would copy them
            self._loaded = Splits(simulation.train_data, simulation.test_data)
        return simulation

    def job(
        self, experiment: Experiment, settings: Settings, seed: int, folder: Path, label: str, *, tuning: bool = True
    ) -> Job:
        """Return one run; a tuning run is evaluated on held-out training data, unless the test data decide."""
        held_out = self._section.validation if tuning and self._section.select == "validation" else None
        train = experiment.train.model_copy(update={"seed": seed})
        data = experiment.data.model_copy(update={"validation": held_out})
        experiment = experiment.model_copy(update={"train": train, "data": data})
        return Job(experiment, settings, self._folder / folder, label, tuning)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; at the end, raise an error if records of finished runs are gone."""
        self._lock = Lock(self._folder)
        try:
            yield
            self.refuse_lost()
            for place in self._ended:
                if not (place / "metrics.jsonl").exists():
                    raise lost(place)
        finally:
            self._lock.release()

    def refuse_lost(self) -> None:
        """Raise an error if the folder was removed, emptied or replaced."""
        if self._lock is not None:
            self._lock.refuse_lost()

    def run(
        self, jobs: Sequence[Job], on_round: OnRound, on_end: OnEnd, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Run what is left of some jobs, as populations where they can be stacked; return whether all finished.

        Args:
            jobs: the runs.
            on_round: called after every round.
            on_end: called when a run is complete or has diverged, also for those that had ended before.
            stop: a further reason to stop after a round.
        """
        self.refuse_lost()
        for first in range(0, len(jobs), MOST_AT_ONCE):
            with LogLines() as lines, contextlib.ExitStack() as opened:
                left: list[Started] = []
                for job in jobs[first : first + MOST_AT_ONCE]:
                    lines.about = job.folder  # whatever is logged while it is built
                    alike = (run.simulation for run in left if _protocol(run.job) == _protocol(job))
                    simulation = build(job.experiment, self._splits_of(job.experiment), like=next(alike, None))
                    folder = RunFolder(job.folder, resolved(job.experiment, simulation), lines=lines)
                    opened.callback(folder.close)
                    name = f"{self._folder.name}/{job.folder.relative_to(self._folder).as_posix()}"
                    trackers = opened.enter_context(Trackers(self._trackers, job.folder, name))
                    if not folder.complete and folder.diverged is None:
                        left.append(Started(job, simulation, folder, trackers))
                        continue
                    if len(folder.history):
                        trackers.write(folder.history)  # asked for only now, or killed before the last round
                    self._end(job, on_end)
                lines.about = None
                for group in stackable(left):
                    if not self._train(group, on_round, stop):
                        return False
                    for run in group:
                        self._end(run.job, on_end)
        return True

    def _train(self, group: list[Started], on_round: OnRound, stop: Callable[[], bool]) -> bool:
        """Train runs side by side; return whether they finished."""
        simulations, folders = [run.simulation for run in group], [run.folder for run in group]
        go_on(simulations, folders)
        ended = train(
            simulations,
            folders,
            group[0].job.experiment,
            stop=lambda: stop() or self._stop(),
            on_round=lambda i, row: on_round(group[i].job, row),
            trackers=[run.trackers for run in group],
        )
        return not ended.stopped

    def _end(self, job: Job, on_end: OnEnd) -> None:
        self._ended[job.folder] = None
        on_end(job, read_record(job.folder))

    def _splits_of(self, experiment: Experiment) -> Splits:
        """Return the data of a run; every seed holds out samples of its own."""
        held_out, seed = experiment.data.validation, experiment.train.seed
        if held_out is None:
            return self._loaded
        if (held_out, seed) not in self._splits:
            self._splits[held_out, seed] = Splits(*self._loaded.train.holdout(held_out, seed))
        return self._splits[held_out, seed]


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
