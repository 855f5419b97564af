"""Rounds with given gradients, and rounds of a single client: what tests of single algorithms compare formulas with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import lamina
import transcriptions as T  # noqa: N812
from paper_problem import INPUTS, LABELS, LAYERS, federate, infos, local_run, vectors

GRADIENT = T.Gradient(INPUTS, LABELS)
ALONE: dict[str, Any] = {"clients": [np.arange(20)], "participation": 1.0}  # one client, in every round


def displacement(algorithm: Any, server: Any, grads: torch.Tensor, info: Any) -> torch.Tensor:
    """Return D, the mean displacement of new clients with gradients [clients, K, p]."""
    client = algorithm.client_init(server.x, LAYERS)
    return torch.stack([local_run(algorithm, server, client, g, info)[0].delta for g in grads]).mean(0)


def history(algorithm: Any, grads: list[torch.Tensor], lr: float = 0.1) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield the server's state before and after every round, and the round's D; clients are new in each round."""
    server = algorithm.init(vectors(seed=3), LAYERS)
    for r, given in enumerate(grads, 1):
        info = infos(r, lr, given.shape[1])
        after = federate(algorithm, server, given, info)
        yield server, after, displacement(algorithm, server, given, info)
        server = after


def rounds_of_one_client(simulation: lamina.Simulation, rounds: int) -> Iterator[tuple[float, list[np.ndarray]]]:
    """Train for some rounds; after each, yield its rate and the batches of its only client."""
    for r in range(1, rounds + 1):
        simulation.run(1)
        rnd = simulation.plan.round(r)
        yield rnd.lr, T.batches(rnd, 0)


def rounds_of(*scales: float) -> list[torch.Tensor]:
    """Return gradients of three clients and two steps for rounds of these scales."""
    return [scale * vectors(3, 2, seed=10 + r) for r, scale in enumerate(scales)]
