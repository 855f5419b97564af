"""FedAvg: local SGD and averaging. The Fed-LAMB paper calls it Fed-SGD.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", Algorithm 1.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    Displacement,
    Info,
    LocalModel,
    Model,
    Nothing,
    Number,
    algorithm,
    hyper,
)
from lamina.algorithms.primitives import add_l2, descend
from lamina.layers import Layers


@algorithm(
    "fedavg",
    title="FedAvg (Fed-SGD)",
    reference="McMahan et al. 2017",
    lr=0.1,
    paper_cost=1,
    presets={"fedlada_paper": {"decay": 1e-3}},
)
class FedAvg(Algorithm):
    """Clients run SGD; the server averages."""

    server_lr: Number = hyper(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = hyper(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def init(self, x: Tensor) -> Model:
        return Model(x)

    def broadcast(self, server: Model, info: Info) -> Model:
        return Model(server.x)

    def begin(self, down: Model, client: Nothing, info: Info) -> LocalModel:
        return LocalModel(down.x)

    def step(self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_l2(grad, local.y, self)
        return LocalModel(descend(local.y, g, lr, self))

    def finish(self, local: LocalModel, down: Model, client: Nothing, info: Info) -> tuple[Displacement, Nothing]:
        return Displacement(local.y - down.x), client

    def update(self, server: Model, up: Displacement, info: Info) -> Model:
        return Model(server.x + self.server_lr * up.delta)
