"""The ledger: bytes that a round sends, counted from the payload itself.

Engines ask the `Ledger` at the end of a round (`close_round`, which adds `bytes_besides_payload`). A federation also
counts what it really sends, in flower/mail.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Needs
from lamina.algorithms.rehearsal import trial_rounds
from lamina.objective.layers import Layers
from lamina.rounds.plan import count_exchanges


def payload_bytes(payload: Any) -> dict[str, int]:
    """Return the bytes of every field of one client's Down or Up; a field that is None is not sent."""
    return {
        name: value.numel() * value.element_size()
        for name, value in zip(payload._fields, payload, strict=True)
        if value is not None
    }


def upload_bytes(up: Any) -> int:
    """Return the bytes of one client's upload."""
    return sum(payload_bytes(up).values())


def bytes_besides_payload(needs: Needs, x: Tensor, buffers: int) -> tuple[int, int]:
    """Return the bytes that one client receives and sends in a round besides its Down and its Up.

    Buffers are sent with every message down, and with the Up. For a control variate the server sends x ahead of the
    rest of the Down, and the client answers with its full gradient at x, which passes no codec.

    Args:
        needs: what the algorithm asks for in this round.
        x: the shared parameters.
        buffers: the bytes of the model's shared buffers.
    """
    gradient = x.numel() * x.element_size() if needs.control_variate else 0
    return count_exchanges(needs) * buffers, gradient + buffers


class Ledger:
    """Counts bytes, and remembers which version of a cached field every client holds.

    With lazy synchronisation a field such as v_hat changes only now and then. A client keeps it, so it is sent
    only to clients that hold another version: one that was absent at the last synchronisation pays for it later.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.held: dict[str, NDArray[np.int64]] = {}

    def down(self, payload: Any, versions: Mapping[str, int], cohort: NDArray[np.int64]) -> int:
        """Return the bytes sent to the whole cohort."""
        total = 0
        for name, size in payload_bytes(payload).items():
            receivers = len(cohort)
            if name in versions:
                held = self.held.setdefault(name, np.full(self.clients, -1, dtype=np.int64))
                receivers = int((held[cohort] != versions[name]).sum())
                held[cohort] = versions[name]
            total += receivers * size
        return total


class WireCost(NamedTuple):
    """What one active client receives, sends and keeps, in models (d = number of parameters)."""

    down: float
    up: float
    client_state: float


def wire_cost(algorithm: Algorithm) -> WireCost:
    """Return the mean cost per round for a client that takes part in every round, measured on a toy model.

    Numbers per layer or per client are negligible in a real model and are not counted.

    >>> from lamina.algorithms import FedLada
    >>> wire_cost(FedLada())
    WireCost(down=3.0, up=2.0, client_state=0.0)
    """
    rounds = 12 * algorithm.cycle
    x = torch.ones(4)
    unit = x.numel() * x.element_size()
    trial = list(trial_rounds(algorithm, x, Layers({"w": (2, 2)}), rounds))
    ledger, down_bytes, up_bytes = Ledger(1), 0, 0
    for r, (down, up, _) in enumerate(trial, start=1):
        down_bytes += ledger.down(_vectors(down), algorithm.down_versions(r), np.zeros(1, dtype=np.int64))
        up_bytes += upload_bytes(_vectors(up)) + bytes_besides_payload(algorithm.needs(r), x, buffers=0)[1]
    last_down, _, client = trial[-1]
    cached = payload_bytes(_vectors(last_down))
    kept = sum(payload_bytes(_vectors(client)).values())
    kept += sum(cached.get(name, 0) for name in algorithm.down_versions(rounds))
    return WireCost(down_bytes / unit / rounds, up_bytes / unit / rounds, kept / unit)


def _vectors(payload: Any) -> Any:
    """Return the payload without its numbers per layer or per client."""
    return type(payload)(*(None if value is None or value.shape[-1] == 1 else value for value in payload))
