"""Correlated noise for runs whose privacy sampling does not amplify (DP-FTRL, matrix factorisation).

Round t adds y_t to the sum of its clients, where y = C⁻¹ z, z is independent Gaussian noise and C is a lower triangular
Toeplitz matrix with the first column c. The noise of later rounds cancels part of the earlier one, so the model, which
is a sum over rounds, gets less noise for the same guarantee.

A guarantee is that of one release of C x + z, where x are the clients' sums of all rounds: the Gaussian mechanism with
the sensitivity of C. References: Denisov et al. 2022, Fichtenberger, Henzinger & Upadhyay 2023 (the coefficients),
Choquette-Choo et al. 2023 (bands and separation), Kalinin & Lampert 2024 (the sensitivity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Coefficients = Sequence[float]  # c: not negative, not increasing, the first of them 1


def square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^(-1/2), the square root of the prefix sum.

    One band is independent noise. As many bands as the rounds between two rounds of a client are a good choice: then
    the columns of a client do not overlap.

    >>> square_root(4)
    (1.0, 0.5, 0.375, 0.3125)
    """
    coefficients = [1.0]
    for k in range(1, bands):
        coefficients.append(coefficients[-1] * (2 * k - 1) / (2 * k))
    return tuple(coefficients)


def next_noise(white: Tensor, earlier: Sequence[Tensor], coefficients: Coefficients) -> Tensor:
    """Return the correlated noise of a round: y_t = z_t - c_1 y_{t-1} - … - c_{b-1} y_{t-b+1}.

    Args:
        white: z_t, independent Gaussian noise of the standard deviation noise_multiplier × clipping bound.
        earlier: the correlated noise of the last b - 1 rounds, or of all rounds if there were fewer; the latest first.
        coefficients: the b coefficients of C.
    """
    noise = white
    for coefficient, before in zip(coefficients[1:], earlier, strict=False):
        noise = noise - coefficient * before
    return noise


def inverse(coefficients: Coefficients, rounds: int) -> NDArray[np.float64]:
    """Return the first column of C⁻¹ [rounds]: the weights of z_t, z_{t-1}, … in the noise of round t."""
    column = np.zeros(rounds)
    column[0] = 1.0
    c = np.asarray(coefficients[1:rounds])
    for t in range(1, rounds):
        reach = min(t, len(c))
        column[t] = -(c[:reach] @ column[t - reach : t][::-1])
    return column


def relative_deviation(coefficients: Coefficients, round: int) -> float:
    """Return the standard deviation of the correlated noise of a round, counted from 1, in units of the white noise."""
    return float(np.linalg.norm(inverse(coefficients, round)))


def sensitivity(coefficients: Coefficients, rounds: int, min_separation: int) -> float:
    """Return how far one client can move C x in `rounds` rounds, in units of the clipping bound.

    The client takes part in rounds that are at least `min_separation` apart, with an arbitrary vector within the bound
    each time. Because no coefficient is negative and none exceeds the one before, the worst client takes part as
    early and as often as it can (Kalinin & Lampert 2024, theorem 2).
    """
    if len(coefficients) <= min_separation:  # the client's columns do not overlap, only the last one may be cut
        whole, rest = divmod(max(rounds, 0), min_separation)
        column = np.square(np.asarray(coefficients))
        return math.sqrt(whole * float(column.sum()) + float(column[:rest].sum()))
    total = np.zeros(rounds)
    for start in range(0, rounds, min_separation):
        column = np.asarray(coefficients[: rounds - start])
        total[start : start + len(column)] += column
    return float(np.linalg.norm(total))
