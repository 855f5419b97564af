"""FedLADA-LAMB: FedLADA whose local adaptive step is normalised layer by layer. In no paper yet.

FedLADA (Sun et al. 2023, Algorithm 3, "l." below) mixes a local adaptive direction with the mean step g_a of the last
round. Here the local direction is Fed-LAMB's: every layer rescaled to length phi(||y||). It is rescaled *before* the
mix, so that both parts have the same unit (a step at learning rate 1) and FedLADA's identity
g_a+ = alpha * mean(local direction) + (1 - alpha) * g_a holds unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Info, Nothing, Number, algorithm, hyper, zeros
from lamina.algorithms.fedlada import Local, Server, Up
from lamina.algorithms.primitives import (
    LayerwiseOptions,
    add_l2,
    add_ratio_decay,
    amsgrad,
    begin_ratio,
    descend,
    keep_ratio,
    layerwise,
    precondition,
    refuse_still_momentum,
    refuse_zero_moment,
)
from lamina.layers import Layers


@algorithm(
    "fedlada_lamb", title="FedLADA-LAMB", reference="lamina: Sun et al. 2023 with Karimi, Li & Li, eq. 3", lr=0.01
)
class FedLadaLamb(LayerwiseOptions, Algorithm):
    """FedLADA with the layer-wise step of Fed-LAMB."""

    alpha: Number = hyper(
        0.1, "alpha, weight of the local step; 1 leaves the amendment out", low=0.0, high=1.0, open_low=True
    )
    beta1: Number = hyper(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = hyper(0.99, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = hyper(1e-16, "v^0 = epsilon_v^2, the second moment before round 1 (B4)", low=0.0)
    v_seed: Literal["server", "zero"] = hyper("server", "v_{i,0}: the server's v, or 0 (B3)")
    server_lr: Number = hyper(1.0, "eta_g, the server's step size", low=0.0, open_low=True)

    def check(self) -> None:
        """Refuse moments that never change."""
        refuse_still_momentum(self.beta1)
        refuse_zero_moment(self.beta2, self.v_init)

    def init(self, x: Tensor) -> Server:
        return Server(x, v=zeros(x) + self.v_init, g_a=zeros(x))

    def broadcast(self, server: Server, info: Info) -> Server:
        return server

    def begin(self, down: Server, client: Nothing, info: Info) -> Local:
        v = down.v if self.v_seed == "server" else zeros(down.v)  # B3
        return Local(down.x, m=zeros(down.x), v=v, v_hat=down.v, ratio=begin_ratio(down.x, self, info))  # l.5

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_l2(grad, local.y, self)
        m, v, v_hat = amsgrad(local.m, local.v, local.v_hat, g, self.beta1, self.beta2)  # l.8-10
        u = add_ratio_decay(precondition(m, v_hat), local.y, self, layers)
        own, ratio = layerwise(local.y, u, self, layers)  # eq. 3 of Fed-LAMB
        direction = self.alpha * own + (1 - self.alpha) * down.g_a  # l.12
        return Local(descend(local.y, direction, lr, self), m, v, v_hat, keep_ratio(local.ratio, ratio))

    def finish(self, local: Local, down: Server, client: Nothing, info: Info) -> tuple[Up, Nothing]:
        return Up(local.y - down.x, local.v_hat, mean_step=None), client  # l.14

    def update(self, server: Server, up: Up, info: Info) -> Server:
        x = server.x + self.server_lr * up.delta  # l.17
        return Server(x, v=up.v_hat, g_a=-up.delta / (info.lr * info.steps))  # l.16, l.18

    def inherited_moments(self, down: Server, info: Info) -> Mapping[str, Tensor]:
        return {"v_hat": down.v}  # the running maximum starts from it

    def inherited_step(self, down: Server, info: Info) -> Tensor | None:
        return -info.lr * info.steps * (1 - self.alpha) * down.g_a
