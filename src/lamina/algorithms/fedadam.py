"""FedAdam: Adam on the server, with the clients' mean displacement as its gradient. "Adp-Fed" in the Fed-LAMB paper.

Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2; Fed-LAMB paper, Algorithm 2; FedLADA paper,
Algorithm 1 (which prints the decay rates the other way round: B1).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
    zeros,
)
from lamina.algorithms.primitives import AdamOptions, add_l2, descend, server_adam
from lamina.layers import Layers

PRESETS = {
    "reddi": {"v_init": 1e-6, "tau": 1e-3, "beta1": 0.9, "beta2": 0.99},  # v_init = tau^2
    "fedlamb_paper": {"v_init": 1e-6, "tau": 0.0, "beta1": 0.9, "beta2": 0.999},  # v_0 = epsilon (A4)
    "fedlada_paper": {"v_init": 1e-2, "tau": 0.0, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3},
    "fl_simulator": {"v_init": 0.0, "tau": 1e-2, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3},  # B12
    "authors": {"v_init": 0.0, "tau": 0.0, "root_eps": 1e-8, "beta1": 0.9, "beta2": 0.999},
}


class Server(NamedTuple):
    """The model, the two moments and, with `amsgrad`, the running maximum."""

    x: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor | None


@algorithm(
    "fedadam", title="FedAdam (Adp-Fed)", reference="Reddi et al. 2021, Alg. 2", lr=0.1, paper_cost=1, presets=PRESETS
)
class FedAdam(AdamOptions, Algorithm):
    """Clients run SGD; the server runs Adam on their mean displacement."""

    decay: Number = hyper(0.0, "lambda, the clients' weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def init(self, x: Tensor) -> Server:
        v = zeros(x) + self.v_init
        return Server(x, m=zeros(x), v=v, v_hat=v if self.amsgrad else None)

    def broadcast(self, server: Server, info: Info) -> Model:
        return Model(server.x)

    def begin(self, down: Model, client: Nothing, info: Info) -> LocalModel:
        return LocalModel(down.x)

    def step(self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_l2(grad, local.y, self)
        return LocalModel(descend(local.y, g, lr, self))

    def finish(self, local: LocalModel, down: Model, client: Nothing, info: Info) -> tuple[Displacement, Nothing]:
        return Displacement(local.y - down.x), client

    def update(self, server: Server, up: Displacement, info: Info) -> Server:
        direction, m, v, v_hat = server_adam(server.m, server.v, server.v_hat, up.delta, self, info.round)
        x = server.x + self.server_lr * direction
        return Server(x, m, v, v_hat)
