"""Trials: train an experiment with several settings, each run in a folder of its own, and score the runs.

`Comparison` (compare.py) and `Tuning` (tune.py) decide which settings to try; `Trials` runs and resumes them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lamina.base.errors import BadInput, Diverged
from lamina.data.dataset import Splits
from lamina.experiment.build import build, hold_out, load_data, resolved
from lamina.experiment.config import Compare, Experiment, Tune
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.log_lines import LogLines
from lamina.experiment.runs.records import REPLACED, Record, check_folder, read_record
from lamina.experiment.runs.run import restore, resume_histories, train
from lamina.experiment.runs.tensorboard import TensorBoard
from lamina.experiment.trials.settings import Settings, written
from lamina.storage.leases import Lease, lost, take
from lamina.training.history import History, Row, mean, score_key, values
from lamina.training.population import mismatch
from lamina.training.training import Training

MAX_OPEN_RUNS = 64  # each holds a few files and its model


@dataclass(frozen=True, eq=False)
class Job:
    """One run to train or to resume."""

    experiment: Experiment
    folder: Path
    label: str  # for people
    tuning: bool  # whether it only helps to choose the settings
    algorithm: str  # its name, or the name that a comparison gives it

    @property
    def rounds(self) -> int:
        """Return the number of its rounds."""
        return self.experiment.train.rounds


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and the runs with them so far, one per seed."""

    name: str  # of its folder; in a comparison's results, of its algorithm; in a report, of its curve
    settings: Settings
    records: list[Record]
    seeds: int = 1  # how many runs it should have
    pruned: bool = False
    candidates: list[Trial] = field(default_factory=list)  # the trials that its settings were chosen from

    @property
    def title(self) -> str:
        """Return the title of its algorithm."""
        return self.records[0].title

    @property
    def lr(self) -> float:
        """Return the learning rate of a comparison's trial."""
        return float(self.settings["lr"])

    @property
    def histories(self) -> list[History]:
        """Return the history of every run."""
        return [record.history for record in self.records]

    @property
    def bad_endings(self) -> list[str]:
        """Return a line for every run that diverged."""
        endings = [record.diverged for record in self.records]
        label, pairs = f"{self.name}, {written(self.settings)}", zip(self.records, endings, strict=True)
        return [f"{label}, seed {record.seed}: {ending}" for record, ending in pairs if ending]

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
        """Return the best value of the first metric of every evaluated run."""
        return values(self.histories, lambda history: history.best(optional=True))

    @property
    def last(self) -> list[float]:
        """Return the last value of the first metric of every evaluated run."""
        return values(self.histories, lambda history: history.last(optional=True))

    @property
    def score(self) -> float:
        """Return the mean of the best values, by which trials are chosen; NaN if the trial does not count."""
        return mean(self.best) if self.best and not self.remark else math.nan

    @property
    def score_key(self) -> float:
        """Return a score by which trials are sorted: larger is better."""
        return score_key(self.score, self.histories[0].metric) if self.records else -math.inf


class _Open(NamedTuple):
    """A run with rounds left to train."""

    job: Job
    simulation: Training
    folder: RunFolder


class Trials:
    """Runs of one experiment in one folder: a run that is complete is skipped, any other is resumed.

    Args:
        experiment: the experiment file.
        section: its [compare] or [tune] section, which says on what data settings are chosen.
        key: a key that the folder's config.json has, if it holds earlier trials of the same kind.
        folder: the folder of all runs.
        overwrite: whether earlier runs in the folder may be deleted.
        stop: asked after every round whether to stop.
        tensorboard: whether every run also writes TensorBoard's event files.
    """

    def __init__(
        self,
        experiment: Experiment,
        section: Compare | Tune,
        key: str,
        folder: Path,
        *,
        overwrite: bool = False,
        stop: Callable[[], bool] = lambda: False,
        tensorboard: bool = False,
    ) -> None:
        kind = type(section).__name__.lower()
        check_folder(folder, key, f"those of lamina {kind}", overwrite=overwrite)  # before the data are read
        if tensorboard:
            TensorBoard(folder)  # names a missing package at once
        if experiment.data.validation is not None:
            raise BadInput(f"data.validation is for single runs: lamina {kind} holds out {kind}.validation by itself")
        self.experiment, self.folder = experiment, folder
        self.on_round: Callable[[Job, Row], None] = lambda job, row: None  # called after every round
        self.on_end: Callable[[Job, Record], None] = lambda job, record: None  # called for every run that has ended
        self._section, self._overwrite, self._stop, self._tensorboard = section, overwrite, stop, tensorboard
        self._splits: dict[tuple[float | None, int], Splits] = {}  # by held-out fraction and seed
        self._ended: dict[Path, None] = {}  # the folders of runs that have ended
        self._lease: Lease | None = None

    def _load(self, experiment: Experiment) -> Training:
        """Load the data and build one run, whose device all other runs use."""
        self._loaded = load_data(experiment)
        simulation = build(experiment, self._loaded)
        if simulation.test_data is not None:  # on the device already: else every run would copy them
            self._loaded = Splits(simulation.train_data, simulation.test_data)
        self.metric = simulation.metric
        return simulation

    @property
    def score_name(self) -> str:
        """Return the name of the score that settings are chosen by."""
        return f"best {self._section.select} {self.metric}"

    @property
    def target(self) -> float | None:
        """Return the value of the first metric to reach, if there is one."""
        return None

    @property
    def seeds(self) -> range:
        """Return the seeds of every trial."""
        first = self.experiment.train.seed
        return range(first, first + self._section.seeds)

    def _job(
        self, experiment: Experiment, seed: int, folder: str, label: str, algorithm: str, *, tuning: bool = True
    ) -> Job:
        """Return one run; a tuning run is evaluated on held-out training data, unless the test data decide."""
        held_out = self._section.validation if tuning and self._section.select == "validation" else None
        experiment = experiment.changed(train={"seed": seed}, data={"validation": held_out})
        return Job(experiment, self.folder / folder, f"{label}, seed {seed}", tuning, algorithm)

    @contextlib.contextmanager
    def _leased(self) -> Iterator[None]:
        """Hold the folder's lease; at the end, raise an error if records of finished runs are gone."""
        self._lease = take(self.folder)
        try:
            yield
            self._lease.refuse_lost()
            for folder in self._ended:
                if not (folder / "metrics.jsonl").exists():
                    raise lost(folder)
        finally:
            self._lease.release()

    @property
    def _is_replaced(self) -> bool:
        """Return whether the runs in the folder are to be deleted, now or since an --overwrite that was killed."""
        return self._overwrite or (self.folder / REPLACED).exists()

    def _refuse_lost(self) -> None:
        """Raise an error if the folder was removed, emptied or replaced."""
        if self._lease is not None:  # several processes may share a study's folder
            self._lease.refuse_lost()

    def _run(self, jobs: Sequence[Job], stop: Callable[[], bool] = lambda: False) -> bool:
        """Run the remaining rounds of jobs, as populations where they can be stacked; return whether all finished.

        `stop` is a further reason to stop after a round.
        """
        self._refuse_lost()
        for first in range(0, len(jobs), MAX_OPEN_RUNS):
            with LogLines() as lines, contextlib.ExitStack() as stack:
                left: list[_Open] = []
                for job in jobs[first : first + MAX_OPEN_RUNS]:
                    lines.about = job.folder  # whatever is logged while it is built
                    simulation = build(job.experiment, self._splits_of(job.experiment))
                    events = TensorBoard(job.folder) if self._tensorboard else None
                    config = resolved(job.experiment, simulation)
                    folder = stack.enter_context(RunFolder(job.folder, config, lines=lines, tensorboard=events))
                    if folder.ended:
                        self._end(job)
                    else:
                        left.append(_Open(job, simulation, folder))
                lines.about = None
                for group in stackable(left):
                    if not self._train(group, stop):
                        return False
                    for run in group:
                        self._end(run.job)
        return True

    def _train(self, group: list[_Open], stop: Callable[[], bool]) -> bool:
        """Train runs side by side, if they can resume after the same round; return whether they finished."""
        simulations, folders = [run.simulation for run in group], [run.folder for run in group]
        restore(simulations, folders)
        if len(group) > 1 and simulations[0].state.round == 0 and any(folder.rounds() for folder in folders):
            return all(self._train(part, stop) for part in _apart(group))
        resume_histories(simulations, folders)
        stopped = train(
            simulations,
            folders,
            group[0].job.experiment,
            stop=lambda: stop() or self._stop(),
            on_round=lambda i, row: self.on_round(group[i].job, row),
        )
        return not stopped

    def _end(self, job: Job) -> None:
        self._ended[job.folder] = None
        self.on_end(job, read_record(job.folder))

    def _splits_of(self, experiment: Experiment) -> Splits:
        """Return the data of a run; every seed holds out samples of its own."""
        held_out, seed = experiment.data.validation, experiment.train.seed
        if held_out is None:
            return self._loaded
        if (held_out, seed) not in self._splits:
            self._splits[held_out, seed] = hold_out(experiment, self._loaded.train)
        return self._splits[held_out, seed]


def read_begun(folders: Iterable[Path]) -> list[Record]:
    """Return the records of the runs that have begun."""
    return [read_record(folder) for folder in folders if (folder / "metrics.jsonl").exists()]


def refuse_nan(what: str, metric: str, trials: Sequence[Trial]) -> None:
    """Raise an error if all trials have ended and none has a score, but not because all diverged."""
    remarks = {trial.remark for trial in trials}
    if "" in remarks and "not finished" not in remarks and all(math.isnan(trial.score) for trial in trials):
        raise BadInput(
            f"{what}the metric '{metric}', by which settings are chosen, is NaN in every round of all trials: correct "
            "it or name another one first in `metrics`"
        )


def refuse_all_diverged(trials: Iterable[Trial], rule: Callable[[Iterable[object]], bool] = all) -> None:
    """Raise an error if all runs of every trial diverged; with the rule `any`, if some run of every trial did."""
    trials = list(trials)
    diverged = [(trial, record) for trial in trials for record in trial.records if record.diverged]
    if diverged and all(rule(record.diverged for record in trial.records) for trial in trials):
        trial, record = diverged[0]
        first = f"{trial.name}, {written(trial.settings)}, seed {record.seed}: {record.diverged}"
        raise Diverged(f"every run diverged; the first: {first}", round=len(record.history) + 1, client=None, layer="")


def stackable(runs: list[_Open]) -> list[list[_Open]]:
    """Return runs in groups that can train as one population; a run that cannot be stacked is a group of its own."""
    groups: list[list[_Open]] = []
    for run in runs:
        for group in groups:
            first = group[0]
            if _settings(first.job) == _settings(run.job) and not mismatch(first.simulation, run.simulation):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _apart(group: list[_Open]) -> list[list[_Open]]:
    """Return runs without a sound checkpoint of the same round in groups that have one, or each alone."""
    groups: dict[tuple[int, ...], list[_Open]] = {}
    for run in group:
        groups.setdefault(tuple(run.folder.rounds()), []).append(run)
    return list(groups.values()) if len(groups) > 1 else [[run] for run in group]


def _settings(job: Job) -> dict[str, Any]:
    """Return the settings that all runs of a population share: not the rate, the seed and the algorithm's numbers."""
    tree = job.experiment.model_dump(exclude={"compare": True, "algorithm": True, "train": {"lr", "seed"}})
    return {**tree, "algorithm": job.algorithm}
