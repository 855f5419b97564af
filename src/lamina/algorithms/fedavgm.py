"""FedAvgM: FedAvg with heavy-ball momentum on the server.

Hsu, Qi & Brown 2019, "Measuring the effects of non-identical data distribution for federated visual classification".
Its full text was not at hand: this follows public code, in which four implementations agree. "C24" is an entry in the
list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, Displacement, Model, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedavg import FedAvg
from lamina.algorithms.primitives import is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the sum of all displacements, each weighted by a power of mu."""

    x: Tensor
    b: Tensor


@algorithm(
    "fedavgm",
    title="FedAvgM",
    reference="Hsu, Qi & Brown 2019",
    link="https://arxiv.org/abs/1909.06335",
    lr=0.1,
    paper_cost=1,
    presets={"flower": {"mu": 0.0}},  # momentum is off unless it is given
)
class FedAvgM(FedAvg):
    """b <- mu b + mean delta, x <- x + eta_g b."""

    mu: Number = option(0.9, "mu, decay rate of the server's momentum; 0 is FedAvg", low=0.0, high=1.0)
    damped: bool = option(False, "multiply the mean displacement by 1 - mu, which no public code does (C24)")

    def check(self) -> None:
        """Refuse a factor of 0 on every displacement."""
        super().check()
        if self.damped and is_exactly(self.mu, 1):
            raise BadInput("mu = 1 multiplies every displacement by 0 if damped, so nothing is learned: choose mu < 1")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, b=zeros(x))

    def broadcast(self, server: Server, info: ServerInfo) -> Any:
        return Model(server.x)

    def update(self, server: Any, up: Displacement, info: ServerInfo) -> Any:
        b = self.mu * server.b + (up.delta * (1 - self.mu) if self.damped else up.delta)
        return Server(server.x + self.server_lr * b, b)

    def analysis(self, server: Any, previous: Any) -> Analysis:
        return Analysis(server.x)
