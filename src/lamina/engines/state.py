"""What a federation is between two rounds, and what a round reports: shared by all engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.errors import Diverged
from lamina.layers import Layers
from lamina.ledger import Ledger
from lamina.objective import Buffers, Objective


@dataclass
class State:
    """Everything that must survive to continue a run: nothing else carries over from round to round."""

    round: int  # rounds finished
    server: Any  # the algorithm's Server record
    buffers: Buffers  # the model's buffers (BatchNorm statistics)
    clients: dict[int, Any]  # Client records of the clients that have taken part
    ledger: Ledger

    @classmethod
    def start(cls, algorithm: Algorithm, objective: Objective, clients: int) -> State:
        """The state before round 1."""
        return cls(0, algorithm.init(objective.start), dict(objective.buffers), {}, Ledger(clients))


@dataclass(frozen=True)
class RoundReport:
    """What an engine measures while it runs a round."""

    train_loss: float  # mean mini-batch loss over all local steps of the round
    consistency: float  # mean_i ||y_K - x+||^2
    update_norm: float  # ||x+ - x||
    bytes_down: int
    bytes_up: int
    trust_ratios: dict[str, float]  # mean over the cohort, by layer; empty unless asked for


def diverged(
    layers: Layers, vector: Tensor, round: int, lr: float, client: int | None, step: str = "", fallback: str = "loss"
) -> Diverged:
    """The error for a NaN or an infinity in a flat vector: says where it is and what to try."""
    layer = layers.first_nonfinite(vector) or fallback
    who = "the server's step" if client is None else f"client {client}{step}"
    return Diverged(
        f"round {round}: {who} went non-finite, first in '{layer}'; "
        f"lower the learning rate (now {lr:g}) or clip the gradients. Earlier rounds are kept",
        round=round,
        client=client,
        layer=layer,
    )
