"""What a node may claim about its losses, and what a task may ask of a node."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lamina.errors import BadInput

LOSS_FACTOR = 100.0  # a loss is out of all proportion from so many times the typical one of its round on
LEAST_TYPICAL_LOSS = 1.0  # so that a client that fits worse than others, which fit perfectly, is none
MOST_SAMPLES = 10**8  # that a task may have a node train on in one round


def absurd_losses(losses: Mapping[int, float], before: float | None) -> tuple[float, list[int]]:
    """Return the typical loss of a round, and the clients whose loss is out of all proportion to it.

    The median counts; of two answers the smaller, and of one that of the round `before`, if there is any.

    >>> absurd_losses({0: 2.1, 1: 9e29, 2: 2.5, 3: 1.9}, None)
    (2.1, [1])
    """
    sizes = [abs(loss) for loss in losses.values()]
    if not sizes or (len(sizes) == 1 and before is None):
        return 0.0, []
    typical = statistics.median_low(sizes) if len(sizes) > 1 or before is None else before
    most = LOSS_FACTOR * max(abs(typical), LEAST_TYPICAL_LOSS)
    return typical, [client for client, loss in losses.items() if abs(loss) > most]


def refuse_work(samples: int, steps: int, batch_size: int) -> None:
    """Refuse a task that would have a node train on an absurd number of samples."""
    asked = steps * min(samples, batch_size)
    if asked > MOST_SAMPLES:
        raise BadInput(
            f"the server asks for {steps} local steps of {min(samples, batch_size)} samples in one round, and this "
            f"node trains on at most {MOST_SAMPLES}: lower epochs or local_steps"
        )
