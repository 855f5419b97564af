"""A privacy loss distribution (PLD) composed with itself, for one number of rounds after the other.

`dp_accounting` starts anew for every number of rounds, which takes about ten times as long. Here the bounds on the
tails are computed once, and ε is found without a loop in Python. Both give the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TAIL = 1e-15  # the probability cut off in a composition, which counts as an infinite loss; as in dp_accounting
ORDERS = 20  # of the Chernoff bounds on either tail


class Composition:
    """One direction of a PLD: the privacy loss of one neighbour against the other.

    Args:
        pmf: the probabilities of dp_accounting's PLD on its grid.
    """

    def __init__(self, pmf: Any) -> None:
        dense = pmf.to_dense_pmf()
        self.probabilities = np.maximum(np.asarray(dense._probs, dtype=np.float64), 0.0)
        self.lowest, self.interval, self.infinite = dense._lower_loss, dense._discretization, dense._infinity_mass
        size = len(self.probabilities)
        self.orders = np.concatenate([np.arange(-ORDERS, 0), np.arange(1, ORDERS + 1)]) / size
        places = np.arange(size)
        self.log_moments = np.log([np.exp(places * order) @ self.probabilities for order in self.orders])

    def epsilon(self, rounds: int, delta: float) -> float:
        """Return ε at δ after a number of rounds."""
        from scipy import fft
        from scipy.signal import lfilter

        bounds = (rounds * self.log_moments + math.log(2 / TAIL)) / self.orders
        first = max(0, math.floor(bounds[:ORDERS].max()))
        last = min((len(self.probabilities) - 1) * rounds, math.ceil(bounds[ORDERS:].min()))
        length = fft.next_fast_len(max(last - first + 1, len(self.probabilities)), real=True)
        wrapped = fft.irfft(fft.rfft(self.probabilities, length) ** rounds, length)
        # From the largest loss down to 0: what exceeds ε makes δ(ε) = Σ p (1 - e^(ε - loss)).
        lowest = rounds * self.lowest + first
        steps = np.arange(lowest + last - first, max(lowest, 0) - 1, -1)
        if not len(steps):
            return 0.0
        probabilities = wrapped[(steps - rounds * self.lowest) % length]
        infinite = TAIL - math.expm1(rounds * math.log1p(-self.infinite))
        above = infinite + np.cumsum(probabilities)
        weighted = lfilter([1.0], [1.0, -math.exp(-self.interval)], probabilities)  # Σ p e^(loss here - loss)
        exceeds = np.flatnonzero(above - weighted >= delta)
        place = int(exceeds[0]) - 1 if len(exceeds) else len(steps) - 1
        if place < 0:
            return math.inf
        if above[place] <= delta:
            return 0.0
        return max(0.0, float(steps[place] * self.interval + math.log((above[place] - delta) / weighted[place])))
