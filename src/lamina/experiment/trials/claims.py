"""Check a paper's claims (an ordering, a speed, a gap) against measured results.

A claim is a record in the experiment file (`config.Claim`). It is split into pairs, "this one is better than that one",
and holds if all of them do. Values are means over seeds; a pair that holds in the mean but not in every seed is weak.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lamina.base.errors import BadInput, unknown
from lamina.base.text import plural
from lamina.experiment.config import Claim, Experiment
from lamina.experiment.runs.records import Record
from lamina.experiment.trials.trial import Trial

AS_GIVEN = ""  # the variant that changes nothing
MINUS = " - "

Verdict = Literal["holds", "holds in part", "does not hold", "not run"]


@dataclass(frozen=True)
class Finding:
    """A claim with its measured values and pairs."""

    claim: Claim
    values: dict[str, float]  # by label; infinite: never reached or diverged, NaN: not run
    pairs: dict[tuple[str, str], bool]  # (better, worse) in the paper -> whether it holds here
    weak: list[tuple[str, str]]  # pairs that hold in the mean, but not in every seed

    @property
    def verdict(self) -> Verdict:
        """Whether all pairs, some or none hold."""
        if any(math.isnan(value) for value in self.values.values()):
            return "not run"
        if all(self.pairs.values()):
            return "holds"
        return "holds in part" if any(self.pairs.values()) else "does not hold"


def evaluate(claim: Claim, entries: Mapping[str, Trial]) -> Finding:
    """Check a claim against results, given by ``algorithm`` or ``algorithm@variant``."""
    values = {label: _value(claim, label, entries) for label in labels(claim)}
    pairs = {pair: _as_expected(claim, *map(values.__getitem__, pair)) for pair in _pairs(claim)}
    weak = [pair for pair, holds in pairs.items() if holds and not _in_every_seed(claim, pair, entries)]
    return Finding(claim, values, pairs, weak)


def labels(claim: Claim) -> list[str]:
    """Return all labels of a claim, the best first."""
    return [label for group in _groups(claim) for label in group]


def named_in(label: str) -> list[tuple[str, str]]:
    """Return the algorithms of a label, each with its variant.

    >>> named_in("fedlamb@Z=3 - fedams")
    [('fedlamb', 'Z=3'), ('fedams', '')]
    """
    parts = [name.partition("@") for name in label.split(MINUS)]
    return [(algorithm, variant) for algorithm, _, variant in parts]


def needed(experiment: Experiment) -> dict[str, list[str]]:
    """Return the algorithms to run in each variant; the unchanged file runs all of its algorithms, or is left out."""
    runs: dict[str, list[str]] = {}
    for claim in experiment.claim:
        for label in labels(claim):
            for algorithm, variant in named_in(label):
                runs.setdefault(variant, []).append(algorithm)
    in_order = experiment.compare.algorithms
    return {
        variant: [name for name in in_order if variant == AS_GIVEN or name in names]
        for variant, names in sorted(runs.items())
    }


def variants(experiment: Experiment) -> dict[str, list[str]]:
    """Return the overrides of every variant; claims may share one."""
    return {AS_GIVEN: []} | {name: sets for claim in experiment.claim for name, sets in claim.variants.items()}


def check(experiment: Experiment) -> None:
    """Refuse claims that cannot be evaluated, before anything runs."""
    if not experiment.claim:
        raise BadInput("the file has no [[claim]]: there is nothing to reproduce; use lamina compare")
    known = variants(experiment)
    for number, claim in enumerate(experiment.claim):
        place = f"claim.{number}"
        if not _pairs(claim):
            raise BadInput(f"{place}.expect = {claim.expect!r}: name at least two, the best first")
        if (claim.kind == "rounds_to") != (claim.target is not None):
            raise BadInput(f"{place}: target and kind = 'rounds_to' go together")
        if claim.within is not None and isinstance(claim.at, int) and claim.at > claim.within:
            raise BadInput(f"{place}: at = {claim.at} is not within = {plural(claim.within, 'round')}")
        if (claim.kind == "gap") != (claim.at_least is not None or claim.at_most is not None):
            raise BadInput(f"{place}: at_least or at_most and kind = 'gap' go together")
        for label in [*labels(claim), *claim.paper]:
            for algorithm, variant in named_in(label):
                if algorithm not in experiment.compare.algorithms:
                    raise unknown(f"algorithm in {place}", algorithm, experiment.compare.algorithms)
                if variant not in known:
                    raise unknown(f"variant in {place}", variant, [name for name in known if name])
        for name, sets in claim.variants.items():
            if not re.fullmatch(r"[\w=.-]*\w", name) or name.startswith("."):  # it names a folder
                raise BadInput(f"{place}.variants: '{name}' must be made of letters, digits, '=', '.', '-' and '_'")
            if sets != known[name]:
                raise BadInput(f"{place}.variants: another claim has set '{name}' otherwise; choose another name")


def _groups(claim: Claim) -> list[list[str]]:
    return [[group] if isinstance(group, str) else group for group in claim.expect]


def _pairs(claim: Claim) -> list[tuple[str, str]]:
    """Return the expected (better, worse) pairs: each group against all later ones; in a gap only the first group."""
    groups = [(i, label) for i, group in enumerate(_groups(claim)) for label in group]
    pairs = itertools.combinations(groups, 2)
    return [(a, b) for (i, a), (j, b) in pairs if i < j and (claim.kind != "gap" or i == 0)]


def _as_expected(claim: Claim, better: float, worse: float) -> bool:
    """Return whether a pair holds; two that never reach the target cannot be told apart, so it does not."""
    if claim.kind == "rounds_to":
        return better < worse
    lead = worse - better if claim.lower_is_better else better - worse
    if claim.kind == "order":
        return lead > 0
    enough = claim.at_least is None or lead >= claim.at_least
    return enough and (claim.at_most is None or abs(lead) <= claim.at_most)


def _in_every_seed(claim: Claim, pair: tuple[str, str], entries: Mapping[str, Trial]) -> bool:
    """Return whether a pair holds in each seed alone: methods share its initial weights, clients and batches."""
    named = {name: entries[name] for label in pair for name in label.split(MINUS)}
    for i in range(min(len(entry.records) for entry in named.values())):
        alone = {name: replace(entry, records=entry.records[i : i + 1]) for name, entry in named.items()}
        if not _as_expected(claim, *(_value(claim, label, alone) for label in pair)):
            return False
    return True


def _value(claim: Claim, label: str, entries: Mapping[str, Trial]) -> float:
    """Return the number a claim is about, for one label."""
    first, *others = [_mean(claim, entries[name]) if name in entries else math.nan for name in label.split(MINUS)]
    return first - sum(others)


def _mean(claim: Claim, entry: Trial) -> float:
    """Return the mean over seeds; infinite (the bad side) if one diverged or never reached the target."""
    worst = math.inf if claim.kind == "rounds_to" or claim.lower_is_better else -math.inf
    numbers = [_number(claim, record) for record in entry.records]
    return statistics.fmean(worst if number is None else number for number in numbers) if numbers else math.nan


def _number(claim: Claim, record: Record) -> float | None:
    """Return one seed's number; None if the run diverged or never reached it, NaN if the run is too short."""
    history, diverged = record.history, record.diverged is not None
    if claim.within is not None:
        if len(history) < claim.within and not diverged:
            return math.nan
        diverged, history = diverged and len(history) < claim.within, history[: claim.within]
    column = {int(row["round"]): float(row[claim.metric]) for row in history if claim.metric in row}
    column = {number: value for number, value in column.items() if not math.isnan(value)}
    missing = None if diverged or not len(history) else math.nan
    if not column:
        return missing
    if claim.target is not None:
        return history.rounds_to(claim.target, claim.metric)
    if claim.at == "best":
        return min(column.values()) if claim.lower_is_better else max(column.values())
    if claim.at == "last":
        return None if diverged else column[max(column)]
    return column.get(claim.at, missing)


# --- a claim's numbers as text -----------------------------------------------------------------------------------


def unit(claim: Claim) -> str:
    """Return what the numbers of a claim measure."""
    per_cent = ", %" if in_per_cent(claim, 1) != 1 else ""
    within = f" of {plural(claim.within, 'round')}" if claim.within is not None else ""
    if claim.target is not None:
        return f"rounds to {claim.metric} {claim.target:g}{within and ','}{within}"
    return f"{claim.metric}{per_cent}, " + (f"round {claim.at}" if isinstance(claim.at, int) else claim.at) + within


def in_per_cent(claim: Claim, value: float) -> float:
    """Return a value as papers print it: accuracies in per cent."""
    return 100 * value if claim.target is None and "accuracy" in claim.metric else value


def written(value: float, *, rounds: bool = True) -> str:
    """Return a number as plain ASCII text; infinity is "never" for a number of `rounds`, else "diverged"."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never" if rounds and value > 0 else "diverged"
    return f"{value:.4g}"
