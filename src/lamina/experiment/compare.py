"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives learning rates to try, each is run once on the first seed and the one with the best accuracy on
held-out *training* data is kept; the test data are looked at only in the final runs, one per seed.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamina import algorithms
from lamina.data.dataset import Splits
from lamina.errors import BadInput, Diverged
from lamina.experiment.config import AlgorithmSection, Experiment
from lamina.experiment.run import build, choose_threads, load_data
from lamina.history import History, Row


@dataclass(frozen=True)
class Entry:
    """One algorithm's results."""

    name: str
    title: str
    lr: float
    tuning: dict[float, float]  # rate -> best validation accuracy (NaN: diverged)
    histories: list[History]  # one per seed
    diverged: list[str]  # one line for every run that did

    def values(self, of: Callable[[History], float]) -> tuple[float, float]:
        """Mean and standard deviation over seeds of a number per history."""
        numbers = [of(h) for h in self.histories]
        return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0

    def rounds_to(self, target: float) -> float:
        """Mean rounds to the target over seeds; infinite if a seed never gets there."""
        rounds = [h.rounds_to(target) for h in self.histories]
        return math.inf if None in rounds else statistics.fmean(r for r in rounds if r is not None)

    def bytes_to(self, target: float) -> float:
        """Mean bytes (both directions) until the target is reached; infinite if a seed never gets there."""
        totals = []
        for history in self.histories:
            rounds = history.rounds_to(target)
            if rounds is None:
                return math.inf
            totals.append(history[:rounds].total("bytes_down") + history[:rounds].total("bytes_up"))
        return statistics.fmean(totals)


@dataclass(frozen=True)
class Job:
    """One run of a comparison, as shown to the user."""

    algorithm: str
    lr: float
    seed: int
    tuning: bool


Progress = Callable[[Job, Row], None]


def count_rounds(experiment: Experiment) -> int:
    """How many rounds the whole comparison has, for a progress bar."""
    compare = experiment.compare
    tuned = sum(len(compare.lr.get(name, [])) for name in compare.algorithms if len(compare.lr.get(name, [])) > 1)
    return experiment.train.rounds * (tuned + compare.seeds * len(compare.algorithms))


def compare(experiment: Experiment, progress: Progress | None = None) -> list[Entry]:
    """Run the comparison of an experiment file."""
    spec = experiment.compare
    if not spec.algorithms:
        raise BadInput("compare.algorithms is empty: name at least one algorithm")
    for name in {**spec.lr, **spec.options}:
        if name not in spec.algorithms:
            raise BadInput(f"[compare] has settings for '{name}', which is not in compare.algorithms")
    splits = load_data(experiment)
    # made before anything runs, so that a wrong name or option costs no time
    prepared = {name: _with_algorithm(experiment, name, spec.options.get(name, {})) for name in spec.algorithms}
    for name, own in prepared.items():
        algorithms.create(name, own.algorithm.preset, **own.algorithm.options())
    return [_entry(name, own, splits, spec.lr.get(name, []), progress) for name, own in prepared.items()]


def _with_algorithm(experiment: Experiment, name: str, options: dict[str, Any]) -> Experiment:
    return experiment.model_copy(update={"algorithm": AlgorithmSection(name=name, **options)})


def _entry(name: str, experiment: Experiment, splits: Splits, rates: list[float], progress: Progress | None) -> Entry:
    card = algorithms.find(name).card
    tuning: dict[float, float] = {}
    lr = rates[0] if rates else experiment.train.lr or card.lr
    if len(rates) > 1:
        train, held_out = splits.train.holdout(experiment.compare.validation, experiment.train.seed)
        for rate in rates:
            history, failed = _run(
                experiment, Splits(train, held_out), Job(name, rate, experiment.train.seed, True), progress
            )
            tuning[rate] = math.nan if failed else history.best("accuracy")
        lr = max(tuning, key=lambda rate: -math.inf if math.isnan(tuning[rate]) else tuning[rate])
    histories, lines = [], []
    for seed in range(experiment.train.seed, experiment.train.seed + experiment.compare.seeds):
        history, line = _run(experiment, splits, Job(name, lr, seed, False), progress)
        histories.append(history)
        lines += [line] if line else []
    return Entry(name, card.title, lr, tuning, histories, lines)


def _run(experiment: Experiment, splits: Splits, job: Job, progress: Progress | None) -> tuple[History, str]:
    """One run; a rate that diverges ends it early, keeps its rounds, and is reported, not raised."""
    own = experiment.model_copy(update={"train": experiment.train.model_copy(update={"lr": job.lr, "seed": job.seed})})
    simulation = build(own, splits)
    torch.set_num_threads(choose_threads(own, simulation.objective.start.numel()))
    try:
        simulation.run(own.train.rounds, None if progress is None else lambda row: progress(job, row))
    except Diverged as error:
        return simulation.history, f"{job.algorithm}, lr {job.lr:g}, seed {job.seed}: {error}"
    return simulation.history, ""


def remarks(entry: Entry) -> list[str]:
    """What a reader should know about an entry: runs that diverged, a best rate on the edge of what was tried."""
    lines = list(entry.diverged)
    tried = sorted(entry.tuning)
    if len(tried) > 1 and entry.lr in (tried[0], tried[-1]):
        lines.append(f"{entry.name}: the best rate {entry.lr:g} lies on the edge of those tried; try a wider range")
    return lines


def save(entries: list[Entry], folder: Path) -> None:
    """Write every run's rounds, and what was tried in tuning, as CSV."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rounds.csv").open("w", newline="", encoding="utf-8") as file:
            names = list(dict.fromkeys(c for entry in entries for h in entry.histories for c in h.columns))
            rounds = csv.DictWriter(file, ["algorithm", "learning_rate", "seed", *names])
            rounds.writeheader()
            for entry in entries:
                for seed, history in enumerate(entry.histories):
                    own = {"algorithm": entry.name, "learning_rate": entry.lr, "seed": seed}
                    rounds.writerows({**own, **row} for row in history)
        with (folder / "tuning.csv").open("w", newline="", encoding="utf-8") as file:
            tried = csv.writer(file)
            tried.writerow(["algorithm", "learning_rate", "best_validation_accuracy", "chosen"])
            for entry in entries:
                tried.writerows([entry.name, rate, score, rate == entry.lr] for rate, score in entry.tuning.items())
    except OSError as error:
        raise BadInput(f"cannot write to the folder '{folder}': {error.strerror}") from error
