"""What FedAdam, FedYogi, FedAdagrad and server-side FedAMS share: SGD on the clients, moments on the server.

Reddi et al. 2021, "Adaptive federated optimization", https://arxiv.org/abs/2003.00295: the server takes the clients'
mean displacement for its gradient. The methods differ in how the second moment grows: `next_v`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, Displacement, LocalModel, Model, Number, ServerInfo, zeros
from lamina.algorithms.declaration import option
from lamina.algorithms.primitives import add_decay, descend, ema, is_exactly, precondition, square_less_noise
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers

RateCorrection = Literal["none", "round", "next_round"]
RATE_CORRECTION = "multiply the step by sqrt(1 - beta2^t) / (1 - beta1^t): never, with t = r, or with t = r + 1 (C68)"


class Server(NamedTuple):
    """The model, the two moments and, for methods that divide by it, the running maximum of v."""

    x: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor | None = None
    momentum: Tensor | None = None  # FedAdam(*): the mean local step of the previous round


def corrected_rate(m: Tensor, options: Any, round: int) -> Tensor:
    """Return m times the factor of `rate_correction`."""
    if options.rate_correction == "none":
        return m
    t = round + 1 if options.rate_correction == "next_round" else round
    factor: Number = (1 - options.beta2**t) ** 0.5 / (1 - options.beta1**t)
    return m * factor


def refuse_zero_rate(options: Any) -> None:
    """Refuse a correction of the rate that makes every step zero."""
    if options.rate_correction != "none" and is_exactly(options.beta2, 1):
        raise BadInput("rate_correction multiplies by sqrt(1 - beta2^t), which is 0 for beta2 = 1: choose beta2 < 1")


@dataclass(frozen=True, eq=False)
class ServerMoments(Algorithm):
    """Plain SGD on the clients; x <- x + eta_g m / (sqrt(v) + tau) on the server."""

    squares = "delta"

    beta1: Number = option(0.9, "beta_1, decay rate of the server's momentum", low=0.0, high=1.0)
    tau: Number = option(1e-3, "tau, added to the root of v", low=0.0)
    v_init: Number = option(1e-6, "v_0, the second moment before round 1", low=0.0)
    server_lr: Number = option(0.01, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, the clients' weight decay", low=0.0)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, m=zeros(x), v=zeros(x) + self.v_init)

    def broadcast(self, server: Server, info: ServerInfo) -> Any:
        return Model(server.x)

    def step(self, local: LocalModel, down: Any, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_decay(grad, local.y, self.decay)
        return LocalModel(descend(local.y, g, lr))

    @abstractmethod
    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the second moment after one more squared displacement."""

    def as_used(self, m: Tensor, v: Tensor, round: int) -> tuple[Tensor, Tensor]:
        """Return the moments as the step uses them."""
        return m, v

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        m = ema(server.m, up.delta, self.beta1)
        v = self.next_v(server.v, square_less_noise(up.delta, info.noise_variance))  # up.delta^2
        v_hat = None if server.v_hat is None else torch.maximum(server.v_hat, v)
        m_used, v_used = self.as_used(m, v if v_hat is None else v_hat, info.round)
        x = server.x + self.server_lr * precondition(m_used, v_used, self.tau)
        return server._replace(x=x, m=m, v=v, v_hat=v_hat)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, server.momentum, server.v if server.v_hat is None else server.v_hat)
