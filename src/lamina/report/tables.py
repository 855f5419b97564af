"""Compute the numbers of a report and write them as tables of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from lamina.experiment.records import Record, flatten
from lamina.history import History
from lamina.report.curves import Curve, differing, folder_name, sections, text

NO_VERSIONS = {"format", "title"}  # keys beside the sections of a run's configuration that are no versions
NEVER, NONE, SPREAD, TIMES = "∞", "–", " ± ", "×"


class Table(NamedTuple):
    """A table ready to show: every cell is text."""

    name: str  # of its file
    title: str
    head: list[str]
    rows: list[list[str]]


class Cost(NamedTuple):
    """The cost of reaching a target: means over the seeds of a curve.

    Infinite if a seed never reaches it, NaN if no seed has a single round.
    """

    rounds: float
    bytes: float
    seconds: float
    reached: int  # seeds that reach it
    seeds: int


def cost_to_target(histories: Sequence[History], target: float, metric: str = "accuracy") -> Cost:
    """Return rounds, bytes (both directions) and seconds of training until a metric first reaches the target."""
    firsts = [history.rounds_to(target, metric, optional=True) for history in histories]
    reached = [
        History([row for row in history if row["round"] <= first])
        for history, first in zip(histories, firsts, strict=True)
        if first is not None
    ]
    if len(reached) < len(histories) or not histories:
        nothing = math.inf if any(len(history) for history in histories) else math.nan
        return Cost(nothing, nothing, nothing, len(reached), len(histories))
    return Cost(
        statistics.fmean(int(history[-1]["round"]) for history in reached),
        statistics.fmean(sent(history) for history in reached),
        statistics.fmean(history.total("seconds", optional=True) for history in reached),
        len(reached),
        len(histories),
    )


def sent(history: History) -> float:
    """Return the bytes sent in both directions."""
    return history.total("bytes_down", optional=True) + history.total("bytes_up", optional=True)


def metric_of(histories: Iterable[History]) -> str:
    """Return the column to judge runs by: accuracy, or the loss if no run has an accuracy."""
    found = {history.metric for history in histories if len(history)}
    return "loss" if found == {"loss"} else "accuracy"


def with_unit(metric: str) -> str:
    """Return a metric as a heading: accuracies are shown in per cent."""
    return "accuracy, %" if metric == "accuracy" else metric


def best_and_last(histories: Sequence[History], metric: str, spread: str = SPREAD) -> tuple[str, str]:
    """Return mean and spread of the best and of the last values of histories."""
    best = values(histories, lambda history: history.best(metric, optional=True))
    last = values(histories, lambda history: history.last(metric, optional=True))
    return score_text(best, metric, spread), score_text(last, metric, spread)


def score_text(scores: Sequence[float], metric: str, spread: str = SPREAD) -> str:
    """Return mean and spread of accuracies in per cent, or of losses."""
    if metric == "accuracy":
        return mean_and_spread([100 * score for score in scores], spread=spread)
    return mean_and_spread(scores, significant, spread)


def values(histories: Iterable[History], of: Callable[[History], float]) -> list[float]:
    """Return a number per history, without NaN: a seed that diverged in its first round has none."""
    numbers = [of(history) for history in histories if len(history)]
    return [number for number in numbers if not math.isnan(number)]


# --- numbers as text; page.js writes the cost table's in the same way -------------------------------------------


def fixed(value: float, digits: int = 1) -> str:
    """Return a number with so many decimals; infinity (never reached) is the infinity sign."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else NEVER
    # Halves go up, as in JavaScript; Python's own formatting rounds them to even.
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def significant(value: float, digits: int = 3) -> str:
    """Return a number with at least so many significant digits, never in powers of ten.

    >>> significant(0.01234), significant(12.345), significant(12345.6), significant(math.inf)
    ('0.0123', '12.3', '12346', '∞')
    """
    if value == 0 or not math.isfinite(value):
        return fixed(value, 0)
    return fixed(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def mean_and_spread(numbers: Sequence[float], write: Callable[[float], str] = fixed, spread: str = SPREAD) -> str:
    """Return the mean and, of several numbers, the standard deviation."""
    if not numbers:
        return NONE
    return write(statistics.fmean(numbers)) + (spread + write(statistics.stdev(numbers)) if len(numbers) > 1 else "")


class Unit(NamedTuple):
    """A unit of bytes."""

    name: str
    bytes: float


def unit_of_bytes(curves: Sequence[Curve]) -> Unit:
    """Return megabytes, or gigabytes if some curve has more than 10."""
    most = max((sent(history) for curve in curves for history in curve.histories), default=0.0)
    return Unit("GB", 1e9) if most >= 1e10 else Unit("MB", 1e6)


# --- the tables --------------------------------------------------------------------------------------------------


def default_targets(curves: Sequence[Curve]) -> list[float]:
    """Return the accuracies that all seeds of every curve, and of the best curve, reach, in steps of 5 %.

    The target of a comparison is added if some curve reaches it.
    """
    reached = [values(curve.histories, lambda history: history.best(optional=True)) for curve in curves]
    worst_seeds = [min(accuracies, default=0.0) for accuracies in reached] or [0.0]
    steps = {math.floor(20 * best + 1e-9) * 5 / 100 for best in (min(worst_seeds), max(worst_seeds))}
    asked = {float(run.config.get("compare", {}).get("target", 0)) for curve in curves for run in curve.runs}
    return sorted(target for target in steps | {t for t in asked if t <= max(worst_seeds)} if target > 0)


def cost_table(curves: Sequence[Curve], targets: Sequence[float], baseline: int) -> Table:
    """Return rounds, bytes and seconds to each target, and their ratios to the baseline's."""
    unit = unit_of_bytes(curves)
    ratio = f"{TIMES} baseline"
    head = ["target", "curve", "reached", "rounds", ratio, unit.name, ratio, "seconds", ratio]
    rows = []
    for target in targets:
        costs = [cost_to_target(curve.histories, target) for curve in curves]
        for curve, cost in zip(curves, costs, strict=True):
            row = [f"{100 * target:g}%", curve.label, f"{cost.reached}/{cost.seeds}"]
            for field, scale in (("rounds", 1.0), ("bytes", unit.bytes), ("seconds", 1.0)):
                own, other = getattr(cost, field), getattr(costs[baseline], field)
                written = fixed(own) if field == "rounds" else significant(own / scale)
                # Without a finite cost of the baseline there is nothing to compare with.
                row += [written, significant(own / other if 0 < other < math.inf else math.nan)]
            rows.append(row)
    return Table("cost-to-target", "Cost to reach a target", head, rows)


def results_table(curves: Sequence[Curve]) -> Table:
    """Return best and last accuracy (loss where there is none), and the cost of a round."""
    unit = unit_of_bytes(curves)
    metric = metric_of(history for curve in curves for history in curve.histories)
    head = ["curve", "seeds", f"best {with_unit(metric)}", f"last {with_unit(metric)}", "rounds"]
    head += [f"{unit.name} per round", f"{unit.name} in all", "seconds per round"]
    rows = []
    for curve in curves:
        histories = curve.histories
        best, last = best_and_last(histories, metric)
        lengths = [len(history) for history in histories]
        rounds = str(lengths[0]) if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)}"
        row = [curve.label, str(len(histories)), best, last, rounds]
        for of in (
            lambda history: sent(history) / len(history) / unit.bytes,
            lambda history: sent(history) / unit.bytes,
            lambda history: history.total("seconds", optional=True) / len(history),
        ):
            found = values(histories, of)
            row.append(significant(statistics.fmean(found)) if found else NONE)
        rows.append(row)
    return Table("results", "Results", head, rows)


def config_tables(curves: Sequence[Curve]) -> tuple[Table, Table]:
    """Return the settings that differ between curves, a column each, and those common to all runs."""
    flats = [[flatten(sections(run)) for run in curve.runs] for curve in curves]
    # The comparison that a run was part of is no setting of the run.
    everything = [{k: v for k, v in flat.items() if not k.startswith("compare.")} for own in flats for flat in own]
    keys = differing(everything)
    rows = []
    for key in keys:
        cells = [dict.fromkeys(text(flat[key]) if key in flat else NONE for flat in own) for own in flats]
        rows.append([key, *(", ".join(found) for found in cells)])
    rows.sort(key=lambda row: NONE in row)  # keys that all curves have come first
    return (
        Table("configuration", "What differs", ["key", *(curve.label for curve in curves)], rows),
        Table("common-configuration", "What is common", ["key", "value"], _common(everything, keys)),
    )


def _common(flats: list[dict[str, object]], differing_keys: list[str]) -> list[list[str]]:
    return [[key, text(value)] for key, value in flats[0].items() if key not in differing_keys] if flats else []


def runs_tables(curves: Sequence[Curve]) -> tuple[Table, Table]:
    """Return every run with its folder, end and differing environment, and what all environments share."""
    runs = [(curve, run) for curve in curves for run in curve.runs]
    flats = [flatten(environment(run)) for _, run in runs]
    keys = differing(flats)
    rows = [
        [folder_name(run), curve.label, str(run.seed), ended(run), *(text(flat.get(key, NONE)) for key in keys)]
        for (curve, run), flat in zip(runs, flats, strict=True)
    ]
    return (
        Table("runs", "Runs", ["folder", "curve", "seed", "rounds", *keys], rows),
        Table("environment", "Environment of all runs", ["what", "value"], _common(flats, keys)),
    )


def environment(run: Record) -> dict[str, object]:
    """Return versions and machine of a run; without environment.json those in config.json."""
    versions = {key: value for key, value in run.config.items() if key not in sections(run) and key not in NO_VERSIONS}
    return {**versions, "device": run.config.get("run", {}).get("device", NONE), **run.environment}


def ended(run: Record) -> str:
    """Return how many rounds a run has, and why not all."""
    if run.complete:
        return str(len(run.history))
    return f"{len(run.history)} of {run.config['train']['rounds']}, {'diverged' if run.diverged else 'not finished'}"
