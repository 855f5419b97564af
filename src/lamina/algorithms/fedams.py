"""Fed-AMS: local AMSGrad; the second moment is shared and frozen within a round.

Chen, Li & Li 2020, "Toward communication efficient adaptive gradient method", as used in the Fed-LAMB paper:
its Algorithm 1 ("l." below) without the layer-wise step. Readings of the text: A1 to A6, A16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms import moments
from lamina.algorithms.contract import Algorithm, Info, Number, algorithm, hyper, zeros
from lamina.algorithms.moments import AmsOptions, Client, Local
from lamina.algorithms.primitives import add_l2, descend
from lamina.layers import Layers


class Server(NamedTuple):
    """The model, the global second moment and, with ``momentum="average"``, the mean momentum; all are broadcast."""

    x: Tensor
    v_hat: Tensor
    m: Tensor | None
    v_share: Tensor | None  # of gradients in v_hat, with bias correction (A6)
    m_share: Tensor | None  # of gradients in m


class Up(NamedTuple):
    """The displacement; v_K in rounds that synchronise; m_K with ``momentum="average"``."""

    delta: Tensor
    v: Tensor | None
    m: Tensor | None
    v_share: Tensor | None  # of gradients in v, with bias correction (A6)
    m_share: Tensor | None  # of gradients in m


@algorithm(
    "fedams",
    title="Fed-AMS",
    reference="Chen, Li & Li 2020",
    lr=1e-3,
    paper_cost=2,
    presets={"authors": {"m_init": 1e-8, "v_init": 1e-8, "eps": 1e-8, "first_round": "running", "v_seed": "client"}},
)
class FedAms(AmsOptions, Algorithm):
    """Local AMSGrad with a shared second moment."""

    decay: Number = hyper(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def init(self, x: Tensor) -> Server:
        v_hat, share = zeros(x) + self.v_init, moments.no_share(self, x)  # l.2
        if self.momentum == "average":
            return Server(x, v_hat, m=zeros(x) + self.m_init, v_share=share, m_share=share)
        return Server(x, v_hat, m=None, v_share=share, m_share=None)

    def client_init(self, x: Tensor) -> Client:
        return moments.client_init(self, x)

    def broadcast(self, server: Server, info: Info) -> Server:
        return server

    def begin(self, down: Server, client: Client, info: Info) -> Local:
        local = moments.begin(self, down.x, client, down.m, down.m_share)  # l.6
        return moments.begin_v(self, local, down.v_hat, down.v_share, client, info)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        local = moments.advance(self, local, add_l2(grad, local.y, self))  # l.10-11
        psi = moments.psi(self, local, down.v_hat, down.v_share)  # l.12
        return local._replace(y=descend(local.y, psi, lr, self))

    def finish(self, local: Local, down: Server, client: Client, info: Info) -> tuple[Up, Client]:
        v, v_share = moments.to_send(self, local, info)  # l.16, A2, A16
        m, m_share = (local.m, local.m_share) if self.momentum == "average" else (None, None)
        return Up(local.y - down.x, v, m, v_share, m_share), moments.keep(self, local, info)  # l.15

    def update(self, server: Server, up: Up, info: Info) -> Server:
        x = server.x + self.server_lr * up.delta  # l.19
        v_hat, v_share = server.v_hat, server.v_share
        if up.v is not None:
            v_hat = torch.maximum(v_hat, up.v)  # l.20
            v_share = moments.larger(v_share, up.v_share)  # A6
        return Server(x, v_hat, up.m, v_share, up.m_share)

    def inherited_moments(self, down: Server, info: Info) -> Mapping[str, Tensor]:
        return moments.inherited(self, down.v_hat, info)

    def down_versions(self, round: int) -> Mapping[str, int]:
        return moments.versions(self, round, "v_hat", *(("v_share",) if self.bias_correction else ()))
