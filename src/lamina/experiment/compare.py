"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives learning rates to try, each is run once on the first seed and the one with the best accuracy on
held-out *training* data is kept; the test data are looked at only in the final runs, one per seed. (The papers choose
on the test data: ``compare.select = "test"``.)
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lamina
from lamina import algorithms
from lamina.data.dataset import Splits
from lamina.engines.stacked.engine import Stacked
from lamina.errors import BadInput
from lamina.experiment.config import AlgorithmSection, Experiment
from lamina.experiment.files import PARTIAL, cannot_write, check_writable, write_file, write_json
from lamina.experiment.folder import FORMAT, Lock, LogLines, RunFolder, is_ours, refuse_format
from lamina.experiment.records import Record, read_json, read_record
from lamina.experiment.run import build, build_algorithm, go_on, load_data, resolved, train
from lamina.history import History, Row
from lamina.population import mismatch
from lamina.simulation import Simulation


@dataclass
class Entry:
    """One algorithm's results so far; only finished runs enter it."""

    name: str
    title: str
    lr: float
    tuning: dict[float, float]  # rate -> best validation accuracy (NaN: diverged)
    seeds: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)  # one per seed
    diverged: list[str] = field(default_factory=list)  # one line for every run that did


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    algorithm: str
    lr: float
    seed: int
    tuning: bool  # it only helps to choose the rate

    def __str__(self) -> str:
        return f"{self.algorithm}, lr {self.lr:g}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Its folder inside the comparison's."""
        name = self.algorithm.replace(":", ".")
        return Path("tuning", name, f"lr{self.lr!r}") if self.tuning else Path(name, f"seed{self.seed}")


class Watcher:
    """Whoever follows a comparison; this one looks away."""

    def round_finished(self, job: Job, row: Row) -> None:
        """A run has one round more."""

    def run_ended(self, job: Job, record: Record) -> None:
        """A run is complete, or has diverged; just now or in an earlier start of the comparison."""


class Comparison:
    """The comparison of an experiment file in a folder: checked when made, then `run`; `entries` fills as runs finish.

    Every run has a folder of its own, ``<algorithm>/seed<n>`` or ``tuning/<algorithm>/lr<rate>``, so that a comparison
    started again skips what is complete and goes on with what is not.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        overwrite: bool = False,
        watcher: Watcher = Watcher(),  # noqa: B008 (it has no state)
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        check_folder(folder, "algorithms", "a comparison's", overwrite=overwrite)  # before the data are read
        self.experiment, self.folder = experiment, folder
        self._overwrite, self._watcher, self._stop = overwrite, watcher, stop
        self.entries: list[Entry] = []
        spec = experiment.compare
        if not spec.algorithms:
            raise BadInput("compare.algorithms is empty: name at least one algorithm")
        if experiment.data.validation is not None:
            raise BadInput("data.validation is for single runs: a comparison holds out compare.validation by itself")
        for name in {**spec.lr, **spec.options}:
            if ":" not in name:  # settings for a method left out this time are fine, a misspelt name is not
                algorithms.find(name)
        # All is made once before anything runs, so that a wrong name or option costs no time.
        self._own = {name: with_algorithm(experiment, name) for name in spec.algorithms}
        for own in self._own.values():
            build_algorithm(own)
        self._splits = load_data(experiment)
        first = next(iter(self._own.values()))
        simulation = build(first, self._splits)
        self.clients = simulation.plan.clients.count
        self._config = {"lamina": lamina.__version__, "format": FORMAT, **resolved(first, simulation)}
        del self._config["algorithm"]  # each method has its own, with its own rate
        self._config["train"]["lr"] = experiment.train.lr
        self._config["algorithms"] = {}

    def rates(self, name: str) -> list[float]:
        """The rates to choose from for a method; one alone is no choice."""
        rates = self.experiment.compare.lr.get(name, [])
        return list(dict.fromkeys(rates)) if len(set(rates)) > 1 else []

    def run(self) -> bool:
        """Run what is left of it; whether it was finished, not stopped."""
        lock = Lock(self.folder)
        try:
            if not is_ours(self.folder):  # an earlier comparison's tables stay until its runs are known to be the same
                self._save()
            return all(self._run_algorithm(name) for name in self._own)
        finally:
            lock.release()

    def _run_algorithm(self, name: str) -> bool:
        """Choose a rate if there is a choice, then run every seed; whether it was finished."""
        own, first_seed = self._own[name], self.experiment.train.seed
        rates = self.rates(name)
        tried = [Job(name, rate, first_seed, True) for rate in rates]
        if not self._run_jobs(tried):
            return False
        tuning = {job.lr: _score(read_record(self.folder / job.folder)) for job in tried}
        given = own.compare.lr.get(name, [])
        lr = given[0] if given else own.train.lr or algorithms.find(name).card.lr
        if tuning:
            lr = max(tuning, key=lambda rate: -math.inf if math.isnan(tuning[rate]) else tuning[rate])
        jobs = [Job(name, lr, seed, False) for seed in range(first_seed, first_seed + own.compare.seeds)]
        finished = self._run_jobs(jobs)
        entry = Entry(name, algorithms.find(name).card.title, lr, tuning)
        for job in jobs:
            place = self.folder / job.folder
            record = read_record(place) if (place / "metrics.jsonl").exists() else None
            if record is not None and record.ended:
                entry.seeds.append(job.seed)
                entry.histories.append(record.history)
                entry.diverged += [f"{job}: {record.diverged}"] if record.diverged else []
                self._config["algorithms"][name] = {"lr": lr, **record.config["algorithm"]}
        if entry.seeds:
            self.entries.append(entry)
        self._save()
        return finished

    def _run_jobs(self, jobs: list[Job]) -> bool:
        """Run what is left of some runs of one algorithm, side by side where they can be stacked."""
        if not jobs:
            return True
        experiments = [self._experiment(job) for job in jobs]
        splits = self._splits
        if experiments[0].data.validation is not None:  # the same samples for every rate
            splits = Splits(*splits.train.holdout(experiments[0].data.validation, experiments[0].train.seed))
        return run_side_by_side(
            [
                Planned(experiment, splits, self.folder / job.folder)
                for job, experiment in zip(jobs, experiments, strict=True)
            ],
            overwrite=self._overwrite,
            stop=self._stop,
            on_round=lambda i, row: self._watcher.round_finished(jobs[i], row),
            on_end=lambda i, record: self._watcher.run_ended(jobs[i], record),
        )

    def _experiment(self, job: Job) -> Experiment:
        """One run as an experiment of its own."""
        own = self._own[job.algorithm]
        train = own.train.model_copy(update={"lr": job.lr, "seed": job.seed})
        held_out = own.compare.validation if job.tuning and own.compare.select == "validation" else None
        return own.model_copy(update={"train": train, "data": own.data.model_copy(update={"validation": held_out})})

    def notes(self) -> list[str]:
        """What a reader should know: how rates were chosen, runs that diverged, a best rate on the edge."""
        lines = []
        spec, given = self.experiment.compare, self.experiment.train.lr
        if any(self.rates(name) for name in self._own):
            on = (
                f"{spec.validation:.0%} of the training data, held out"
                if spec.select == "validation"
                else "the test data"
            )
            lines.append(f"rates were chosen on {on}")
        untuned = [name for name in self._own if not spec.lr.get(name)]
        if given is not None and untuned:
            lines.append(f"train.lr = {given:g} is used for {', '.join(untuned)}: no rates in [compare.lr]")
        for entry in self.entries:
            lines += entry.diverged
            tried = sorted(entry.tuning)
            if len(tried) > 1 and entry.lr in (tried[0], tried[-1]):
                lines.append(
                    f"{entry.name}: the best rate {entry.lr:g} lies on the edge of those tried; try a wider range"
                )
        return lines

    def _save(self) -> None:
        """Write the configuration, every finished run's rounds, and what was tried in tuning."""
        histories = [history for entry in self.entries for history in entry.histories]
        columns = dict.fromkeys(column for history in histories for column in history.columns)
        rounds = [
            {"algorithm": entry.name, "learning_rate": entry.lr, "seed": seed, **row}
            for entry in self.entries
            for seed, history in zip(entry.seeds, entry.histories, strict=True)
            for row in history
        ]
        score = f"best_{self.experiment.compare.select}_accuracy"
        tried = [
            {"algorithm": entry.name, "learning_rate": rate, score: best, "chosen": rate == entry.lr}
            for entry in self.entries
            for rate, best in entry.tuning.items()
        ]
        try:
            write_json(self.folder / "config.json", self._config)
            write_csv(self.folder / "rounds.csv", ["algorithm", "learning_rate", "seed", *columns], rounds)
            write_csv(self.folder / "tuning.csv", ["algorithm", "learning_rate", score, "chosen"], tried)
        except OSError as error:
            raise cannot_write(self.folder, error) from error


# --- several runs, each in a folder of its own -------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A run to be made, or gone on with, in its folder."""

    experiment: Experiment
    splits: Splits
    folder: Path


@dataclass(frozen=True)
class Started:
    """A run with something left to do."""

    number: int  # among those planned
    experiment: Experiment
    simulation: Simulation
    folder: RunFolder


def run_side_by_side(
    runs: Sequence[Planned],
    *,
    overwrite: bool,
    stop: Callable[[], bool],
    on_round: Callable[[int, Row], None],
    on_end: Callable[[int, Record], None],
) -> bool:
    """Run what is left of some runs, as populations where they can be stacked; whether they were finished.

    Both callbacks get the number of the run in the list; `on_end` is called for those that had ended before, too.
    """
    with LogLines() as lines, contextlib.ExitStack() as opened:
        left: list[Started] = []
        for number, run in enumerate(runs):
            simulation = build(run.experiment, run.splits)
            config = resolved(run.experiment, simulation)
            folder = RunFolder(run.folder, config, overwrite=overwrite, lines=lines)
            opened.callback(folder.close)
            if overwrite:
                folder.begin()
            if folder.complete or folder.diverged is not None:
                on_end(number, read_record(run.folder))
            else:
                left.append(Started(number, run.experiment, simulation, folder))
        return all(_train(group, stop, on_round, on_end) for group in stackable(left))


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

    if train(simulations, folders, group[0].experiment, stop=stop, on_round=finished).stopped:
        return False
    for run in group:
        on_end(run.number, read_record(run.folder.path))
    return True


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


def _score(record: Record) -> float:
    """What a rate is chosen by."""
    return math.nan if record.diverged else record.history.best("accuracy")


def write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Replace a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def with_algorithm(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one algorithm of its comparison: [algorithm] if it is about that one, then its options."""
    section = experiment.algorithm
    options = {"preset": section.preset, **section.options()} if section.name == name else {}
    own = experiment.compare.options.get(name, {})
    if "name" in own:
        raise BadInput(f"[compare.options.{name}] has no key 'name': the table's own name says which algorithm it is")
    if not isinstance(own.get("preset", ""), str):
        raise BadInput(f"compare.options.{name}.preset = {own['preset']!r}: must be the name of a preset")
    return experiment.model_copy(update={"algorithm": AlgorithmSection(name=name, **{**options, **own})})


def check_folder(folder: Path, key: str, whose: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that cannot be written to, or whose config.json lacks the key that tells what it holds."""
    check_writable(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if all(name == "lock" or name.endswith(PARTIAL) for name in names):
        return
    config = read_json(folder / "config.json") if is_ours(folder) else {}
    if key not in config:
        raise BadInput(f"the folder '{folder}' holds other files than {whose}: choose another with --out")
    if not overwrite:
        refuse_format(folder, config)
