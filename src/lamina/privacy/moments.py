"""What noise does to second moments, and what can be done about it afterwards at no cost in privacy.

The mean of the clients' own second moments with noise on it is right on average, but may be negative: `non_negative`.
A square that the server takes of a noised mean is too large on average by the variance of the noise:
`debiased_square`, which `privacy = {"debias": True, …}` does in a run. That applies to FedAdam and Mime, whose server
squares a mean; not to methods whose clients send second moments.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.primitives import square_less_noise


def non_negative(second_moment: Tensor) -> Tensor:
    """Return a noised mean of second moments with 0 in place of negative values, which no second moment has.

    It is closer to the mean without noise in every coordinate, but where that mean is small against the noise, the
    result is too large on average. A running maximum keeps such values for ever.
    """
    return second_moment.clamp_min(0)


def debiased_square(noised_mean: Tensor, deviation: float) -> Tensor:
    """Return the square of a noised mean less the variance of its noise, and 0 in place of negative values.

    Args:
        noised_mean: a mean to which Gaussian noise was added, with no step in between that is not linear.
        deviation: standard deviation of that noise in one coordinate of the mean.
    """
    return square_less_noise(noised_mean, deviation**2)
