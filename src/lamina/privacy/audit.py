"""Empirical ε from canaries: what an observer of a run can in fact tell about one client.

A canary is a client whose update is as visible as the clipping bound permits, such as a random direction. Its score is
what the observer sees of it, such as the product of the released model's change with that direction. An audit cannot
prove privacy: a result above the accounted ε proves an error, one below it proves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamina.base.errors import BadInput
from lamina.base.limits import check_count, check_number
from lamina.privacy.accounting import Accountant

LARGEST_EPSILON = 1e4  # that `gaussian_epsilon` looks for
BISECTIONS = 60
DELTAS = (1e-3, 1e-2, 0.03, 0.1, 0.3)  # at which `shown_noise` compares, besides the guarantee's own
LEAST_SHOWN_NOISE, MOST_SHOWN_NOISE = 0.01, 1e3  # multipliers that `shown_noise` tells from 0 and infinity
SHOWN_TOLERANCE = 5e-3  # relative


def membership_bound(present: ArrayLike, absent: ArrayLike, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε from the scores of runs with and without the canary, which holds with `confidence`.

    An observer says "the canary took part" where the score exceeds a threshold, so the canary must raise the score. The
    thresholds are scores without the canary, from the largest down; all bounds hold together. Because any n runs of
    either kind may have missed a mistake of the observer, they show no more than about log(n / 7) at 95 %.
    """
    present, absent = _scores("present", present), _scores("absent", absent)
    runs = len(absent)
    powers = 2 ** np.arange(int(math.log2(runs)))
    ranks = np.unique(np.concatenate([powers - 1, runs - powers]))  # the number of false positives
    true_positives = (present[:, None] > np.sort(absent)[::-1][ranks]).sum(0)
    together = 1 - (1 - confidence) / len(ranks)
    return float(error_bound(true_positives, ranks, len(present), runs, delta, together).max())


def error_bound(
    true_positives: Any, false_positives: Any, present: int, absent: int, delta: float, confidence: float = 0.95
) -> NDArray[np.float64]:
    """Return the lower bound on ε that a membership test's counts show; counts may be arrays.

    (ε, δ) bounds what a test can do: TPR <= e^ε FPR + δ, and the same for its opposite. Both rates are known up to
    Clopper-Pearson intervals, which hold together with `confidence`.

    Args:
        true_positives: runs with the canary in which the test found it.
        false_positives: runs without it in which the test found it.
        present: number of runs with the canary.
        absent: number of runs without it.
        delta: the δ of the guarantee that is audited.
        confidence: the probability that the bound holds.
    """
    from scipy.special import betaincinv

    check_number("delta", delta, least=0, below=1)
    check_number("confidence", confidence, above=0, below=1)
    tp, fp = np.asarray(true_positives, dtype=float), np.asarray(false_positives, dtype=float)
    miss = (1 - confidence) / 2  # that either interval may miss its rate
    tpr = np.where(tp > 0, betaincinv(np.maximum(tp, 1), present - tp + 1, miss), 0.0)  # at least
    fpr = np.where(fp < absent, betaincinv(fp + 1, np.maximum(absent - fp, 1), 1 - miss), 1.0)  # at most
    ratio = np.maximum((tpr - delta) / fpr, (1 - fpr - delta) / (1 - tpr))
    return np.asarray(np.log(np.maximum(ratio, 1.0)))


def shown_noise(
    present: ArrayLike, absent: ArrayLike, accountant: Accountant, rounds: int, confidence: float = 0.95
) -> float:
    """Return the largest noise multiplier that can have given these scores, with `confidence`; inf: any can.

    Less noise than the accountant's proves an error. The bounds of `membership_bound` hold at all δ together, and each
    is compared with ε of the mechanism at this δ. At a large δ a few runs tell much, so this shows far more than the
    bound at the δ of the guarantee alone (Nasr et al. 2023); but only of mechanisms of the accountant's kind.
    """
    bounds = {delta: membership_bound(present, absent, delta, confidence) for delta in (accountant.delta, *DELTAS)}
    bounds = {delta: bound for delta, bound in bounds.items() if bound > 0}

    def is_too_much(noise: float) -> bool:
        mechanism = dataclasses.replace(accountant, noise_multiplier=noise)
        return any(bound > mechanism.at(delta).epsilon(rounds) for delta, bound in bounds.items())

    if not is_too_much(MOST_SHOWN_NOISE):
        return math.inf
    low, high = LEAST_SHOWN_NOISE, MOST_SHOWN_NOISE
    while high / low > 1 + SHOWN_TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_too_much(middle) else (middle, high)
    return high


def one_shot_epsilon(cosines: ArrayLike, dimension: int, delta: float) -> float:
    """Return the estimate of ε from one run with many canaries (Andrew et al. 2023).

    It is an estimate, not a bound with a confidence: it takes the cosines as Gaussian, and needs tens of canaries and a
    dimension that is large against their number.

    Args:
        cosines: of each canary's random direction with the change of the released model.
        dimension: of the model. A canary that did not take part has a cosine of variance 1 / dimension.
        delta: the δ of the guarantee that is audited.
    """
    scores = _scores("cosines", cosines)
    check_count("dimension", dimension)
    return gaussian_epsilon((float(scores.mean()), float(scores.std())), (0.0, dimension**-0.5), delta)


def gaussian_epsilon(present: tuple[float, float], absent: tuple[float, float], delta: float) -> float:
    """Return the least ε at which two Gaussians (mean, standard deviation) are (ε, δ)-indistinguishable."""
    check_number("delta", delta, above=0, below=1)
    (mean, spread), (mean0, spread0) = present, absent
    for name, value in (("present", spread), ("absent", spread0)):
        check_number(f"the standard deviation of the scores '{name}'", value, above=0)
    shift = (mean - mean0) / spread0
    ratio = spread / spread0
    return max(_one_way(shift, ratio, delta), _one_way(-shift / ratio, 1 / ratio, delta))


def _one_way(mean: float, spread: float, delta: float) -> float:
    """Return the least ε >= 0 with P(S) <= e^ε Q(S) + δ for all sets S, P = N(mean, spread²) and Q = N(0, 1)."""

    def excess(epsilon: float) -> float:
        """P(S) - e^ε Q(S) for the worst S, where log p/q = a x² + b x + c exceeds ε."""
        a, b = (1 - spread**-2) / 2, mean / spread**2
        c = -0.5 * b * mean - math.log(spread) - epsilon
        if abs(a) < 1e-12:  # equal spreads
            if abs(b) < 1e-12:
                return 0.0
            intervals = [(-c / b, math.inf)] if b > 0 else [(-math.inf, -c / b)]
        elif (root := b * b - 4 * a * c) <= 0:
            intervals = [] if a < 0 else [(-math.inf, math.inf)]
        else:
            larger = -0.5 * (b + math.copysign(math.sqrt(root), b))
            low, high = sorted((larger / a, c / larger))
            intervals = [(low, high)] if a < 0 else [(-math.inf, low), (high, math.inf)]
        mass = sum(_mass((low - mean) / spread, (high - mean) / spread) for low, high in intervals)
        other = sum(_mass(low, high) for low, high in intervals)
        return mass - (math.exp(epsilon + math.log(other)) if other > 0 else 0.0)

    low, high = 0.0, 1.0
    if excess(low) <= delta:
        return 0.0
    while excess(high) > delta:
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            return math.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > delta else (low, middle)
    return high


def _mass(low: float, high: float) -> float:
    """Return the probability that a standard Gaussian lies between two numbers, also far out."""
    if low > 0:
        low, high = -high, -low
    return (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2


def _scores(name: str, given: ArrayLike) -> NDArray[np.float64]:
    scores = np.asarray(given, dtype=np.float64).ravel()
    if len(scores) < 2 or not np.isfinite(scores).all():
        raise BadInput(f"an audit needs at least two finite scores: '{name}' has {int(np.isfinite(scores).sum())}")
    return scores
