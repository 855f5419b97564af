"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives learning rates to try, each is run once on the first seed and the one with the best accuracy on
held-out *training* data is kept; the test data are looked at only in the final runs, one per seed.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lamina import algorithms
from lamina.data.dataset import Splits
from lamina.errors import BadInput, Diverged
from lamina.experiment.config import AlgorithmSection, Experiment
from lamina.experiment.run import (
    build,
    build_algorithm,
    cannot_write,
    check_writable,
    choose_threads,
    is_ours,
    load_data,
    resolved,
    write_json,
)
from lamina.history import History, Row


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

    def values(self, of: Callable[[History], float]) -> list[float]:
        """A number per history, NaN left out: a seed that diverged in its first round has none."""
        numbers = [of(history) for history in self.histories if len(history)]
        return [number for number in numbers if not math.isnan(number)]

    def rounds_to(self, target: float) -> float:
        """Mean rounds to the target over seeds; infinite if a seed never gets there, NaN without any round."""
        if not any(self.histories):
            return math.nan
        rounds = [history.rounds_to(target) for history in self.histories]
        return math.inf if None in rounds else statistics.fmean(r for r in rounds if r is not None)

    def bytes_to(self, target: float) -> float:
        """Mean bytes (both directions) until the target is reached; infinite or NaN as `rounds_to`."""
        if not math.isfinite(self.rounds_to(target)):
            return self.rounds_to(target)
        reached = [history[: history.rounds_to(target)] for history in self.histories]
        return statistics.fmean(history.total("bytes_down") + history.total("bytes_up") for history in reached)


@dataclass(frozen=True)
class Job:
    """One run of a comparison, as shown to the user."""

    algorithm: str
    lr: float
    seed: int
    tuning: bool


Progress = Callable[[Job, Row], None]


class Comparison:
    """The comparison of an experiment file: checked when made, then `run`; `entries` fills as runs finish."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.entries: list[Entry] = []
        spec = experiment.compare
        if not spec.algorithms:
            raise BadInput("compare.algorithms is empty: name at least one algorithm")
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
        self._config = resolved(first, simulation)
        del self._config["algorithm"]  # each method has its own, with its own rate
        self._config["train"]["lr"] = experiment.train.lr
        self._config["algorithms"] = {}

    def count_rounds(self) -> int:
        """How many rounds the whole comparison has, for a progress bar."""
        compare = self.experiment.compare
        tried = [len(compare.lr.get(name, [])) for name in self._own]
        return self.experiment.train.rounds * (sum(n for n in tried if n > 1) + compare.seeds * len(self._own))

    def run(self, folder: Path, progress: Progress | None = None) -> None:
        """Run all of it; every finished run is in the folder's tables before the next begins."""
        check_folder(folder)
        self._save(folder)
        try:
            self._run_all(folder, progress)
        except KeyboardInterrupt:
            self._save(folder)  # it may have come in the middle of a table
            raise

    def _run_all(self, folder: Path, progress: Progress | None) -> None:
        for name, own in self._own.items():
            tuning = self._tune(name, own, progress)
            rates = list(tuning) or own.compare.lr.get(name, [])
            lr = rates[0] if rates else own.train.lr or algorithms.find(name).card.lr
            if tuning:
                lr = max(tuning, key=lambda rate: -math.inf if math.isnan(tuning[rate]) else tuning[rate])
            entry = Entry(name, algorithms.find(name).card.title, lr, tuning)
            for seed in range(own.train.seed, own.train.seed + own.compare.seeds):
                history, failure = self._run(own, self._splits, Job(name, lr, seed, False), progress)
                if not entry.histories:
                    self.entries.append(entry)
                entry.seeds.append(seed)
                entry.histories.append(history)
                entry.diverged += [failure] if failure else []
                self._save(folder)

    def notes(self) -> list[str]:
        """What a reader should know: shared rates, runs that diverged, a best rate on the edge of those tried."""
        lines = []
        given = self.experiment.train.lr
        untuned = [name for name in self._own if not self.experiment.compare.lr.get(name)]
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

    def _tune(self, name: str, own: Experiment, progress: Progress | None) -> dict[float, float]:
        """The best validation accuracy of every rate to try; nothing if there is no choice."""
        rates, seed = own.compare.lr.get(name, []), own.train.seed
        if len(rates) < 2:
            return {}
        splits = Splits(*self._splits.train.holdout(own.compare.validation, seed))
        tuning = {}
        for rate in rates:
            history, failure = self._run(own, splits, Job(name, rate, seed, True), progress)
            tuning[rate] = math.nan if failure else history.best("accuracy")
        return tuning

    def _run(self, own: Experiment, splits: Splits, job: Job, progress: Progress | None) -> tuple[History, str]:
        """One run; a rate that diverges ends it early, keeps its rounds, and is reported, not raised."""
        own = own.model_copy(update={"train": own.train.model_copy(update={"lr": job.lr, "seed": job.seed})})
        simulation = build(own, splits)
        torch.set_num_threads(choose_threads(own, simulation.objective.start.numel()))
        if not job.tuning:
            self._config["algorithms"][job.algorithm] = {"lr": job.lr, **resolved(own, simulation)["algorithm"]}
        try:
            simulation.run(own.train.rounds, None if progress is None else lambda row: progress(job, row))
        except Diverged as error:
            return simulation.history, f"{job.algorithm}, lr {job.lr:g}, seed {job.seed}: {error}"
        return simulation.history, ""

    def _save(self, folder: Path) -> None:
        """Write the configuration, every finished run's rounds, and what was tried in tuning."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "config.json", self._config)
            with (folder / "rounds.csv").open("w", newline="", encoding="utf-8") as file:
                histories = [history for entry in self.entries for history in entry.histories]
                columns = dict.fromkeys(column for history in histories for column in history.columns)
                rounds = csv.DictWriter(file, ["algorithm", "learning_rate", "seed", *columns])
                rounds.writeheader()
                for entry in self.entries:
                    for seed, history in zip(entry.seeds, entry.histories, strict=True):
                        run = {"algorithm": entry.name, "learning_rate": entry.lr, "seed": seed}
                        rounds.writerows({**run, **row} for row in history)
            with (folder / "tuning.csv").open("w", newline="", encoding="utf-8") as file:
                tried = csv.writer(file)
                tried.writerow(["algorithm", "learning_rate", "best_validation_accuracy", "chosen"])
                for entry in self.entries:
                    tried.writerows([entry.name, rate, score, rate == entry.lr] for rate, score in entry.tuning.items())
        except OSError as error:
            raise cannot_write(folder, error) from error


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


FILES = ("config.json", "rounds.csv", "tuning.csv", "comparison.png")  # what a comparison leaves behind


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or holds something else than an earlier comparison."""
    check_writable(folder)
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if found and not (is_ours(folder) and set(found) <= set(FILES)):
        raise BadInput(
            f"the folder '{folder}' holds other files than an earlier comparison's: choose another with --out"
        )
