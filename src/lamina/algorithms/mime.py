"""Mime as in the Fed-LAMB paper: local steps divided by a server-side second moment of full-data gradients.

Karimi, Li & Li, Algorithm 1 ("l." below), red boxes, without the layer-wise step (A13). The original Mime and
MimeLite (Karimireddy et al. 2020, "Mime: mimicking centralized stochastic algorithms in federated learning",
Algorithm 1), where the momentum is the server's too, are the presets "mime" and "mimelite" (A14).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms import moments
from lamina.algorithms.contract import Algorithm, Info, Needs, Number, algorithm, hyper, zeros
from lamina.algorithms.moments import Client, Local, MomentOptions
from lamina.algorithms.primitives import add_l2, descend, ema
from lamina.errors import BadInput
from lamina.layers import Layers


class Server(NamedTuple):
    """The model, the second moment with its running maximum, and a momentum if the options share one."""

    x: Tensor
    v: Tensor
    v_hat: Tensor
    m: Tensor | None
    m_share: Tensor | None  # of gradients in m, with bias correction (A6)


class Down(NamedTuple):
    """The model, the second moment; a shared momentum; the mean full gradient for control variates."""

    x: Tensor
    v_hat: Tensor
    m: Tensor | None
    m_share: Tensor | None
    mean_gradient: Tensor | None


class Up(NamedTuple):
    """The displacement; the full-data gradient in rounds that synchronise; m_K with ``momentum="average"``."""

    delta: Tensor
    gradient: Tensor | None
    m: Tensor | None
    m_share: Tensor | None


@dataclass(frozen=True, eq=False)
class MimeOptions(MomentOptions):
    """Options of Mime and Mime-LAMB."""

    momentum: Literal["carry", "restart", "average", "server"] = hyper(
        "carry", "m: the client's own over rounds, fresh, the mean of all (A5), or the server's, frozen (A14)"
    )
    control_variate: bool = hyper(False, "step along g(y) - g(x) + mean gradient, as the original Mime does (A14)")
    amsgrad: bool = hyper(True, "divide by the running maximum of v")

    def check(self) -> None:
        """Refuse combinations with no meaning."""
        moments.refuse_zero_divisor(self)
        if self.bias_correction and self.momentum == "server":
            raise BadInput("bias_correction counts a client's own steps; with momentum = 'server' there are none")
        if self.control_variate and self.sync_every > 1:
            raise BadInput("control_variate needs the full gradient in every round: set sync_every = 1")


PRESETS: dict[str, dict[str, Any]] = {
    "mime": {"momentum": "server", "control_variate": True, "amsgrad": False},
    "mimelite": {"momentum": "server", "control_variate": False, "amsgrad": False},
    "authors": {"m_init": 1e-8, "v_init": 1e-8, "eps": 1e-8},  # the Fed-LAMB authors' code, where it differs
}


def init(h: MimeOptions, x: Tensor) -> Server:
    """The server before round 1 (l.2; v_0 = v_init, A13)."""
    v = zeros(x) + h.v_init
    if h.momentum not in ("average", "server"):
        return Server(x, v, v_hat=v, m=None, m_share=None)
    return Server(x, v, v_hat=v, m=zeros(x) + h.m_init, m_share=moments.no_share(h, x))


def gradient(h: MimeOptions, grad: Tensor, down: Down) -> Tensor:
    """The mini-batch gradient, variance-reduced if asked for (A14)."""
    return grad if down.mean_gradient is None else grad + down.mean_gradient  # engine: grad = g(y) - g(x)


def update(h: MimeOptions, server: Server, up: Up) -> Server:
    """The server's step (l.19, l.21-23)."""
    x = server.x + h.server_lr * up.delta  # l.19
    v, v_hat, m = server.v, server.v_hat, server.m if h.momentum == "server" else up.m
    if up.gradient is not None:
        v = ema(v, up.gradient**2, h.beta2)  # l.22
        v_hat = torch.maximum(v_hat, v) if h.amsgrad else v  # l.23
        m = ema(server.m, up.gradient, h.beta1) if server.m is not None and h.momentum == "server" else m  # A14
    return Server(x, v, v_hat, m, up.m_share)


@algorithm(
    "mime",
    title="Mime (in the Fed-LAMB paper's sense)",
    reference="Karimi, Li & Li, Alg. 1; Karimireddy et al. 2020",
    lr=1e-3,
    paper_cost=2,
    presets=PRESETS,
)
class Mime(MimeOptions, Algorithm):
    """Local momentum steps divided by a second moment of the mean full-data gradient."""

    decay: Number = hyper(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def init(self, x: Tensor) -> Server:
        return init(self, x)

    def client_init(self, x: Tensor) -> Client:
        return moments.client_init(self, x)

    def broadcast(self, server: Server, info: Info) -> Down:
        mean_gradient = info.full_gradient if self.control_variate else None
        return Down(server.x, server.v_hat, server.m, server.m_share, mean_gradient)

    def begin(self, down: Down, client: Client, info: Info) -> Local:
        return moments.begin(self, down.x, client, down.m, down.m_share)  # l.6

    def step(self, local: Local, down: Down, grad: Tensor, lr: Number, layers: Layers) -> Local:
        moved = moments.advance(self, local, add_l2(gradient(self, grad, down), local.y, self))  # l.10
        psi = moments.psi(self, moved, down.v_hat)  # l.12
        kept = local if self.momentum == "server" else moved  # A14: the server's momentum stays as it is
        return kept._replace(y=descend(local.y, psi, lr, self))

    def finish(self, local: Local, down: Down, client: Client, info: Info) -> tuple[Up, Client]:
        m, m_share = (local.m, local.m_share) if self.momentum == "average" else (None, None)
        return Up(local.y - down.x, info.full_gradient, m, m_share), moments.keep(self, local, info)  # l.15, l.17

    def update(self, server: Server, up: Up, info: Info) -> Server:
        return update(self, server, up)

    def needs(self, round: int) -> Needs:
        return Needs(moments.is_sync(self, round), self.control_variate)

    def down_versions(self, round: int) -> Mapping[str, int]:
        return moments.versions(self, round, *(("v_hat", "m") if self.momentum == "server" else ("v_hat",)))
