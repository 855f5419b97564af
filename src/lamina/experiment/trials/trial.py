"""`Trial`: the runs with the same settings, and their score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lamina.base.errors import BadInput, Diverged
from lamina.experiment.runs.records import Record
from lamina.experiment.trials.settings import Settings, written
from lamina.training.history import History, mean, score_key, values


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
    def final(self) -> list[float]:
        """Return the mean of the first metric over the last ten rounds, of every evaluated run that did not diverge."""
        finals = [record.final() for record in self.records]
        return [value for value in finals if not math.isnan(value)]

    @property
    def score(self) -> float:
        """Return the mean of the final values, by which trials are chosen; NaN if the trial does not count."""
        return mean(self.final) if self.final and not self.remark else math.nan

    @property
    def score_key(self) -> float:
        """Return a score by which trials are sorted: larger is better."""
        return score_key(self.score, self.histories[0].metric) if self.records else -math.inf


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
