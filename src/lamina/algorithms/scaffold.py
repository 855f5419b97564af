"""SCAFFOLD, option II, with the scaled correction of the FedLADA paper (eq. 26).

Karimireddy et al. 2020, "SCAFFOLD: stochastic controlled averaging for federated learning". Its full text was not at
hand: this follows public code and our memory of the paper. Always c = (1/N) * sum of all N clients' c_i, and c_i is the
mean raw gradient of client i's last round. So the change of c is the uniform mean of the cohort's changes times |S|/N,
even if the model's mean is weighted by examples.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, ClientInfo, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, clip_by_norm, descend, is_exactly
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the server's control variate; both are broadcast."""

    x: Tensor
    c: Tensor


class Client(NamedTuple):
    """The client's control variate c_i, kept between rounds."""

    c: Tensor


class Local(NamedTuple):
    """The local model and the correction s (c - c_i), constant within the round."""

    y: Tensor
    correction: Tensor


class Up(NamedTuple):
    """The displacement y_K - x and the change of c_i."""

    delta: Tensor
    delta_c: Tensor


@algorithm(
    "scaffold",
    title="SCAFFOLD (option II)",
    reference="Karimireddy et al. 2020; scale: Sun et al. 2023, eq. 26",
    link="https://arxiv.org/abs/1910.06378",
    lr=0.1,
    paper_cost=2,
    presets={
        "fedlada_paper": {"decay": 1e-3},
        # The public simulator of FedLADA's first author: g + c - c_i clipped at norm 10, then the decay.
        "fl_simulator": {"decay": 1e-3, "clip_direction": 10.0},
    },
)
class Scaffold(Algorithm):
    """SGD corrected by the difference between the global and the client's mean gradient."""

    state_changes = ("delta_c",)

    scale: Number = option(1.0, "s, weight of the correction; 1 is SCAFFOLD, 0 is FedAvg", low=0.0)
    control: Literal["mean_gradient", "literal"] = option(
        "mean_gradient", "c_i under s != 1: keep it the mean raw gradient, or option II as printed (B15)"
    )
    clip_direction: Number = option(
        math.inf, "largest norm of g + s (c - c_i), in place of train.clip (B17)", low=0.0, open_low=True
    )
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)

    @property
    def clips_direction(self) -> bool:
        return not is_exactly(self.clip_direction, math.inf)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, c=zeros(x))

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(c=zeros(x))

    def begin(self, down: Server, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, self.scale * (down.c - client.c))

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        if self.clips_direction:  # B17: the decay is added after the clip
            clipped = clip_by_norm(grad + local.correction, self.clip_direction)
            return local._replace(y=descend(local.y, add_decay(clipped, local.y, self.decay), lr))
        g = add_decay(grad, local.y, self.decay)
        return local._replace(y=descend(local.y, g + local.correction, lr))  # LADA eq. 26

    def finish(self, local: Local, down: Server, client: Client, info: ClientInfo) -> tuple[Up, Client]:
        mean_step = (down.x - local.y) / (info.steps * info.lr)  # the mean of g + correction over the round
        removed = local.correction if self.control == "mean_gradient" else down.c - client.c  # B15
        c = mean_step - removed  # option II
        return Up(local.y - down.x, c - client.c), Client(c)

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        x = server.x + self.server_lr * up.delta
        c = server.c + info.participation * up.delta_c
        return Server(x, c)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, amendment=server.c)  # LADA eq. 22
