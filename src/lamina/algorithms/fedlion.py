"""FedLion: clients run Lion from the server's momentum, and the server averages models and momenta.

Tang & Chang 2024, "FedLion: faster adaptive federated optimization with fewer communication". Its full text was not at
hand: this follows the authors' code (avg_lion_cifar.py) and a third-party transcription. "C36" is an entry in the list
of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, ClientInfo, Nothing, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend, ema, is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the mean momentum; both are broadcast."""

    x: Tensor
    m: Tensor


class Local(NamedTuple):
    """The local model and momentum."""

    y: Tensor
    m: Tensor


class Up(NamedTuple):
    """The displacement, a multiple of the rate in every coordinate if there is no decay (C37), and the momentum."""

    delta: Tensor
    m: Tensor


@algorithm(
    "fedlion",
    title="FedLion",
    reference="Tang & Chang 2024",
    link="https://arxiv.org/abs/2402.09941",
    lr=1e-3,
    presets={"authors": {"beta2": 0.9}},  # the value in their script (C36)
)
class FedLion(Algorithm):
    """Local steps of equal size in every coordinate, by the sign of a momentum."""

    beta1: Number = option(0.9, "beta_1, weight of the momentum in the direction", low=0.0, high=1.0)
    beta2: Number = option(0.99, "beta_2, decay rate of the momentum (C36)", low=0.0, high=1.0)
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, decoupled weight decay", low=0.0)

    def check(self) -> None:
        """Refuse a decay rate with which nothing is learned; beta1 = 1 is a sign of the momentum alone."""
        super().check()
        if is_exactly(self.beta2, 1):
            raise BadInput("beta2 = 1 never lets a gradient into the momentum, so nothing is learned: choose beta2 < 1")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, m=zeros(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        return Local(down.x, down.m)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        direction = ema(local.m, grad, self.beta1).sign()
        y = descend(local.y, add_decay(direction, local.y, self.decay), lr)
        return Local(y, m=ema(local.m, grad, self.beta2))

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        return Up(local.y - down.x, local.m), client

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        return Server(server.x + self.server_lr * up.delta, m=up.m)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, amendment=server.m)
