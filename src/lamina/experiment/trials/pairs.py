"""Compare two methods seed by seed: with the same seed they share initial weights, clients and batches."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """The mean difference of two methods over the seeds that both have."""

    mean: float
    margin: float | None  # half the width of the 95 % interval; None of one seed, which has no interval
    seeds: int

    @property
    def low(self) -> float:
        """Return the lower end of the interval; of one seed, the difference itself."""
        return self.mean - (self.margin or 0.0)

    @property
    def high(self) -> float:
        """Return the upper end of the interval; of one seed, the difference itself."""
        return self.mean + (self.margin or 0.0)

    def includes(self, value: float) -> bool:
        """Return whether the interval includes a value."""
        return self.low <= value <= self.high


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Return the first method's values minus the second's, both given by seed; None if they share no seed.

    >>> paired_difference({0: 3.0, 1: 4.0}, {1: 1.5, 2: 1.0})
    Difference(mean=2.5, margin=None, seeds=1)
    """
    differences = [value - second[seed] for seed, value in first.items() if seed in second]
    if not differences:
        return None
    count, margin = len(differences), None
    if count > 1:
        margin = t_quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Difference(statistics.fmean(differences), margin, count)


@functools.cache
def t_quantile(degrees: int) -> float:
    """Return the bound that Student's t stays within, in absolute value, with probability 95 %.

    >>> round(t_quantile(1), 3), round(t_quantile(9), 3)
    (12.706, 2.262)
    """
    low, high = 0.0, 13.0  # one degree of freedom has the largest bound, 12.7
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _probability_within(middle, degrees) < CONFIDENCE else (low, middle)
    return middle


def _probability_within(bound: float, degrees: int) -> float:
    """Return the probability that |t| is below a bound (Abramowitz & Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(bound / math.sqrt(degrees))
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
