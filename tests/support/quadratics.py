"""Four clients with F_i = sum_j a_ij (x_j - c_ij)^2 / 2, each with its own optimum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lamina
from lamina.algorithms.contract import ClientInfo, ServerInfo
from paper_problem import mean_of

CURVATURES = torch.tensor([[0.5, 2.0], [2.0, 0.5], [1.0, 1.5], [1.5, 1.0]], dtype=torch.float64)
CENTRES = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [2.0, -2.0]], dtype=torch.float64)
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)  # of the sum of all F_i
STEPS = (2, 3, 10, 5)  # of clients that take different numbers of steps


def on_quadratics(
    algorithm: Any,
    lr: float,
    rounds: int,
    *,
    start: float = 0.0,
    steps: Sequence[int] = STEPS,
    cohort_size: int = 4,
    weights: Sequence[float] = (1, 1, 1, 1),
) -> tuple[Tensor, Any]:
    """Return the server's model after some rounds with cohorts drawn at random, and what the clients keep."""
    layers, draw = lamina.Layers({"x": (2,)}), np.random.default_rng(0)
    server = algorithm.init(torch.full((2,), start, dtype=torch.float64), layers)
    clients = [algorithm.client_init(server.x, layers)] * len(steps)
    for r in range(1, rounds + 1):
        cohort = sorted(draw.choice(len(steps), size=cohort_size, replace=False))
        mean_steps = sum(steps[i] for i in cohort) / cohort_size
        info = ServerInfo(r, lr, layers, participation=cohort_size / len(steps), mean_steps=mean_steps)
        down, ups = algorithm.broadcast(server, info), []
        for i in cohort:
            client_info = ClientInfo(r, lr, layers, float(steps[i]))
            local = algorithm.begin(down, clients[i], client_info)
            for _ in range(steps[i]):
                local = algorithm.step(local, down, CURVATURES[i] * (local.y - CENTRES[i]), lr, layers)
            up, clients[i] = algorithm.finish(local, down, clients[i], client_info)
            ups.append(up)
        server = algorithm.update(server, mean_of(ups, [weights[i] for i in cohort]), info)
    return server.x, clients


def fixed_point(algorithm: Any, lr: float) -> Tensor:
    """Return the limit of a method without states: a round maps every coordinate by x -> b + a x."""
    b, total = (on_quadratics(algorithm, lr, 1, start=start)[0] for start in (0.0, 1.0))
    return b / (1 - (total - b))
