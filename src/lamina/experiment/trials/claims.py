"""Check a paper's claims (an ordering, a speed, a gap) against measured results.

A claim is a record in the experiment file (`config.Claim`). It is split into pairs, "this one is better than that one".
The difference of a pair is the mean over the seeds that both methods have, with its 95 % interval.

- A pair of an order, or of rounds to a target, is right or wrong by the sign of its difference. It is a tie if the
  interval includes 0 or both values are equal. One seed has no interval: only its sign counts.
- A pair of a gap is right if the mean difference is as large, or as small, as claimed.
- A pair is not comparable if its difference says nothing about the methods (`_incomparable` lists the reasons).

A claim is *reproduced* if all pairs are right, and *partly* if some are. Without a right pair it is *not reproduced* if
some pair is wrong, else a *tie* if some pair is a tie, else *not comparable*.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lamina import algorithms
from lamina.base.errors import BadInput, unknown
from lamina.base.text import plural
from lamina.experiment.config import Claim, Experiment
from lamina.experiment.runs.records import Record
from lamina.experiment.trials.pairs import Difference, paired_difference
from lamina.experiment.trials.trial import Trial
from lamina.training.history import LAST_ROUNDS, History, mean

AS_GIVEN = ""  # the variant that changes nothing
MINUS = " - "
FLOOR_ROUNDS = 3  # a target that both methods reach so soon does not tell them apart

Verdict = Literal["reproduced", "partly", "not reproduced", "tie", "not comparable", "not run"]
Outcome = Literal["right", "wrong", "tie", "not comparable"]


@dataclass(frozen=True)
class Pair:
    """Two labels of a claim, and whether they differ as claimed."""

    better: str  # in the paper
    worse: str
    outcome: Outcome
    lead: Difference | None = None  # of the better one; positive if it is better here, too; None without a difference
    remark: str = ""  # why it is not comparable, or what the outcome leaves open


@dataclass(frozen=True)
class Finding:
    """A claim with its measured values and pairs."""

    claim: Claim
    values: dict[str, float]  # means by label; infinite: a seed diverged or did not stay at the target, NaN: no value
    pairs: list[Pair]  # none if a method was not run
    touches: dict[str, float] = field(default_factory=dict)  # rounds_to: means of the first round at the target
    rounds: int = 0  # that the claim looks at

    @property
    def verdict(self) -> Verdict:
        """Return the verdict; the head of this module has the rule."""
        outcomes = {pair.outcome for pair in self.pairs}
        if not outcomes:
            return "not run"
        if "right" in outcomes:
            return "partly" if len(outcomes) > 1 else "reproduced"
        return "not reproduced" if "wrong" in outcomes else "tie" if "tie" in outcomes else "not comparable"

    @property
    def seeds(self) -> int:
        """Return the seeds of a pair, the fewest if pairs differ; 0 if no pair has a difference."""
        return min((pair.lead.seeds for pair in self.pairs if pair.lead is not None), default=0)


def evaluate(claim: Claim, entries: Mapping[str, Trial]) -> Finding:
    """Check a claim against results, given by ``algorithm`` or ``algorithm@variant``."""
    trials = {label: [entries[name] for name in label.split(MINUS) if name in entries] for label in labels(claim)}
    records = [record for of_label in trials.values() for trial in of_label for record in trial.records]
    is_complete = all(
        len(trials[label]) == len(label.split(MINUS)) and all(trial.records for trial in trials[label])
        for label in trials
    )
    by_seed = {label: _by_seed(claim, label, entries) for label in trials}
    touches = {label: _by_seed(claim, label, entries, touch=True) for label in trials if claim.target is not None}
    return Finding(
        claim,
        {label: mean(numbers.values() or [math.nan]) for label, numbers in by_seed.items()},
        [_judge(claim, pair, by_seed, entries) for pair in _pairs(claim)] if is_complete else [],
        {label: mean(numbers.values() or [math.nan]) for label, numbers in touches.items()},
        max((_rounds(claim, record) for record in records), default=0),
    )


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
    sets_of_variants = variants(experiment)
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
                if variant not in sets_of_variants:
                    raise unknown(f"variant in {place}", variant, [name for name in sets_of_variants if name])
        for name, sets in claim.variants.items():
            if not re.fullmatch(r"[\w=.-]*\w", name) or name.startswith("."):  # it names a folder
                raise BadInput(f"{place}.variants: '{name}' must be made of letters, digits, '=', '.', '-' and '_'")
            if sets != sets_of_variants[name]:
                raise BadInput(f"{place}.variants: another claim has set '{name}' otherwise; choose another name")


def _groups(claim: Claim) -> list[list[str]]:
    return [[group] if isinstance(group, str) else group for group in claim.expect]


def _pairs(claim: Claim) -> list[tuple[str, str]]:
    """Return the expected (better, worse) pairs: each group against all later ones; in a gap only the first group."""
    groups = [(i, label) for i, group in enumerate(_groups(claim)) for label in group]
    pairs = itertools.combinations(groups, 2)
    return [(a, b) for (i, a), (j, b) in pairs if i < j and (claim.kind != "gap" or i == 0)]


# --- the outcome of a pair ---------------------------------------------------------------------------------------

Numbers = Mapping[str, Mapping[int, float]]  # by label and seed


def _judge(claim: Claim, pair: tuple[str, str], numbers: Numbers, entries: Mapping[str, Trial]) -> Pair:
    """Return a pair with its outcome."""
    if problem := _incomparable(claim, pair, numbers, entries):
        return Pair(*pair, "not comparable", None, problem)
    if problem := _divergence(claim, pair[0], entries):
        return Pair(*pair, "wrong", None, problem)
    better, worse = (numbers[label] for label in pair)
    rounds = max(_rounds(claim, record) for label in pair for record in _records(label, entries))
    if claim.kind == "rounds_to":  # a run that did not stay at the target would need at least one more round
        better, worse = ({seed: min(one, rounds + 1) for seed, one in each.items()} for each in (better, worse))
    is_less_better = claim.kind == "rounds_to" or claim.lower_is_better
    lead = paired_difference(worse, better) if is_less_better else paired_difference(better, worse)
    if lead is None:
        return Pair(*pair, "not comparable", None, "they have no seed in common")
    if claim.kind == "gap":
        return _judge_gap(claim, pair, lead)
    if lead.mean == 0:
        is_reached = max(better.values()) <= rounds or claim.kind == "order"
        return Pair(*pair, "tie", lead, "equal" if is_reached else f"neither within {plural(rounds, 'round')}")
    if lead.includes(0.0):
        return Pair(*pair, "tie", lead, f"{'holds' if lead.mean > 0 else 'reversed'} by less than the interval")
    return Pair(*pair, "right" if lead.mean > 0 else "wrong", lead, "one seed" if lead.margin is None else "")


def _judge_gap(claim: Claim, pair: tuple[str, str], lead: Difference) -> Pair:
    """Return whether a lead is as large, or as small, as claimed, and whether its interval leaves that open."""
    low = max(-math.inf if limit is None else limit for limit in (claim.at_least, claim.at_most and -claim.at_most))
    high = math.inf if claim.at_most is None else claim.at_most
    is_right = low <= lead.mean <= high
    is_clear = low <= lead.low and lead.high <= high if is_right else lead.high < low or high < lead.low
    unclear = f"{'holds' if is_right else 'missed'} by less than the interval"
    remark = "one seed" if lead.margin is None else "" if is_clear else unclear
    return Pair(*pair, "right" if is_right else "wrong", lead, remark)


def _incomparable(claim: Claim, pair: tuple[str, str], numbers: Numbers, entries: Mapping[str, Trial]) -> str:
    """Return why the difference of a pair says nothing about its methods; empty if it does.

    The reasons: runs that are too short for the claim or not equally long, a run whose metric never changed, a method
    whose learning rate was not tuned, a missing value, a difference that is only survival because the worse method
    diverged, and a target that both reach in the first rounds.
    """
    lengths = set()
    needed = max(claim.at if isinstance(claim.at, int) else 0, claim.within or 0)
    for label in pair:
        for name in label.split(MINUS):
            for record in entries[name].records:
                length = int(record.config["train"]["rounds"])
                lengths.add(length)
                if length < needed:
                    return f"{name} has {length} of {plural(needed, 'round')}"
                if _is_dead(record.history):
                    return f"the {record.history.metric} of {name} never changed"
                if _is_untuned(record, named_in(name)[0][0]):
                    return f"{name} has its default learning rate: none was tried"
                if math.isnan(_number(claim, record)):
                    return f"{name} has no {claim.metric}" + (f" in round {claim.at}" if needed == claim.at else "")
    if not needed and len(lengths) > 1:
        return f"runs of {' and '.join(map(str, sorted(lengths)))} rounds"
    # A method that should be better and diverges is worse; in a claim of equality, and in differences, nobody is.
    for label in pair if claim.at_most is not None or MINUS in "".join(pair) else pair[1:]:
        if problem := _divergence(claim, label, entries):
            return problem
    if claim.kind == "rounds_to" and max(max(numbers[label].values()) for label in pair) <= FLOOR_ROUNDS:
        return f"both are there within {plural(FLOOR_ROUNDS, 'round')}"
    return ""


def _is_dead(history: History) -> bool:
    """Return whether all evaluations of a run gave the same value."""
    values = history.array(history.metric, optional=True)
    return len(set(values[values == values])) == 1 < len(history)


def _is_untuned(record: Record, name: str) -> bool:
    """Return whether a run of a comparison has its algorithm's default rate, and no rates were given for it."""
    grid = record.config.get("compare", {}).get("grid")
    has_rates = grid is None or (grid.get(name) or {}).get("lr") is not None
    return not has_rates and record.lr == algorithms.find(record.algorithm).card.lr


def _divergence(claim: Claim, label: str, entries: Mapping[str, Trial]) -> str:
    """Return which method of a label diverged in the rounds that a claim looks at; empty if none did."""
    for name in label.split(MINUS):
        records = entries[name].records
        if count := sum(_has_diverged(claim, record) for record in records):
            return f"{name} diverged" + (f" in {count} of {plural(len(records), 'seed')}" if len(records) > 1 else "")
    return ""


# --- the number of a run -----------------------------------------------------------------------------------------


def _records(label: str, entries: Mapping[str, Trial]) -> list[Record]:
    return [record for name in label.split(MINUS) if name in entries for record in entries[name].records]


def _rounds(claim: Claim, record: Record) -> int:
    """Return how many rounds of a run a claim looks at."""
    wanted = claim.at if isinstance(claim.at, int) else claim.within
    rounds = int(record.config["train"]["rounds"])
    return rounds if wanted is None else min(rounds, wanted)


def _has_diverged(claim: Claim, record: Record) -> bool:
    """Return whether a run diverged in the rounds that a claim looks at."""
    return record.diverged is not None and len(record.history) < _rounds(claim, record)


def _by_seed(claim: Claim, label: str, entries: Mapping[str, Trial], *, touch: bool = False) -> dict[int, float]:
    """Return the number a claim is about by seed, for one label: of the seeds that all its methods have."""
    first, *others = [
        {record.seed: _number(claim, record, touch=touch) for record in _records(name, entries)}
        for name in label.split(MINUS)
    ]
    seeds = [seed for seed in first if all(seed in other for other in others)]
    return {seed: first[seed] - sum(other[seed] for other in others) for seed in seeds}


def _number(claim: Claim, record: Record, *, touch: bool = False) -> float:
    """Return one seed's number; infinite (the bad side) if it diverged or missed the target, NaN if not measured.

    With `touch`, the first round that reaches the target in place of the round from which the run stays there.
    """
    worst = math.inf if claim.kind == "rounds_to" or claim.lower_is_better else -math.inf
    history = record.history[: _rounds(claim, record)]
    if _has_diverged(claim, record) and not touch:
        return worst
    values = history.array(claim.metric, optional=True)
    if (values != values).all() or len(history) < (claim.within or 0):
        return math.nan
    if claim.target is not None:
        reach = history.rounds_to if touch else history.settling_round
        number = reach(claim.target, claim.metric, optional=True)
        return worst if number is None else number
    if claim.at == "best":
        return float(values[values == values].min() if claim.lower_is_better else values[values == values].max())
    if claim.at == "final":
        return history.final(claim.metric, optional=True)
    if claim.at == "last":
        return history.last(claim.metric, optional=True)
    return float(values[claim.at - 1]) if len(values) >= claim.at else math.nan


# --- a claim's numbers as text -----------------------------------------------------------------------------------


def unit(claim: Claim) -> str:
    """Return what the numbers of a claim measure."""
    per_cent = ", %" if in_per_cent(claim, 1) != 1 else ""
    within = f" of {plural(claim.within, 'round')}" if claim.within is not None else ""
    if claim.target is not None:
        return f"rounds until {claim.metric} stays at {claim.target:g}{within and ','}{within}"
    final = f"last {min(LAST_ROUNDS, claim.within or LAST_ROUNDS)}{within or ' rounds'}"
    at = f"round {claim.at}" if isinstance(claim.at, int) else final if claim.at == "final" else claim.at + within
    return f"{claim.metric}{per_cent}, {at}"


def in_per_cent(claim: Claim, value: float) -> float:
    """Return a value as papers print it: accuracies in per cent."""
    return 100 * value if claim.target is None and "accuracy" in claim.metric else value


def written(value: float, *, rounds: bool = True, never: str = "never") -> str:
    """Return a number as plain ASCII text; infinity is `never` for a number of `rounds`, else "diverged"."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return never if rounds and value > 0 else "diverged"
    return f"{value:.4g}"


def written_lead(claim: Claim, pair: Pair) -> str:
    """Return a pair's difference with its interval: ``+1.2 [+0.3, +2.1]``, ``-3`` of one seed."""
    if pair.lead is None:
        return "-"
    numbers = [f"{in_per_cent(claim, number):+.3g}" for number in (pair.lead.mean, pair.lead.low, pair.lead.high)]
    return numbers[0] if pair.lead.margin is None else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def written_outcome(pair: Pair) -> str:
    """Return a pair's outcome with its remark: ``right``, ``tie: equal``."""
    return pair.outcome + (f": {pair.remark}" if pair.remark else "")
