"""LocalAdam: local AMSGrad with an averaged second moment; FedLADA without its amendment.

Sun et al. 2023, Algorithm 2 and Tables 3, 5, 11, read as in B1 and B13: the second moment is synchronised
(``sync=False`` gives Algorithm 2 as printed, which sends only the model). FedLADA shares `LocalAms`, whose options B19
to B21 are choices of public FedLADA codes: docs/reference/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    Analysis,
    ClientInfo,
    Nothing,
    Number,
    ServerInfo,
    algorithm,
    hyper,
    per_client,
    zeros,
)
from lamina.algorithms.primitives import (
    add_decoupled,
    add_l2,
    corrected,
    descend,
    ema,
    next_share,
    precondition,
    refuse_dead_moments,
)
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and, if synchronised, the second moment; both are broadcast."""

    x: Tensor
    v: Tensor | None


class Local(NamedTuple):
    """The local model and AMSGrad's moments; a field that the options do not use is None."""

    y: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor  # the running maximum of v; v itself without `amsgrad`
    m_share: Tensor | None = None  # 1 - beta1^k, by which a copy of m is divided (B21)
    v_share: Tensor | None = None
    alpha: Tensor | None = None  # FedLADA: the weight of the local direction in this round (B22)
    ratio: Tensor | None = None  # layer-wise methods: the trust ratio of every layer in the last step


class Up(NamedTuple):
    """The displacement and, if synchronised, the second moment of the client's last step."""

    delta: Tensor
    v_hat: Tensor | None


@dataclass(frozen=True, eq=False)
class LocalAms(Algorithm):
    """The part that LocalAdam and FedLADA share: AMSGrad from a zero momentum, and an averaged second moment."""

    non_negative = ("v_hat",)

    beta1: Number = hyper(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = hyper(0.99, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = hyper(1e-16, "v^0 = epsilon_v^2, the second moment before round 1 (B4)", low=0.0)
    v_seed: Literal["server", "zero"] = hyper("server", "v_{i,0}: the server's v, or 0 (B3)")
    amsgrad: bool = hyper(True, "divide by the running maximum of v, or by v itself (B19)")
    eps: Number = hyper(0.0, "added to the root of v_hat (B20)", low=0.0)
    moment_correction: Literal["none", "m", "first_round"] = hyper(
        "none", "in step k divide m by 1 - beta_1^k in every round; or both moments by 1 - beta^k in round 1 (B21)"
    )
    server_lr: Number = hyper(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = hyper(1e-2, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts (B10)")

    def check(self) -> None:
        """Refuse moments that never change."""
        refuse_dead_moments(self, self.eps)

    def first_moments(self, x: Tensor, v_server: Tensor, round: int) -> Local:
        """Return the local state before the first step."""
        v = v_server if self.v_seed == "server" else zeros(x)  # B3
        local = Local(x, m=zeros(x), v=v, v_hat=v_server)
        if self.moment_correction == "m":
            return local._replace(m_share=per_client(x))
        if self.moment_correction == "first_round":
            share = per_client(x, float(round > 1))  # 1 stays 1: nothing is corrected after round 1
            return local._replace(m_share=share, v_share=share)
        return local

    def next_moments(self, local: Local, grad: Tensor) -> tuple[Local, Tensor]:
        """Return the local state with the moments after a gradient, and the adaptive direction m / sqrt(v_hat)."""
        g = add_l2(grad, local.y, self)
        m, v = ema(local.m, g, self.beta1), ema(local.v, g * g, self.beta2)  # Alg. 2, l.7-8; Alg. 3, l.8-9
        v_hat = torch.maximum(local.v_hat, v) if self.amsgrad else v  # Alg. 2, l.9; Alg. 3, l.10; B19
        m_share, v_share = next_share(local.m_share, self.beta1), next_share(local.v_share, self.beta2)  # B21
        psi = precondition(corrected(m, m_share), corrected(v_hat, v_share), self.eps)  # Alg. 3, l.11
        return local._replace(m=m, v=v, v_hat=v_hat, m_share=m_share, v_share=v_share), psi


@algorithm("localadam", title="LocalAdam", reference="Sun et al. 2023, Alg. 2", lr=1e-3, paper_cost=2)
class LocalAdam(LocalAms):
    """Local AMSGrad and averaging."""

    sync: bool = hyper(True, "average the second moment over the clients (B13)")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v=zeros(x) + self.v_init if self.sync else None)

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        v = zeros(down.x) + self.v_init if down.v is None else down.v
        return self.first_moments(down.x, v, info.round)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)
        return after._replace(y=descend(local.y, add_decoupled(psi, local.y, self), lr))  # l.10

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        return Up(local.y - down.x, local.v_hat if self.sync else None), client  # l.12, B13

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        return Server(server.x + self.server_lr * up.delta, v=up.v_hat)  # l.14-15

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, second_moment=server.v)
