"""Fed-AMS: local AMSGrad; all clients divide by the server's second moment v_hat, which is frozen within a round.

Chen, Li & Li 2020, "Toward communication efficient adaptive gradient method", https://arxiv.org/abs/2109.05109, as
used in the Fed-LAMB paper: Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning",
https://arxiv.org/abs/2110.00532, Algorithm 1, blue boxes, without the layer-wise step, which fedlamb.py adds.

"l.11" is a line of Algorithm 1; x is its theta-bar, y its theta_{r,i}. Lines 3 to 5, 7 to 9, 14, 18 and 24 are the
engine's: it draws clients and batches and computes the gradients. "A1" is an entry in the list of choices where the
text is ambiguous: docs/reference/algorithms.md. contract.py explains functions without a docstring; algorithm1.py has
the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.algorithm1 import Algorithm1
from lamina.algorithms.contract import ClientInfo, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm
from lamina.algorithms.primitives import add_decoupled, add_l2, descend, ema, precondition
from lamina.algorithms.readings import FED_AUTHORS, FEDLALR, FedAmsReadings
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the second moment; both are broadcast."""

    x: Tensor
    v_hat: Tensor
    m: Tensor | None = None  # fields that are None by default are for other readings (readings.py)


class Client(NamedTuple):
    """What a client keeps between rounds: its momentum."""

    m: Tensor
    v: Tensor | None = None
    v_hat: Tensor | None = None


class Local(NamedTuple):
    """The local model and moments."""

    y: Tensor
    m: Tensor
    v: Tensor
    ratio: Tensor | None = None  # Fed-LAMB: the trust ratio of every layer in the last step
    v_hat: Tensor | None = None
    in_round_one: Tensor | None = None


class Up(NamedTuple):
    """The displacement and, in rounds that synchronise, the second moment."""

    delta: Tensor
    v: Tensor | None
    m: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DefaultReading(Algorithm1):
    """Algorithm 1, blue boxes, as lamina reads it by default: this is what runs unless an option asks for more."""

    non_negative = ("v",)
    references: ClassVar = {"v": "v_hat"}

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v_hat=zeros(x) + self.v_init)  # l.2

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(m=zeros(x))  # l.2

    def begin(self, down: Server, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, m=client.m, v=down.v_hat)  # l.6; m is that of the client's last round (A5)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        y, g = local.y, add_l2(grad, local.y, self)  # adds lambda * y, if decay_form is "l2"
        m = ema(local.m, g, self.beta1)  # l.10
        v = ema(local.v, g * g, self.beta2)  # l.11, with v of the step before (A1)
        after = local._replace(m=m, v=v)
        psi = precondition(
            m, self.divisor(after, down), self.eps
        )  # l.12: m / (sqrt(v_hat) + eps); eps is 0 by default (A4)
        direction, ratio = self.rescale(psi, y, layers)  # l.13: psi as it is; the `rescale` of fedlamb.py is eq. 3
        direction = add_decoupled(direction, y, self)  # adds lambda * y, if decay_form is "decoupled"
        return after._replace(y=descend(y, direction, lr), ratio=ratio)  # l.13

    def divisor(self, local: Local, down: Server) -> Tensor:
        """Return the second moment to divide by: the one of the last round, frozen within this one (A2)."""
        return down.v_hat

    def finish(self, local: Local, down: Server, client: Client, info: ClientInfo) -> tuple[Up, Client]:
        v = local.v if self.is_sync(info.round) else None  # l.16; with sync_every = Z in every Z-th round (A16)
        return Up(local.y - down.x, v), Client(local.m)  # l.15, as a displacement

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        # `up` is the mean over the round's clients, uniform unless the run weights them by their examples
        x = server.x + self.server_lr * up.delta  # l.19; server_lr is 1 by default
        v_hat = server.v_hat if up.v is None else torch.maximum(server.v_hat, up.v)  # l.20
        return Server(x, v_hat)


@algorithm(
    "fedams",
    title="Fed-AMS",
    reference="Chen, Li & Li 2020",
    link="https://arxiv.org/abs/2109.05109",
    lr=1e-3,
    paper_cost=2,
    presets={"authors": FED_AUTHORS, "fedlalr": FEDLALR},
    grids={"lamb-paper": {"lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1]}},
)
class FedAms(FedAmsReadings, DefaultReading):
    """Local AMSGrad with a shared second moment; by default the other readings change nothing."""
