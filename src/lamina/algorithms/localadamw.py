"""Local AdamW: clients run AdamW from zero moments in every round, and the server averages.

The baseline of FedAdamW's and FedMuon's papers (Liu et al. 2025); the step is that of Loshchilov & Hutter 2019.
fedadamw.py and diloco.py build on this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Displacement, Model, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import (
    add_decay,
    corrected,
    descend,
    ema,
    is_exactly,
    next_weight,
    precondition,
    refuse_dead_momentum,
)  # fmt: skip
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Local(NamedTuple):
    """The local model, AdamW's moments, and the weight of gradients in them: 1 - beta^k after k steps from zero."""

    y: Tensor
    m: Tensor
    v: Tensor
    m_weight: Tensor
    v_weight: Tensor


@algorithm(
    "localadamw",
    title="Local AdamW",
    reference="Loshchilov & Hutter 2019, locally",
    link="https://arxiv.org/abs/1711.05101",
    lr=3e-4,
)
class LocalAdamW(Algorithm):
    """Local AdamW and averaging."""

    beta1: Number = option(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = option(0.999, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    eps: Number = option(1e-8, "epsilon, added to the root of v", low=0.0)
    decay: Number = option(1e-2, "lambda, decoupled weight decay", low=0.0)
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)

    def check(self) -> None:
        """Refuse decay rates with which the correction divides by 0."""
        super().check()
        refuse_dead_momentum(self)
        if is_exactly(self.beta2, 1):
            raise BadInput("beta2 = 1 never lets a gradient into the second moment: choose beta2 < 1")

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Local:
        x = down.x
        return Local(x, m=zeros(x), v=zeros(x), m_weight=per_client(x), v_weight=per_client(x))

    def next_moments(self, local: Local, grad: Tensor) -> tuple[Local, Tensor]:
        """Return the local state with the moments after a gradient, and AdamW's direction without the decay."""
        m, v = ema(local.m, grad, self.beta1), ema(local.v, grad * grad, self.beta2)
        m_weight, v_weight = next_weight(local.m_weight, self.beta1), next_weight(local.v_weight, self.beta2)
        psi = precondition(corrected(m, m_weight), corrected(v, v_weight), self.eps)
        return Local(local.y, m, v, m_weight, v_weight), psi

    def step(self, local: Local, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)
        return after._replace(y=descend(local.y, add_decay(psi, local.y, self.decay), lr))

    def update(self, server: Any, up: Displacement, info: ServerInfo) -> Any:
        return Model(server.x + self.server_lr * up.delta)
