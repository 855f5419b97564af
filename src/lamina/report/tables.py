"""The numbers of a report, as tables of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from lamina.experiment.records import Record, flatten
from lamina.history import History
from lamina.report.curves import Curve, differing, folder_name, sections, text

NO_VERSIONS = {"format", "title"}  # what else stands beside the sections of a run's configuration
NEVER, NONE, SPREAD, TIMES = "∞", "–", " ± ", "×"


class Table(NamedTuple):
    """A table ready to show: every cell is text."""

    name: str  # of its file
    title: str
    head: list[str]
    rows: list[list[str]]


class Cost(NamedTuple):
    """What the runs of a curve took to reach a target: means over seeds.

    Infinite if a seed never got there, NaN if no seed has a single round.
    """

    rounds: float
    bytes: float
    seconds: float
    reached: int  # seeds that did
    seeds: int


def cost_to_target(histories: Sequence[History], target: float, metric: str = "accuracy") -> Cost:
    """Rounds, bytes (both directions) and seconds of training until a metric first reaches the target."""
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
    """Bytes in both directions."""
    return history.total("bytes_down", optional=True) + history.total("bytes_up", optional=True)


def metric_of(histories: Iterable[History]) -> str:
    """The column that tells how good runs are: accuracy, or the loss where none of them has an accuracy."""
    found = {history.metric for history in histories if len(history)}
    return "loss" if found == {"loss"} else "accuracy"


def with_unit(metric: str) -> str:
    """A metric as a heading: an accuracy is shown in per cent."""
    return "accuracy, %" if metric == "accuracy" else metric


def best_and_last(histories: Sequence[History], metric: str, spread: str = SPREAD) -> tuple[str, str]:
    """Mean and spread of the best and of the last value of each history."""
    best = values(histories, lambda history: history.best(metric, optional=True))
    last = values(histories, lambda history: history.last(metric, optional=True))
    return score_text(best, metric, spread), score_text(last, metric, spread)


def score_text(scores: Sequence[float], metric: str, spread: str = SPREAD) -> str:
    """Mean and spread of accuracies in per cent, or of losses."""
    if metric == "accuracy":
        return mean_and_spread([100 * score for score in scores], spread=spread)
    return mean_and_spread(scores, significant, spread)


def values(histories: Iterable[History], of: Callable[[History], float]) -> list[float]:
    """A number per history, NaN left out: a seed that diverged in its first round has none."""
    numbers = [of(history) for history in histories if len(history)]
    return [number for number in numbers if not math.isnan(number)]


# --- numbers as text; page.js writes the cost table's in the same way -------------------------------------------


def fixed(value: float, digits: int = 1) -> str:
    """A number with so many decimals; never reached is the infinity sign."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else NEVER
    # halves go up, as in JavaScript, where Python's own formatting takes the even neighbour
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def significant(value: float, digits: int = 3) -> str:
    """A number with at least so many significant digits, never in powers of ten.

    >>> significant(0.01234), significant(12.345), significant(12345.6), significant(math.inf)
    ('0.0123', '12.3', '12346', '∞')
    """
    if value == 0 or not math.isfinite(value):
        return fixed(value, 0)
    return fixed(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def mean_and_spread(numbers: Sequence[float], write: Callable[[float], str] = fixed, spread: str = SPREAD) -> str:
    """Mean and, of several, standard deviation."""
    if not numbers:
        return NONE
    return write(statistics.fmean(numbers)) + (spread + write(statistics.stdev(numbers)) if len(numbers) > 1 else "")


class Unit(NamedTuple):
    """A unit of bytes that suits what is shown."""

    name: str
    bytes: float


def unit_of_bytes(curves: Sequence[Curve]) -> Unit:
    """Megabytes, or gigabytes when there are thousands."""
    most = max((sent(history) for curve in curves for history in curve.histories), default=0.0)
    return Unit("GB", 1e9) if most >= 1e10 else Unit("MB", 1e6)


# --- the tables --------------------------------------------------------------------------------------------------


def default_targets(curves: Sequence[Curve]) -> list[float]:
    """What every curve reaches with all its seeds, and what only the best does, in steps of 5 %.

    A comparison's own target is among them, if some curve reaches it.
    """
    reached = [values(curve.histories, _best_accuracy) for curve in curves]
    worst_seeds = [min(accuracies, default=0.0) for accuracies in reached] or [0.0]
    steps = {math.floor(20 * best + 1e-9) * 5 / 100 for best in (min(worst_seeds), max(worst_seeds))}
    asked = {float(run.config.get("compare", {}).get("target", 0)) for curve in curves for run in curve.runs}
    return sorted(target for target in steps | {t for t in asked if t <= max(worst_seeds)} if target > 0)


def _best_accuracy(history: History) -> float:
    """Return the best accuracy of a run, NaN if it was never evaluated."""
    return history.best("accuracy", optional=True)


def default_baseline(curves: Sequence[Curve]) -> int:
    """FedAvg if it is among them, else the first."""
    return next((i for i, curve in enumerate(curves) if curve.algorithm == "fedavg"), 0)


def cost_table(curves: Sequence[Curve], targets: Sequence[float], baseline: int) -> Table:
    """Rounds, bytes and seconds to each target, and how many times the baseline's they are."""
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
                row += [written, significant(ratio_to(own, other))]
            rows.append(row)
    return Table("cost-to-target", "Cost to reach a target", head, rows)


def ratio_to(own: float, baseline: float) -> float:
    """How many times the baseline's cost; without a finite baseline there is nothing to compare with."""
    return own / baseline if math.isfinite(baseline) and baseline > 0 else math.nan


def results_table(curves: Sequence[Curve]) -> Table:
    """Best and last accuracy (loss where there is none), and what a round costs."""
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
    """What differs between the curves, a column each, and what is common to all runs."""
    flats = [[flatten(sections(run)) for run in curve.runs] for curve in curves]
    # what it was compared with is the same question asked of several runs, not a setting of one
    everything = [{k: v for k, v in flat.items() if not k.startswith("compare.")} for own in flats for flat in own]
    keys = differing(everything)

    def cell(own: list[dict[str, object]], key: str) -> str:
        found = dict.fromkeys(text(flat[key]) if key in flat else NONE for flat in own)
        return ", ".join(found)

    rows = [[key, *(cell(own, key) for own in flats)] for key in keys]
    rows.sort(key=lambda row: NONE in row)  # what all of them have first, then each algorithm's own options
    common = [[key, text(value)] for key, value in everything[0].items() if key not in keys] if everything else []
    return (
        Table("configuration", "What differs", ["key", *(curve.label for curve in curves)], rows),
        Table("common-configuration", "What is common", ["key", "value"], common),
    )


def runs_tables(curves: Sequence[Curve]) -> tuple[Table, Table]:
    """Every run: its folder, how it ended and what differs in its environment; then what all environments share."""
    runs = [(curve, run) for curve in curves for run in curve.runs]
    flats = [flatten(environment(run)) for _, run in runs]
    keys = differing(flats)
    rows = [
        [folder_name(run), curve.label, str(run.seed), ended(run), *(text(flat.get(key, NONE)) for key in keys)]
        for (curve, run), flat in zip(runs, flats, strict=True)
    ]
    common = [[key, text(value)] for key, value in flats[0].items() if key not in keys] if flats else []
    return (
        Table("runs", "Runs", ["folder", "curve", "seed", "rounds", *keys], rows),
        Table("environment", "Environment of all runs", ["what", "value"], common),
    )


def environment(run: Record) -> dict[str, object]:
    """Versions and machine; of runs without environment.json what config.json says."""
    versions = {key: value for key, value in run.config.items() if key not in sections(run) and key not in NO_VERSIONS}
    return {**versions, "device": run.config.get("run", {}).get("device", NONE), **run.environment}


def ended(run: Record) -> str:
    """How far a run got."""
    if run.complete:
        return str(len(run.history))
    return f"{len(run.history)} of {run.config['train']['rounds']}, {'diverged' if run.diverged else 'not finished'}"
