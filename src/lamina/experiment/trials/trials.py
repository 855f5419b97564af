"""Trials: train an experiment with several settings, each run in a folder of its own, and score the runs.

`Comparison` (compare.py) and `Tuning` (tune.py) decide which settings to try; `Trials` runs and resumes them. Several
processes may share the folder, on any machines: each trains the runs that it could lease, waits for the others, and
reads all records, so that all come to the same results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lamina.base.errors import BadInput
from lamina.data.dataset import Splits
from lamina.engines.stacked.engine import Stacked
from lamina.experiment.build import build, has_own_models, hold_out, load_data, resolved
from lamina.experiment.config import Compare, Experiment, Tune
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.log_lines import LogLines
from lamina.experiment.runs.records import (
    CHOOSE_ANOTHER,
    REPLACED,
    Record,
    check_folder,
    has_all_rounds,
    kept_engine,
    names_in,
    read_record,
    setting_differences,
)
from lamina.experiment.runs.run import restore, resume_histories, train
from lamina.experiment.runs.tensorboard import TensorBoard
from lamina.storage.files import as_json
from lamina.storage.leases import Lease, Owner, claim, count_joined, is_held, join, lost, others, turn
from lamina.training.history import Row
from lamina.training.metrics import client_mean
from lamina.training.population import mismatch
from lamina.training.training import NO_OWN_TESTS, Training

# Runs that train as one: more gain little, and leave nothing for other processes. Each holds a few files and its model.
MAX_POPULATION = {"cpu": 16, "cuda": 32}
WAIT_S = 0.5  # between two looks at the runs of other processes


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

    _config: dict[str, Any]  # of the folder

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
        self.on_wait: Callable[[int], None] = lambda runs: None  # called before waiting for runs of other processes
        self._section, self._overwrite, self._stop, self._tensorboard = section, overwrite, stop, tensorboard
        self._splits: dict[tuple[float | None, int], Splits] = {}  # by held-out fraction and seed
        self._ended: dict[Job, None] = {}
        self._unchecked: set[Path] = set()  # folders of runs that may have been trained with other settings
        self._lease: Lease | None = None  # shows the other processes that this one shares the folder

    def _load(self, experiment: Experiment, others: Iterable[Experiment] = ()) -> Training:
        """Load the data and build one run, whose device all other runs use.

        If clients have models of their own in it or in others of the trials, all trials are judged by the mean over
        clients, each on its own test data.
        """
        self._loaded = load_data(experiment)
        simulation = build(experiment, self._loaded)
        if simulation.test_data is not None:  # on the device already: else every run would copy them
            self._loaded = Splits(simulation.train_data, simulation.test_data)
        self._own_models = any(map(has_own_models, [experiment, *others]))
        first = simulation.metrics[0].name
        self.metric = simulation.evaluation.judged_column(first, self._own_models)
        if self._own_models and self.metric != client_mean(first):
            raise BadInput(NO_OWN_TESTS)
        self._can_stack = isinstance(simulation.engine, Stacked)
        self._device_type = simulation.device.type
        return simulation

    @property
    def score_name(self) -> str:
        """Return the name of the score that settings are chosen by."""
        return f"final {self._section.select} {self.metric}"

    def _held_out(self) -> str:
        """Return which part of the training data settings are chosen on."""
        data, fraction = self.experiment.data, self._section.validation
        if self.metric.startswith("client_") and data.local_test is not None:
            return f"{data.local_test:.0%} of every client's training data, held out"
        return f"{fraction:.0%} of the training data, held out"

    @property
    def target(self) -> float | None:
        """Return the value of the first metric to reach, if there is one."""
        return None

    def _job(
        self, experiment: Experiment, seed: int, folder: str, label: str, algorithm: str, *, tuning: bool = True
    ) -> Job:
        """Return one run; a tuning run is evaluated on held-out training data, unless the test data decide."""
        held_out = self._section.validation if tuning and self._section.select == "validation" else None
        experiment = experiment.changed(train={"seed": seed}, data={"validation": held_out})
        return Job(experiment, self.folder / folder, f"{label}, seed {seed}", tuning, algorithm)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """Share the folder with other processes; at the end, raise an error if records of finished runs are gone."""
        with turn(self.folder):
            for owner in others(self.folder):
                self._refuse_to_join(owner)
            self._lease = join(self.folder, self._config)
        try:
            with self._turn():
                self._prepare()
                runs = [config.parent for config in self.folder.rglob("config.json")]
                # Others have the same settings as this process: what they train from now on needs no check.
                self._unchecked = {folder for folder in runs if not is_held(folder)}
            yield
            self._refuse_lost()
            for job in self._ended:
                if not (job.folder / "metrics.jsonl").exists():
                    raise lost(job.folder)
        finally:
            self._lease.release()

    def _refuse_to_join(self, owner: Owner) -> None:
        """Raise an error if this process cannot share the folder with another one."""
        if self._overwrite:
            raise in_use(owner, self.folder)
        differing = setting_differences(owner.settings or {}, as_json(self._config))
        if differing:
            raise BadInput(
                f"{owner} works in the folder '{self.folder}' with other settings: {differing}; choose another folder "
                "with --out (out=…), or give the same settings to share the work"
            )

    def _prepare(self) -> None:
        """Check and mark the folder, or delete its runs if they are to be replaced."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Write to the folder while no other process does."""
        self._refuse_lost()
        with turn(self.folder):
            yield

    @property
    def _is_replaced(self) -> bool:
        """Return whether the runs in the folder are to be deleted, now or since an --overwrite that was killed."""
        return self._overwrite or (self.folder / REPLACED).exists()

    def _refuse_lost(self) -> None:
        """Raise an error if the folder was removed, emptied or replaced."""
        assert self._lease is not None
        self._lease.refuse_lost()

    def _run(self, plans: Sequence[Iterator[Sequence[Job]]], stop: Callable[[], bool] = lambda: False) -> bool:
        """Run the jobs of all plans, together with the other processes; return whether all finished.

        A plan yields the jobs of a stage, and of the next one when all of them have ended, here or elsewhere. `stop` is
        a further reason to stop after a round.
        """
        stages: dict[Iterator[Sequence[Job]], list[list[Job]]] = {plan: [] for plan in plans}
        is_waiting = False
        while True:
            self._refuse_lost()
            for plan in plans:
                while plan in stages and not (left := self._left(stages[plan])):
                    jobs = next(plan, None)
                    if jobs is None:
                        del stages[plan]
                    else:
                        stages[plan] = self._units(jobs)
                if plan in stages:
                    stages[plan] = left
            units = [unit for stage in stages.values() for unit in stage]
            if not units:
                return True
            leases = next(filter(None, map(self._claim, units)), None)
            if leases is not None:
                is_waiting = False
                if not self._train_unit(leases, stop):
                    return False
            elif self._stop():
                return False
            else:
                if not is_waiting:
                    self.on_wait(sum(map(len, self._left(units))))
                is_waiting = True
                time.sleep(WAIT_S)

    def _left(self, units: Iterable[Sequence[Job]]) -> list[list[Job]]:
        """Return the jobs that have not ended, by unit."""
        return [left for unit in units if (left := [job for job in unit if not self._has_ended(job)])]

    def _has_ended(self, job: Job) -> bool:
        """Return whether a job has ended, and report one that another process has ended since we looked."""
        if job in self._ended:
            return True
        if job.folder in self._unchecked or not has_ended(job):
            return False
        self._end(job)
        return True

    def _units(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return jobs in units that one process trains: those that may be stacked, at most `MAX_POPULATION` of them.

        Populations of other sizes round differently, so the units must not depend on how many processes there are.
        """
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            data, seed = job.experiment.data.validation, job.experiment.train.seed
            key = repr((_settings(job), data and seed)) if self._can_stack else str(job.folder)
            groups.setdefault(key, []).append(job)
        size = MAX_POPULATION[self._device_type]
        return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]

    def _claim(self, unit: Sequence[Job]) -> dict[Job, Lease]:
        """Lease all jobs of a unit; none if another process has one, as a part of a population rounds differently."""
        leases: dict[Job, Lease] = {}
        if any(is_held(job.folder) for job in unit):
            return leases
        for job in unit:
            lease = claim(job.folder)
            if lease is None:  # another process was faster
                for mine in leases.values():
                    mine.release()
                return {}
            leases[job] = lease
        for job in list(leases):
            if self._has_ended(job):  # before it was leased
                leases.pop(job).release()
        return leases

    def _train_unit(self, leases: Mapping[Job, Lease], stop: Callable[[], bool]) -> bool:
        """Run the remaining rounds of leased jobs, as populations where they can be stacked; return whether all did.

        Of several populations, only the first one is trained if other processes can train the rest.
        """
        with LogLines() as lines, contextlib.ExitStack() as stack:
            for lease in leases.values():
                stack.callback(lease.release)
            left: list[_Open] = []
            for job, lease in leases.items():
                lines.about = job.folder  # whatever is logged while it is built
                engine = kept_engine(job.folder, job.experiment.run.engine)
                simulation = build(job.experiment.changed(run={"engine": engine}), self._splits_of(job.experiment))
                events = TensorBoard(job.folder) if self._tensorboard else None
                config = resolved(job.experiment, simulation)
                folder = RunFolder(job.folder, config, lines=lines, tensorboard=events, lease=lease)
                stack.callback(folder.close)
                self._unchecked.discard(job.folder)
                if folder.ended:
                    self._end(job)
                else:
                    left.append(_Open(job, simulation, folder))
            lines.about = None
            groups = stackable(left)
            if count_joined(self.folder) > 1:
                for run in (run for group in groups[1:] for run in group):
                    run.folder.close()
                groups = groups[:1]
            for group in groups:
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
        self._ended[job] = None
        self.on_end(job, self._record(job.folder))

    def _record(self, folder: Path) -> Record:
        """Return a run, judged by the column that all trials are judged by."""
        return read_record(folder).judged_by(self.metric)

    def _splits_of(self, experiment: Experiment) -> Splits:
        """Return the data of a run; every seed holds out samples of its own."""
        held_out, seed = experiment.data.validation, experiment.train.seed
        if held_out is None:
            return self._loaded
        if (held_out, seed) not in self._splits:
            self._splits[held_out, seed] = hold_out(experiment, self._loaded)
        return self._splits[held_out, seed]


def tuning_seed(experiment: Experiment, number: int = 0) -> int:
    """Return the seed of a tuning run: they count down from `train.seed`, because reported runs count up from it."""
    return int(experiment.train.seed) - 1 - number


def tuned_on_a_reported_seed(folder: Path, seed: int) -> BadInput:
    """Return the error for tuning runs of an earlier version, which had the first seed of the final runs."""
    return BadInput(
        f"an earlier version of lamina tuned in '{folder}' on seed {seed}, which is reported: {CHOOSE_ANOTHER}; "
        "lamina report still shows its runs"
    )


def mark_replaced(folder: Path, section: Compare | Tune) -> None:
    """Let the first of several workers that joins the folder delete its runs; refuse if a process works there."""
    kind, key = ("compare", "algorithms") if isinstance(section, Compare) else ("tune", "tuning")
    check_folder(folder, key, f"those of lamina {kind}", overwrite=True)
    with turn(folder):
        for owner in others(folder):
            raise in_use(owner, folder)
        if names_in(folder):
            (folder / REPLACED).touch()


def in_use(owner: Owner, folder: Path) -> BadInput:
    """Return the error of an --overwrite of a folder that another process works in."""
    return BadInput(
        f"{owner} works in the folder '{folder}', and --overwrite would delete its runs: run the command without "
        "--overwrite to share the work, or end that process first"
    )


def has_ended(job: Job) -> bool:
    """Return whether a job's folder holds all its rounds and the model, or a run that diverged."""
    if (job.folder / "diverged.json").exists():
        return True
    if not (job.folder / "model.safetensors").exists():
        return False
    record, train = read_record(job.folder), job.experiment.train
    goal = {"rounds": train.rounds, "patience": train.patience}  # more than the folder's: it is resumed
    return has_all_rounds(record.history, {**record.config, "train": {**record.config["train"], **goal}})


def stackable(runs: list[_Open]) -> list[list[_Open]]:
    """Return runs in groups that train as one population; a run that is not stacked is a group of its own."""
    groups: list[list[_Open]] = []
    for run in runs:
        for group in groups if isinstance(run.simulation.engine, Stacked) else ():
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
