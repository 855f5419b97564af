"""Compute the numbers of a report and write them as tables: as text, and as CSV for programs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

import numpy as np

from lamina.base.errors import is_number
from lamina.base.text import csv_text, html_table, plural, text_table
from lamina.experiment.runs.records import Record, flatten
from lamina.experiment.trials.pairs import paired_difference
from lamina.experiment.trials.settings import short_names, shown, shown_name
from lamina.experiment.trials.trial import Trial
from lamina.experiment.trials.tune import Tuning
from lamina.report.curves import DIGESTS, differing, folder_name, sections, text
from lamina.training.history import History, mean, values
from lamina.training.metrics import is_percent, smaller_is_better, with_unit

CLOCK_TITLE = "clock s"
CLOCK = "clock_seconds"  # the column, counted from the start of the run
INFINITE, NONE, SPREAD, TIMES = "∞", "–", " ± ", "×"
UNREACHED = "not within "  # begins the rounds to a target that was not reached


class Table(NamedTuple):
    """A table ready to show: every cell is text."""

    name: str  # of its file
    head: list[str]
    rows: list[list[str]]
    title: str = ""

    def __repr__(self) -> str:
        text = text_table(self.head, self.rows)
        return f"{self.title}\n{text}" if self.title else text

    def _repr_html_(self) -> str:
        return html_table(self.head, self.rows, self.title)


class Cost(NamedTuple):
    """The cost until a curve stays at a target: means over its seeds; NaN if some seed does not."""

    rounds: float
    bytes: float
    seconds: float
    reached: int  # seeds that stay there
    touch: float  # the first round at the target; NaN if some seed has none
    limit: int  # rounds of the longest run
    clock_seconds: float  # on the network of a clock; NaN without one


def cost_to_target(records: Sequence[Record], target: float, metric: str | None = None) -> Cost:
    """Return rounds, bytes (both directions), seconds of training and of a clock until a metric stays at the target."""
    settled = [record.settling_round(target, metric) for record in records]
    touches = [record.history.rounds_to(target, metric, optional=True) for record in records]
    parts = [record.history[:number] for record, number in zip(records, settled, strict=True) if number is not None]
    costs = [(float(part[-1]["round"]), sent(part), seconds_of(part), part[-1].get(CLOCK, math.nan)) for part in parts]
    if len(parts) < len(records) or not records:
        costs = [(math.nan,) * 4]
    rounds, size, seconds, clock_seconds = (mean(numbers) for numbers in zip(*costs, strict=True))
    return Cost(
        rounds,
        size,
        seconds,
        len(parts),
        mean([math.nan if touch is None else touch for touch in touches] or [math.nan]),
        max((len(record.history) for record in records), default=0),
        clock_seconds,
    )


def sent(history: History) -> float:
    """Return the bytes sent in both directions."""
    return history.total("bytes_down", optional=True) + history.total("bytes_up", optional=True)


def seconds_of(history: History) -> float:
    """Return the seconds of training; NaN for a private run with secret cohorts, whose rows do not tell them."""
    return history.total("seconds") if "seconds" in history.columns else math.nan


def has_clock(curves: Iterable[Trial]) -> bool:
    """Return whether some run has the time that it takes on a network."""
    return any(CLOCK in history.columns for curve in curves for history in curve.histories)


def metric_of(groups: Iterable[Trial]) -> str:
    """Return the column to judge runs by: their first metric; if they differ, the accuracy if some run has one."""
    metrics = list(dict.fromkeys(history.metric for one in groups for history in one.histories if len(history)))
    return metrics[0] if metrics and "accuracy" not in metrics else "accuracy"


def final_and_best(records: Sequence[Record], metric: str) -> tuple[str, str]:
    """Return mean and spread of the final and of the best values of runs."""
    best = values([record.history for record in records], lambda history: history.best(metric, optional=True))
    return score_text(list(finals(records, metric).values()), metric), score_text(best, metric)


def finals(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Return the final value of every run that has one, by its seed."""
    by_seed = {record.seed: record.final(metric) for record in records}
    return {seed: value for seed, value in by_seed.items() if not math.isnan(value)}


def difference_text(records: Sequence[Record], baseline: Sequence[Record], metric: str) -> str:
    """Return the paired difference of final values to a baseline's with its interval: ``+1.2 [+0.3, +2.1]``."""
    difference = None if records is baseline else paired_difference(finals(records, metric), finals(baseline, metric))
    if difference is None:
        return NONE
    scale, write = (100, fixed) if is_percent(metric) else (1, significant)
    texts = [write(scale * number) for number in (difference.mean, difference.low, difference.high)]
    middle, low, high = (text if text.startswith("-") else f"+{text}" for text in texts)
    return middle if difference.margin is None else f"{middle} [{low}, {high}]"


def score_text(scores: Sequence[float], metric: str) -> str:
    """Return mean and spread of a metric, in per cent if it is shown so."""
    return mean_and_spread([100 * s for s in scores]) if is_percent(metric) else mean_and_spread(scores, significant)


# --- numbers as text; page.js writes the cost table's in the same way -------------------------------------------


def fixed(value: float, digits: int = 1) -> str:
    """Return a number with a fixed number of decimals; infinity is the infinity sign."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else INFINITE
    if abs(value) >= 1e21:
        return repr(float(value))  # as JavaScript writes it
    # Halves go up, as in JavaScript; Python's own formatting rounds them to even.
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def significant(value: float) -> str:
    """Return a number with at least three significant digits, never in powers of ten.

    >>> significant(0.01234), significant(12.345), significant(12345.6), significant(math.inf)
    ('0.0123', '12.3', '12346', '∞')
    """
    if value == 0 or not math.isfinite(value):
        return fixed(value, 0)
    return fixed(value, max(0, 2 - math.floor(math.log10(abs(value)))))


def mean_and_spread(numbers: Sequence[float], write: Callable[[float], str] = fixed) -> str:
    """Return the mean and, of several numbers, the standard deviation."""
    if not numbers:
        return NONE
    return write(mean(numbers)) + (SPREAD + write(spread(numbers)) if len(numbers) > 1 else "")


def spread(numbers: Sequence[float]) -> float:
    """Return the standard deviation; infinity if it is beyond the range of a float."""
    if not all(map(math.isfinite, numbers)):
        return math.inf
    try:
        return statistics.stdev(numbers)
    except OverflowError:
        return math.inf


class Unit(NamedTuple):
    """A unit of bytes."""

    name: str
    bytes: float


KILOBYTES, MEGABYTES, GIGABYTES = Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9)


def unit_of_bytes(curves: Sequence[Trial]) -> Unit:
    """Return megabytes, gigabytes if some curve has more than 10, or kilobytes if all have less than a megabyte."""
    most = max((sent(history) for curve in curves for history in curve.histories), default=0.0)
    return GIGABYTES if most >= 1e10 else KILOBYTES if 0 < most < 1e6 else MEGABYTES


# --- the tables --------------------------------------------------------------------------------------------------


def default_targets(curves: Sequence[Trial]) -> list[float]:
    """Return the accuracies that all seeds of every curve, and of the best curve, stay at, in steps of 5 %.

    The target of a comparison is added if all seeds of some curve stay at it. For metrics without a scale from 0 to
    100 %, such as losses, it is the only one.
    """
    metric = metric_of(curves)
    compared = [run.config.get("compare", {}).get("target") for curve in curves for run in curve.records]
    targets = {
        target
        for target in filter(is_number, compared)
        if any(cost_to_target(curve.records, target, metric).rounds < math.inf for curve in curves)
    }
    if is_percent(metric) and not smaller_is_better(metric):
        worst_seeds = [min((_kept_accuracy(run, metric) for run in curve.records), default=0.0) for curve in curves]
        ends = (min(worst_seeds, default=0.0), max(worst_seeds, default=0.0))
        targets |= {math.floor(20 * value + 1e-9) * 5 / 100 for value in ends} - {0.0}
    return sorted(targets)


def _kept_accuracy(run: Record, metric: str) -> float:
    """Return the highest accuracy, at most 1, that a run stays at; 0 if it diverged or has none."""
    levels = run.history.kept_level(metric, optional=True) if run.diverged is None else np.array([])
    return min(1.0, max(0.0, float(np.max(levels, where=~np.isnan(levels), initial=0.0))))


def cost_table(curves: Sequence[Trial], targets: Sequence[float], baseline: int) -> Table:
    """Return rounds, bytes and seconds until each target is kept, their ratios to the baseline's, and first touches."""
    unit, metric = unit_of_bytes(curves), metric_of(curves)
    ratio = f"{TIMES} baseline"
    head = ["target", "curve", "reached", "rounds", ratio, "first touch", unit.name, ratio, "seconds", ratio]
    fields = [("rounds", 1.0), ("bytes", unit.bytes), ("seconds", 1.0)]
    if has_clock(curves):
        head, fields = [*head, CLOCK_TITLE, ratio], [*fields, (CLOCK, 1.0)]
    rows = []
    for target in targets:
        costs = [cost_to_target(curve.records, target, metric) for curve in curves]
        for curve, cost in zip(curves, costs, strict=True):
            shown = f"{100 * target:g}%" if is_percent(metric) else f"{target:g}"
            row = [shown, curve.name, f"{cost.reached}/{len(curve.records)}"]
            for field, scale in fields:
                value, other = getattr(cost, field), getattr(costs[baseline], field)
                written = rounds_text(value, cost.limit) if field == "rounds" else significant(value / scale)
                # Without a cost of the baseline there is nothing to compare with.
                row += [written, significant(value / other if other > 0 else math.nan)]
                row += [rounds_text(cost.touch, cost.limit)] if field == "rounds" else []
            rows.append(row)
    return Table("cost-to-target", head, rows)


def rounds_text(rounds: float, limit: int) -> str:
    """Return rounds to a target; of runs of `limit` rounds that do not reach it, how many they had.

    >>> rounds_text(12.5, 60), rounds_text(math.nan, 60), rounds_text(math.nan, 0)
    ('12.5', 'not within 60 rounds', '–')
    """
    return fixed(rounds) if not math.isnan(rounds) or not limit else UNREACHED + plural(limit, "round")


def results_table(curves: Sequence[Trial], baseline: int = 0) -> Table:
    """Return final and best value of the first metric, the difference to the baseline, and the cost of a round."""
    unit, metric = unit_of_bytes(curves), metric_of(curves)
    head = ["curve", "seeds", f"final {with_unit(metric)}", f"best {with_unit(metric)}", "rounds"]
    head += [f"{unit.name} per round", f"{unit.name} in all", "seconds per round"]
    rows = []
    columns: list[Callable[[History], float]] = [
        lambda history: sent(history) / len(history) / unit.bytes,
        lambda history: sent(history) / unit.bytes,
        lambda history: seconds_of(history) / len(history),
    ]
    if has_clock(curves):
        head += [f"{CLOCK_TITLE} in all"]
        columns += [lambda history: history.last(CLOCK, optional=True)]
    for curve in curves:
        histories = curve.histories
        lengths = [len(history) for history in histories]
        rounds = str(lengths[0]) if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)}"
        row = [curve.name, str(len(histories)), *final_and_best(curve.records, metric), rounds]
        for of in columns:
            numbers = values(histories, of)
            row.append(significant(mean(numbers)) if numbers else NONE)
        rows.append(row)
    if len(curves) > 1:
        head.insert(3, f"difference to {curves[baseline].name}")
        for curve, row in zip(curves, rows, strict=True):
            row.insert(3, difference_text(curve.records, curves[baseline].records, metric))
    return Table("results", head, rows)


def algorithms_table(entries: Sequence[Trial], target: float | None, baseline: str | None = None) -> Table:
    """Return rounds and bytes to a target, final and best value of the first metric, and bytes in all.

    Args:
        entries: the algorithms, a row each.
        target: value of the metric on the test data to stay at; None leaves its columns out.
        baseline: the name of an algorithm; adds the paired differences of the final values to its values.
    """
    metric = metric_of(entries)
    seeds = max(len(entry.histories) for entry in entries)
    title = f"mean ± std of {seeds} seeds" if seeds > 1 else plural(seeds, "seed")
    if target is not None:
        title += f"; target: test {metric} " + (f"{target:.0%}" if is_percent(metric) else f"{target:g}")
    unit = "acc. %" if metric == "accuracy" else f"{metric} %" if is_percent(metric) else metric
    size = unit_of_bytes(entries)
    head = ["algorithm", "lr", "rounds\nto target", f"{size.name} to\ntarget"]
    timed = has_clock(entries)
    head += [f"{CLOCK_TITLE} to\ntarget"] if timed else []
    head += [f"final\n{unit}", f"best\n{unit}", f"{size.name}\nin all"]
    rows = []
    for entry in entries:
        cost = cost_to_target(entry.records, math.inf if target is None else target, metric)
        in_all = values(entry.histories, lambda history: sent(history) / size.bytes)
        rows.append(
            [
                shown_name(entry.name, entry.title) if entry.name == entry.records[0].algorithm else entry.name,
                f"{entry.lr:g}",
                f"not in {cost.limit}" if math.isnan(cost.rounds) and cost.limit else fixed(cost.rounds),
                fixed(cost.bytes / size.bytes),
                *([significant(cost.clock_seconds)] if timed else []),
                *(cell.replace(SPREAD, "±") for cell in final_and_best(entry.records, metric)),
                fixed(mean(in_all)) if in_all else NONE,
            ]
        )
    if baseline is not None:
        other = next((entry.records for entry in entries if entry.name == baseline), [])
        title += "; difference of the final values, paired by seed, 95 % interval" if seeds > 1 else ""
        place = 6 if timed else 5
        head.insert(place, f"difference\nto {baseline}")
        for entry, row in zip(entries, rows, strict=True):
            row.insert(place, difference_text(entry.records, other, metric))
    if target is None:
        first = 5 if timed else 4
        head, rows = head[:2] + head[first:], [row[:2] + row[first:] for row in rows]
    return Table("comparison", head, rows, title)


def times_table(timed: Mapping[str, Sequence[Trial]], target: float | None) -> Table:
    """Return how long curves take on clocks, given by the clock's name: a round, in all, and to a target.

    Args:
        timed: the curves by clock; their runs have the column ``clock_seconds``.
        target: value of the metric on the test data to stay at; None leaves its columns out.
    """
    metric = metric_of(next(iter(timed.values())))
    head = ["curve", "clock", "rounds", "s per round", "s in all"]
    shown = "" if target is None else f"{100 * target:g}%" if is_percent(metric) else f"{target:g}"
    head += [f"rounds to {shown}", f"s to {shown}", "s to first touch"] if target is not None else []
    rows = []
    for name, curves in timed.items():
        for curve in curves:
            totals = [history.last(CLOCK) for history in curve.histories]
            lengths = [len(history) for history in curve.histories]
            row = [curve.name, name, fixed(mean(lengths), 0), significant(sum(totals) / sum(lengths))]
            row.append(mean_and_spread(totals, significant))
            if target is not None:
                cost = cost_to_target(curve.records, target, metric)
                touches = [_until_touch(history, target, metric) for history in curve.histories]
                row += [rounds_text(cost.rounds, cost.limit), *map(significant, (cost.clock_seconds, mean(touches)))]
            rows.append(row)
    return Table("times", head, rows)


def _until_touch(history: History, target: float, metric: str) -> float:
    """Return the seconds of the clock until a metric first reaches a target; NaN if it does not."""
    number = history.rounds_to(target, metric, optional=True)
    return math.nan if number is None else float(history[number - 1][CLOCK])


def trials_table(tuning: Tuning) -> Table:
    """Return every trial's values, final and best score, and how it ended."""
    scale, unit = (100, ", %") if is_percent(tuning.metric) else (1, "")

    def cell(numbers: list[float]) -> str:
        return mean_and_spread([scale * number for number in numbers], "{:.4g}".format)

    head = [*short_names(tuning.keys), f"{tuning.score_name}{unit}", f"best{unit}", ""]
    rows = []
    for trial in tuning.trials:
        cells = [shown(trial.settings[key]) if key in trial.settings else "" for key in tuning.keys]
        remark = "best" if trial is tuning.best else trial.remark
        rows.append([*cells, cell(trial.final), cell(trial.best), remark])
    return Table("trials", head, rows)


def config_tables(curves: Sequence[Trial]) -> tuple[Table, Table]:
    """Return the settings that differ between curves, a column each, and those common to all runs."""
    by_curve = [[_shown_settings(run) for run in curve.records] for curve in curves]
    keys, common = _compare_settings([settings for of_curve in by_curve for settings in of_curve])
    rows = []
    for key in keys:
        cells = [dict.fromkeys(text(one[key]) if key in one else NONE for one in of_curve) for of_curve in by_curve]
        rows.append([key, *map(", ".join, cells)])
    rows.sort(key=lambda row: NONE in row)  # keys that all curves have come first
    return (
        Table("configuration", ["key", *(curve.name for curve in curves)], rows),
        Table("common-configuration", ["key", "value"], common),
    )


def _shown_settings(run: Record) -> dict[str, object]:
    """Return a run's settings, without the comparison that it was part of, and without digests of private data."""
    settings = flatten(sections(run))
    is_private = any(key.startswith("privacy.") for key in settings)
    digests = [key for key in settings if is_private and key.endswith(DIGESTS)]
    return {key: value for key, value in settings.items() if not key.startswith("compare.") and key not in digests}


def runs_tables(curves: Sequence[Trial]) -> tuple[Table, Table]:
    """Return every run with its folder, end and differing environment, and what all environments share."""
    runs = [(curve, run) for curve in curves for run in curve.records]
    environments = [{"device": run.config.get("run", {}).get("device", NONE), **run.environment} for _, run in runs]
    keys, common = _compare_settings(environments)
    rows = []
    for (curve, run), machine in zip(runs, environments, strict=True):
        rounds = str(len(run.history))
        if not run.complete:
            rounds += f" of {run.config['train']['rounds']}, {'diverged' if run.diverged else 'not finished'}"
        cells = [text(machine.get(key, NONE)) for key in keys]
        rows.append([folder_name(run), curve.name, str(run.seed), rounds, *cells])
    return (
        Table("runs", ["folder", "curve", "seed", "rounds", *keys], rows),
        Table("environment", ["what", "value"], common),
    )


def _compare_settings(every: list[dict[str, object]]) -> tuple[list[str], list[list[str]]]:
    """Return the keys whose values differ, and a row for every other key."""
    keys = differing(every)
    return keys, [[key, text(value)] for key, value in every[0].items() if key not in keys] if every else []


# --- tables as CSV; page.js does the same for the tables on the page -------------------------------------------------

WORDS = {INFINITE: "inf", NONE: ""}  # in CSV
INTERVAL = re.compile(r"([-+][\d.]+) \[([-+][\d.]+), ([-+][\d.]+)\]")


def to_csv(table: Table) -> str:
    """Return a table as CSV: mean, spread and interval in separate columns, and empty where there is no value."""
    suffixes = [_suffixes([row[i] for row in table.rows]) for i in range(len(table.head))]
    head = [heading + suffix for heading, each in zip(table.head, suffixes, strict=True) for suffix in each]
    rows = []
    for row in table.rows:
        cells: list[str] = []
        for cell, each in zip(row, suffixes, strict=True):
            match = INTERVAL.fullmatch(cell)
            parts = match.groups() if match else cell.split(SPREAD) if len(each) == 2 else [cell]
            cells += [*parts, *[""] * (len(each) - len(parts))]
        rows.append(["" if cell.startswith(UNREACHED) else WORDS.get(cell, cell) for cell in cells])
    return csv_text([head, *rows])


def _suffixes(cells: Sequence[str]) -> list[str]:
    """Return what is added to a heading for each of the columns that its cells become."""
    if any(SPREAD in cell for cell in cells):
        return ["", ", std"]
    return ["", ", low", ", high"] if any(map(INTERVAL.fullmatch, cells)) else [""]
