"""Mime as in the Fed-LAMB paper: local steps divided by a second moment that the server estimates from full gradients.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", https://arxiv.org/abs/2110.00532,
Algorithm 1, red boxes, without the layer-wise step, which mimelamb.py takes from fedlamb.py.

"l.10" is a line of Algorithm 1; x is its theta-bar, y its theta_{r,i}. Lines 3 to 5, 7 to 9, 14, 18 and 24 are the
engine's: it draws clients and batches and computes the gradients; line 11 has no effect on the red boxes. "A13" is an
entry in the list of choices where the text is ambiguous: docs/reference/algorithms.md. contract.py explains functions
without a docstring; algorithm1.py has the options.

The original Mime and MimeLite (Karimireddy et al. 2020, "Mime: mimicking centralized stochastic algorithms in
federated learning", https://arxiv.org/abs/2008.03606; its full text was not at hand) are the presets "mime" and
"mimelite" (A14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.algorithm1 import Algorithm1
from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm
from lamina.algorithms.fedams import FedAms
from lamina.algorithms.primitives import add_decoupled, add_l2, descend, ema, precondition, square_less_noise
from lamina.algorithms.readings import MIME_AUTHORS, MimeReadings
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the second moment and its running maximum."""

    x: Tensor
    v: Tensor
    v_hat: Tensor
    m: Tensor | None = None  # fields that are None by default are for other readings (readings.py)


class Down(NamedTuple):
    """The model and the running maximum of the second moment."""

    x: Tensor
    v_hat: Tensor
    m: Tensor | None = None
    mean_gradient: Tensor | None = None


class Client(NamedTuple):
    """What a client keeps between rounds: its momentum."""

    m: Tensor


class Local(NamedTuple):
    """The local model and momentum."""

    y: Tensor
    m: Tensor
    ratio: Tensor | None = None  # Mime-LAMB: the trust ratio of every layer in the last step


class Up(NamedTuple):
    """The displacement and, in rounds that synchronise, the full gradient."""

    delta: Tensor
    gradient: Tensor | None
    m: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DefaultReading(Algorithm1):
    """Algorithm 1, red boxes, as lamina reads it by default: this is what runs unless an option asks for more."""

    squares = "gradient"

    def needs(self, round: int) -> Needs:
        return Needs(full_gradient=self.is_sync(round))  # l.17; with sync_every = Z in every Z-th round (A16)

    def init(self, x: Tensor, layers: Layers) -> Server:
        v = zeros(x) + self.v_init  # l.2; v starts where v_hat does (A13)
        return Server(x, v, v_hat=v)

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(m=zeros(x))  # l.2

    def broadcast(self, server: Server, info: ServerInfo) -> Down:
        return Down(server.x, server.v_hat)

    def begin(self, down: Down, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, m=client.m)  # l.6; m is that of the client's last round (A5)

    def step(self, local: Local, down: Down, grad: Tensor, lr: Number, layers: Layers) -> Local:
        y, g = local.y, add_l2(grad, local.y, self)  # adds lambda * y, if decay_form is "l2"
        m = ema(local.m, g, self.beta1)  # l.10
        psi = precondition(m, down.v_hat, self.eps)  # l.12: m / (sqrt(v_hat) + eps); eps is 0 by default (A4)
        direction, ratio = self.rescale(psi, y, layers)  # l.13: psi as it is; the `rescale` of fedlamb.py is eq. 3
        direction = add_decoupled(direction, y, self)  # adds lambda * y, if decay_form is "decoupled"
        return Local(descend(y, direction, lr), m, ratio)  # l.13

    def finish(self, local: Local, down: Down, client: Client, info: ClientInfo) -> tuple[Up, Client]:
        return Up(local.y - down.x, info.full_gradient), Client(local.m)  # l.15; l.17: the gradient of f_i at down.x

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        # `up` is the mean over the round's clients, so up.gradient is that of l.21
        x = server.x + self.server_lr * up.delta  # l.19; server_lr is 1 by default
        if up.gradient is None:  # no synchronisation in this round (A16)
            return server._replace(x=x)
        v = ema(server.v, square_less_noise(up.gradient, info.noise_variance), self.beta2)  # l.22: up.gradient^2
        return Server(x, v, v_hat=torch.maximum(server.v_hat, v))  # l.23


@algorithm(
    "mime",
    title="Mime (in the Fed-LAMB paper's sense)",
    reference="Karimi, Li & Li, Alg. 1; Karimireddy et al. 2020",
    link="https://arxiv.org/abs/2008.03606",
    lr=1e-3,
    paper_cost=2,
    presets={
        "mime": {"momentum": "server", "control_variate": True, "amsgrad": False},
        "mimelite": {"momentum": "server", "control_variate": False, "amsgrad": False},
        "authors": MIME_AUTHORS,
    },
    grids=FedAms.card.grids,
)
class Mime(MimeReadings, DefaultReading):
    """Momentum steps divided by a moment of the mean full gradient; by default the other readings change nothing."""
