"""FedAdam: Adam on the server, with the clients' mean displacement as its gradient. "Adp-Fed" in the Fed-LAMB paper.

Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2; Fed-LAMB paper, Algorithm 2; FedLADA paper,
Algorithm 1 (which prints the decay rates the other way round: B1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, Displacement, LocalModel, Model, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import (
    add_decay,
    descend,
    ema,
    is_exactly,
    precondition,
    refuse_dead_moments,
    square_less_noise,
)
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the two moments and, with `amsgrad`, the running maximum of v."""

    x: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor | None
    momentum: Tensor | None = None  # FedAdam(*): the mean local step of the previous round


@algorithm(
    "fedadam",
    title="FedAdam (Adp-Fed)",
    reference="Reddi et al. 2021, Alg. 2",
    link="https://arxiv.org/abs/2003.00295",
    lr=0.1,
    paper_cost=1,
    presets={
        "reddi": {"v_init": 1e-6, "tau": 1e-3, "beta1": 0.9, "beta2": 0.99},  # v_init = tau^2
        "fedlamb_paper": {"v_init": 1e-6, "tau": 0.0, "beta1": 0.9, "beta2": 0.999},  # v_0 = epsilon (A4)
        "fedlada_paper": {"v_init": 1e-2, "tau": 0.0, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3},
        "fl_simulator": {  # B12
            "v_init": 0.0, "tau": 1e-2, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3
        },
        "authors": {"v_init": 0.0, "tau": 0.0, "root_eps": 1e-8, "beta1": 0.9, "beta2": 0.999},
    },
    grids={
        "lamb-paper": {
            "lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5],
            "server_lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1],
        },
    },
)  # fmt: skip
class FedAdam(Algorithm):
    """Clients run SGD; the server runs Adam on their mean displacement."""

    beta1: Number = option(0.9, "beta_1, decay rate of the server's momentum", low=0.0, high=1.0)
    beta2: Number = option(0.99, "beta_2, decay rate of the server's second moment", low=0.0, high=1.0)
    tau: Number = option(1e-3, "tau, added to the root of v", low=0.0)
    v_init: Number = option(1e-6, "v_0, the second moment before round 1", low=0.0)
    root_eps: Number = option(0.0, "added to v under the root", low=0.0)
    amsgrad: bool = option(False, "divide by the running maximum of v")
    bias_correction: bool = option(False, "divide copies of m and v by 1 - beta^r")
    server_lr: Number = option(0.01, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, the clients' weight decay", low=0.0)

    squares = "delta"

    def check(self) -> None:
        """Refuse decay rates with which nothing is learned."""
        super().check()
        if self.bias_correction and is_exactly(self.beta2, 1):
            raise BadInput("bias_correction divides by 1 - beta2^t, which is 0 for beta2 = 1: choose beta2 < 1")
        refuse_dead_moments(self, self.tau, self.root_eps)

    def init(self, x: Tensor, layers: Layers) -> Server:
        v = zeros(x) + self.v_init
        return Server(x, m=zeros(x), v=v, v_hat=v if self.amsgrad else None)

    def broadcast(self, server: Server, info: ServerInfo) -> Any:
        return Model(server.x)

    def step(self, local: LocalModel, down: Any, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_decay(grad, local.y, self.decay)
        return LocalModel(descend(local.y, g, lr))

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        m = ema(server.m, up.delta, self.beta1)
        v = ema(server.v, square_less_noise(up.delta, info.noise_variance), self.beta2)  # up.delta^2
        v_hat = None if server.v_hat is None else torch.maximum(server.v_hat, v)
        m_used, v_used = m, v if v_hat is None else v_hat
        if self.bias_correction:
            m_used, v_used = m / (1 - self.beta1**info.round), v_used / (1 - self.beta2**info.round)
        x = server.x + self.server_lr * precondition(m_used, v_used + self.root_eps, self.tau)
        return server._replace(x=x, m=m, v=v, v_hat=v_hat)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, server.momentum, server.v if server.v_hat is None else server.v_hat)
