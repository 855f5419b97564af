"""Find how results depend on the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamina.experiment.runs.records import Record
from lamina.experiment.trials.settings import written
from lamina.experiment.trials.trial import Trial
from lamina.experiment.trials.tune import Tuning
from lamina.report.curves import NOISE, RATE, SEED, algorithm_of, group
from lamina.report.tables import NONE, Table, metric_of, score_text
from lamina.training.history import values
from lamina.training.metrics import with_unit


@dataclass(frozen=True)
class Response:
    """All rates tried with one configuration, ascending; `name` of a trial is its other settings in words."""

    label: str
    on: str  # "test" or "validation"
    tried: list[tuple[float, Trial]]
    metric: str = "accuracy"  # that runs are judged by
    joined: bool = True  # whether only the rate differs, so that a line through the points is meaningful

    @property
    def chosen(self) -> float | None:
        """The best rate among those that ran to their end."""
        rate, trial = max(self.tried, key=lambda one: one[1].score_key)
        return None if math.isnan(trial.score) else rate

    @property
    def warning(self) -> str:
        """Advice if the best rate is the smallest or largest one tried; otherwise empty."""
        if self.chosen is None:
            return f"{self.label}: no learning rate ran to its end"
        rates = [rate for rate, _ in self.tried]
        if self.chosen not in (min(rates), max(rates)):
            return ""
        way = "smaller" if self.chosen == min(rates) else "larger"
        return f"{self.label}: the best learning rate {self.chosen:g} lies on the edge of those tried; try {way} ones"


def responses(runs: Sequence[Record]) -> list[Response]:
    """Return a response for every configuration that was run with several rates.

    If a comparison tried other settings too, a rate stands for the best of its runs.
    """
    every = []
    for tuning in (True, False):
        for family in group([run for run in runs if run.tuning is tuning], ignored=_tried_keys):
            by_rate: dict[float, list[Record]] = {}
            for run in family.records:
                by_rate.setdefault(run.lr, []).append(run)
            if len(by_rate) > 1:
                metric = metric_of([family])
                tried = [(lr, _best(same)) for lr, same in sorted(by_rate.items())]
                on = "validation" if family.records[0].on_validation_data else "test"
                every.append(Response(family.name, on, tried, metric))
    if len({response.on for response in every}) > 1:
        every = [replace(response, label=f"{response.label}, {response.on}") for response in every]
    return every


def tuning_responses(tuning: Tuning) -> list[Response]:
    """Return the rates that a tuning tried, a response for every choice of its other values; none without rates."""
    others = [key for key in tuning.keys if key != RATE]
    if RATE not in tuning.keys or not any(trial.best for trial in tuning.trials):
        return []
    # Optuna rarely takes a value of a range twice, so that a line through such points would mean nothing.
    ranges = [key for key in others if not tuning.space[key].choices]
    by_others: dict[str, list[tuple[float, Trial]]] = {}
    for trial in tuning.trials:
        if RATE in trial.settings:
            same = {key: trial.settings[key] for key in others if key not in ranges}
            by_others.setdefault(written(same) or tuning.title, []).append((trial.settings[RATE], trial))
    return [
        Response(label, tuning.spec.select, sorted(tried, key=lambda one: one[0]), tuning.metric, not ranges)
        for label, tried in by_others.items()
    ]


def _tried_keys(run: Record) -> set[str]:
    """Return the seed and the keys whose values are tried: the rate, and in a tuning run options of the algorithm."""
    if not run.tuning:
        return {SEED, NOISE, RATE}
    # Rounds: tuning may stop all but the best settings early.
    return {SEED, NOISE, RATE, "train.rounds", *(f"algorithm.{name}" for name in _options_in_grid(run))}


def _options_in_grid(run: Record) -> list[str]:
    """Return the options that the comparison's grid has for the run's algorithm."""
    section = run.config.get("compare", {})
    grids = (grid for label, grid in section.get("grid", {}).items() if algorithm_of(section, label) == run.algorithm)
    return list(dict.fromkeys(name for grid in grids for name in grid if name != "lr"))


def _best(runs: Sequence[Record]) -> Trial:
    """Return the best of the other settings that were tried with one rate."""
    by_others: dict[str, list[Record]] = {}
    for run in runs:
        options = {name: run.config["algorithm"].get(name) for name in _options_in_grid(run) if run.tuning}
        by_others.setdefault(written(options), []).append(run)
    trials = [Trial(others, {}, same, len(same)) for others, same in by_others.items()]
    return max(trials, key=lambda trial: trial.score_key)


def drawn_scores(trial: Trial) -> list[float]:
    """Return the final value of every run; of one that diverged, whose rate is crossed out, of its last ten rounds."""
    return values(trial.histories, lambda history: history.final(optional=True))


def metrics_in(responses: Sequence[Response]) -> str:
    """Return the metrics that rates are judged by, as a heading."""
    return " or ".join(dict.fromkeys(with_unit(response.metric) for response in responses)) or with_unit("accuracy")


def rates_table(responses: Sequence[Response]) -> Table:
    """Return every rate with its final score; the best rate is marked."""
    rows = []
    for response in responses:
        for rate, trial in response.tried:
            remark = trial.remark or ("best" if rate == response.chosen else "")
            score = score_text(trial.final, response.metric)
            rows.append([response.label, f"{rate:g}", trial.name or NONE, score, response.on, remark])
    head = ["curve", "lr", "with", f"final {metrics_in(responses)}", "on", ""]
    if all(row[2] == NONE for row in rows):
        head, rows = head[:2] + head[3:], [row[:2] + row[3:] for row in rows]
    return Table("learning-rates", head, rows)
