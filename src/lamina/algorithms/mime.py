"""Mime as in the Fed-LAMB paper: local steps divided by a second moment that the server estimates from full gradients.

Karimi, Li & Li, Algorithm 1 ("l." below), red boxes, without the layer-wise step (A13). The original Mime and
MimeLite (Karimireddy et al. 2020, "Mime: mimicking centralized stochastic algorithms in federated learning",
Algorithm 1), whose momentum is the server's, too, are the presets "mime" and "mimelite" (A14).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo, algorithm, hyper, zeros
from lamina.algorithms.fedams import Client, FedAms, LocalMomentum
from lamina.algorithms.primitives import add_decoupled, add_l2, corrected, descend, ema, next_share, precondition
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the second moment and its running maximum, and a momentum if the options share one."""

    x: Tensor
    v: Tensor
    v_hat: Tensor
    m: Tensor | None
    m_share: Tensor | None  # the share of gradients in m, with bias correction (A6)


class Down(NamedTuple):
    """The model and the second moment; a shared momentum; the mean full gradient for control variates."""

    x: Tensor
    v_hat: Tensor
    m: Tensor | None
    m_share: Tensor | None
    mean_gradient: Tensor | None


class Local(NamedTuple):
    """The local model and momentum."""

    y: Tensor
    m: Tensor
    m_share: Tensor | None
    ratio: Tensor | None = None  # Mime-LAMB: the trust ratio of every layer in the last step


class Up(NamedTuple):
    """The displacement; the full gradient in rounds that synchronise; m_K with ``momentum="average"``."""

    delta: Tensor
    gradient: Tensor | None
    m: Tensor | None
    m_share: Tensor | None


@algorithm(
    "mime",
    title="Mime (in the Fed-LAMB paper's sense)",
    reference="Karimi, Li & Li, Alg. 1; Karimireddy et al. 2020",
    lr=1e-3,
    paper_cost=2,
    presets={
        "mime": {"momentum": "server", "control_variate": True, "amsgrad": False},
        "mimelite": {"momentum": "server", "control_variate": False, "amsgrad": False},
        # What the Fed-LAMB authors' public research code does where it differs from the text.
        "authors": {"m_init": 1e-8, "v_init": 1e-8, "eps": 1e-8},
    },
    grids=FedAms.card.grids,
)
class Mime(LocalMomentum):
    """Local momentum steps divided by a second moment of the mean full gradient."""

    momentum: Literal["carry", "restart", "average", "server"] = hyper(
        "carry", "m: the client's own over rounds, fresh, the mean of all (A5), or the server's, frozen (A14)"
    )
    control_variate: bool = hyper(False, "step along g(y) - g(x) + mean gradient, as the original Mime does (A14)")
    amsgrad: bool = hyper(True, "divide by the running maximum of v")
    decay: Number = hyper(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def check(self) -> None:
        """Refuse combinations without a meaning."""
        self.refuse_zero_divisor()
        if self.bias_correction and self.momentum == "server":
            raise BadInput("bias_correction counts a client's own steps; with momentum = 'server' there are none")
        if self.control_variate and self.sync_every > 1:
            raise BadInput("control_variate needs the full gradient in every round: set sync_every = 1")

    def needs(self, round: int) -> Needs:
        return Needs(self.is_sync(round), self.control_variate)

    def init(self, x: Tensor, layers: Layers) -> Server:
        v = zeros(x) + self.v_init  # l.2, A13
        if self.momentum not in ("average", "server"):
            return Server(x, v, v_hat=v, m=None, m_share=None)
        return Server(x, v, v_hat=v, m=zeros(x) + self.m_init, m_share=self.new_share(x))

    def broadcast(self, server: Server, info: ServerInfo) -> Down:
        mean_gradient = info.mean_gradient if self.control_variate else None
        return Down(server.x, server.v_hat, server.m, server.m_share, mean_gradient)

    def begin(self, down: Down, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, *self.first_momentum(down, client))  # l.6

    def step(self, local: Local, down: Down, grad: Tensor, lr: Number, layers: Layers) -> Local:
        grad = grad if down.mean_gradient is None else grad + down.mean_gradient  # A14: the engine's is g(y) - g(x)
        m = ema(local.m, add_l2(grad, local.y, self), self.beta1)  # l.10
        m_share = next_share(local.m_share, self.beta1)
        psi = precondition(corrected(m, m_share), down.v_hat, self.eps)  # l.12
        direction, ratio = self.rescale(psi, local.y, layers)  # Mime-LAMB: eq. 3
        y = descend(local.y, add_decoupled(direction, local.y, self), lr)  # l.13
        if self.momentum == "server":  # A14: the server's momentum is frozen within the round
            return local._replace(y=y, ratio=ratio)
        return local._replace(y=y, m=m, m_share=m_share, ratio=ratio)

    def finish(self, local: Local, down: Down, client: Client, info: ClientInfo) -> tuple[Up, Client]:
        up = Up(local.y - down.x, info.full_gradient, *self.send_momentum(local))  # l.15, l.17
        return up, self.keep(local)

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        x = server.x + self.server_lr * up.delta  # l.19
        v, v_hat, m = server.v, server.v_hat, server.m if self.momentum == "server" else up.m
        if up.gradient is not None:
            v = ema(v, up.gradient**2, self.beta2)  # l.22
            v_hat = torch.maximum(v_hat, v) if self.amsgrad else v  # l.23
            if server.m is not None and self.momentum == "server":
                m = ema(server.m, up.gradient, self.beta1)  # A14
        return Server(x, v, v_hat, m, up.m_share)

    def down_versions(self, round: int) -> Mapping[str, int]:
        cached = ["v_hat", "m"] if self.momentum == "server" else ["v_hat"]
        return dict.fromkeys(cached, self.version(round)) if self.sync_every > 1 else {}
