"""FedAdam(*): FedAdam's server with FedCM's amended clients, the combination the FedLADA paper shows to fail.

Sun et al. 2023, Table 3 and Fig. 5. The amendment is the clients' mean pseudo-gradient, not Adam's displacement (B14).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    Displacement,
    Info,
    LocalModel,
    Nothing,
    Number,
    algorithm,
    hyper,
    zeros,
)
from lamina.algorithms.fedadam import PRESETS
from lamina.algorithms.primitives import AdamOptions, add_l2, descend, server_adam
from lamina.layers import Layers


class Server(NamedTuple):
    """The model, Adam's state and the mean local step of the last round."""

    x: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor | None
    momentum: Tensor


class Down(NamedTuple):
    """The model and the mean local step of the last round."""

    x: Tensor
    momentum: Tensor


@algorithm(
    "fedadam_star", title="FedAdam(*)", reference="Sun et al. 2023, Table 3", lr=0.1, paper_cost=2, presets=PRESETS
)
class FedAdamStar(AdamOptions, Algorithm):
    """Clients run FedCM; the server runs Adam on their mean displacement."""

    alpha: Number = hyper(
        0.1, "alpha, weight of the client's own gradient; 1 is FedAdam", low=0.0, high=1.0, open_low=True
    )
    decay: Number = hyper(0.0, "lambda, the clients' weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def init(self, x: Tensor) -> Server:
        v = zeros(x) + self.v_init
        return Server(x, m=zeros(x), v=v, v_hat=v if self.amsgrad else None, momentum=zeros(x))

    def broadcast(self, server: Server, info: Info) -> Down:
        return Down(server.x, server.momentum)

    def begin(self, down: Down, client: Nothing, info: Info) -> LocalModel:
        return LocalModel(down.x)

    def step(self, local: LocalModel, down: Down, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_l2(grad, local.y, self)
        mix = self.alpha * g + (1 - self.alpha) * down.momentum
        return LocalModel(descend(local.y, mix, lr, self))

    def finish(self, local: LocalModel, down: Down, client: Nothing, info: Info) -> tuple[Displacement, Nothing]:
        return Displacement(local.y - down.x), client

    def update(self, server: Server, up: Displacement, info: Info) -> Server:
        direction, m, v, v_hat = server_adam(server.m, server.v, server.v_hat, up.delta, self, info.round)
        x = server.x + self.server_lr * direction
        return Server(x, m, v, v_hat, momentum=-up.delta / (info.lr * info.steps))  # B14

    def inherited_step(self, down: Down, info: Info) -> Tensor | None:
        return -info.lr * info.steps * (1 - self.alpha) * down.momentum
