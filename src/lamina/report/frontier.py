"""Weigh accuracy against bytes, seconds on networks and ε: the points of a frontier, read from its folder of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lamina.base.errors import BadInput, is_number
from lamina.base.text import plural
from lamina.experiment.runs.network_time import notes_on_time, with_clock
from lamina.experiment.runs.records import is_ours, read_json, read_record
from lamina.experiment.trials.compare import label_folder
from lamina.experiment.trials.trial import Trial
from lamina.report.tables import CLOCK, Cost, Table, cost_to_target, rounds_text, score_text, sent, significant
from lamina.report.tables import unit_of_bytes as unit_of
from lamina.rounds.clock import Clock, make_clock
from lamina.training.history import mean, score_key
from lamina.training.metrics import is_percent, with_unit

ON_FRONTIER = "yes"


@dataclass(frozen=True)
class Point:
    """A method with a codec or a level of privacy, and what its runs cost: means over seeds."""

    method: str
    channel: str
    trial: Trial
    score: float  # the mean of the final values; NaN if a run diverged or is not finished
    epsilon: float  # of the last round; infinite without noise
    bytes_up: float
    bytes: float  # in both directions
    cost: Cost  # until all seeds stay at the target
    seconds: Mapping[str, float]  # in all, by clock
    seconds_to_target: Mapping[str, float]  # NaN if some seed does not stay there


@dataclass(frozen=True)
class Frontier:
    """The points of a frontier whose runs have ended."""

    points: list[Point]
    metric: str
    target: float | None
    clocks: list[str]

    @cached_property
    def is_best(self) -> list[bool]:
        """Whether no other point is as accurate for as few bytes and as small an ε, and better in one of them."""
        costs = [(-score_key(p.score, self.metric), p.bytes, p.epsilon) for p in self.points]
        return pareto(costs)

    @property
    def notes(self) -> list[str]:
        """What a reader of the seconds should know."""
        return notes_on_time(run for point in self.points for run in point.trial.records) if self.clocks else []

    @property
    def has_noise(self) -> bool:
        """Whether some point has a finite ε."""
        return any(math.isfinite(point.epsilon) for point in self.points)

    def tables(self) -> list[Table]:
        """Return the table of all points and, with a target and clocks, that of the fastest ones."""
        fastest = [[clock, "–" if best is None else best.trial.name, self._seconds(best, clock)]
                   for clock, best in self.fastest().items()]  # fmt: skip
        return [
            self.table(),
            *([Table("fastest", ["clock", "fastest", f"s to {self.goal}"], fastest)] if fastest else []),
        ]

    def table(self) -> Table:
        """Return a row for every point: accuracy, bytes, the cost to the target, and whether it is on the frontier."""
        unit = unit_of([point.trial for point in self.points])
        to = [] if self.target is None else [f"{unit.name} to {self.goal}"]
        times = [f"s {'in all' if self.target is None else f'to {self.goal}'}, {clock}" for clock in self.clocks]
        head = ["method", "channel", *["ε"] * self.has_noise, f"final {with_unit(self.metric)}", f"{unit.name} up",
                f"{unit.name} in all", *to, *times, "frontier"]  # fmt: skip
        rows = []
        for point, is_best in zip(self.points, self.is_best, strict=True):
            cost, seconds = point.cost, point.seconds if self.target is None else point.seconds_to_target
            reached = (
                rounds_text(cost.rounds, cost.limit) if math.isnan(cost.bytes) else significant(cost.bytes / unit.bytes)
            )
            rows.append(
                [
                    point.method,
                    point.channel,
                    *[significant(point.epsilon)] * self.has_noise,
                    score_text(point.trial.final, self.metric),
                    *(significant(size / unit.bytes) for size in (point.bytes_up, point.bytes)),
                    *[reached] * len(to),
                    *(significant(seconds[clock]) for clock in self.clocks),
                    ON_FRONTIER if is_best else "",
                ]
            )
        seeds = max((len(point.trial.records) for point in self.points), default=0)
        return Table("frontier", head, rows, f"mean ± std of {seeds} seeds" if seeds > 1 else plural(seeds, "seed"))

    @property
    def goal(self) -> str:
        """The target as text."""
        assert self.target is not None
        return f"{100 * self.target:g}%" if is_percent(self.metric) else f"{self.target:g}"

    def fastest(self) -> dict[str, Point | None]:
        """Return the point that is first at the target on every clock; None if none stays there."""
        best: dict[str, Point | None] = {}
        for clock in self.clocks if self.target is not None else ():
            there = [point for point in self.points if not math.isnan(point.seconds_to_target[clock])]
            best[clock] = min(there, key=lambda point: point.seconds_to_target[clock], default=None)
        return best

    def sentence(self) -> str:
        """Return which point is the fastest on every clock, in words; empty without a target or clocks."""
        fastest = self.fastest()
        if not any(fastest.values()):
            rounds = max((point.cost.limit for point in self.points), default=0)
            return f"no method stays at {self.goal}: {rounds_text(math.nan, rounds)}" if fastest else ""
        parts = [
            f"on {clock}: {best.trial.name}, {self._seconds(best, clock)} s" for clock, best in fastest.items() if best
        ]
        return f"fastest to {self.goal} {'; '.join(parts)}"

    @staticmethod
    def _seconds(point: Point | None, clock: str) -> str:
        return significant(math.nan if point is None else point.seconds_to_target[clock])


def pareto(costs: Sequence[Sequence[float]]) -> list[bool]:
    """Return for every list of costs whether no other is at most as large everywhere, and smaller somewhere.

    Costs that are infinite in the first place are of no use, and never among them.

    >>> pareto([(1, 5), (2, 3), (2, 4), (3, 3), (math.inf, 1)])
    [True, True, False, False, False]
    """

    def beats(one: Sequence[float], other: Sequence[float]) -> bool:
        return tuple(one) != tuple(other) and all(a <= b for a, b in zip(one, other, strict=True))

    return [math.isfinite(cost[0]) and not any(beats(other, cost) for other in costs) for cost in costs]


def read_frontier(folder: Path) -> Frontier | None:
    """Return the frontier of the runs in a folder, those that have ended; None if the folder holds none."""
    config = read_json(folder / "config.json") if is_ours(folder) else {}
    if not isinstance(config.get("frontier"), Mapping):
        return None
    try:
        return _read(folder, config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"'{folder / 'config.json'}' is not a frontier's configuration: {error!r}") from error


def _read(folder: Path, config: dict[str, Any]) -> Frontier:
    section, spec, metric = config["frontier"], config["compare"], str(config["frontier"]["metric"])
    target = float(spec["target"]) if is_number(spec["target"]) else None
    step_seconds = section["step_seconds"]
    clocks = {str(name): make_clock(name, step_seconds=step_seconds) for name in section["clocks"] or ()}
    seeds = [config["train"]["seed"] + number for number in range(spec["seeds"])]
    points = []
    for label, entry in section["entries"].items():
        runs = [folder / label_folder(label) / f"seed{seed}" for seed in seeds]
        records = [read_record(run).judged_by(metric) for run in runs if (run / "metrics.jsonl").exists()]
        ended = [record for record in records if record.ended]
        if ended:
            trial = Trial(label, {}, ended, len(seeds))
            points.append(_point(str(entry["method"]), str(entry["channel"]), trial, metric, target, clocks))
    return Frontier(points, metric, target, list(clocks))


def _point(
    method: str, channel: str, trial: Trial, metric: str, target: float | None, clocks: Mapping[str, Clock]
) -> Point:
    """Return what the runs of one entry cost."""
    goal, seconds, seconds_to_target = math.inf if target is None else target, {}, {}
    for name, clock in clocks.items():
        timed = [with_clock(record, clock) for record in trial.records if len(record.history)]
        seconds[name] = mean([run.history.last(CLOCK) for run in timed] or [math.nan])
        seconds_to_target[name] = cost_to_target(timed, goal, metric).clock_seconds
    noised = [run for run in trial.records if "epsilon" in run.history.columns]
    return Point(
        method,
        channel,
        trial,
        trial.score,
        max((run.history.last("epsilon") for run in noised), default=math.inf),
        mean([history.total("bytes_up", optional=True) for history in trial.histories]),
        mean([sent(history) for history in trial.histories]),
        cost_to_target(trial.records, goal, metric),
        seconds,
        seconds_to_target,
    )


def noise_free(points: Sequence[Point]) -> list[Point]:
    """Return the points without noise; all points if all have noise."""
    return [point for point in points if math.isinf(point.epsilon)] or list(points)
