"""Scaffnew: SCAFFOLD's correction at the cost of FedAvg. Clients learn it from how the next broadcast differs from y_K.

Mishchenko, Malinovsky, Stich & Richtárik 2022, "ProxSkip: yes! Local gradient steps provably lead to communication
acceleration! Finally!". Its full text was not at hand: this follows public code and our memory of the paper. Its coin,
which says whether a step is followed by the mean, is the run's number of local steps here. The paper moves h_i as soon
as the mean is known. A client learns the mean with the next broadcast, so it keeps y_K until then. "C61" is an entry in
the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Displacement, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend, is_exactly
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and p, the probability that a step was the last of the last round; both are broadcast (C62)."""

    x: Tensor
    p: Tensor


class Client(NamedTuple):
    """The client's control variate before its last round, and that round's local model and 1 / eta_l."""

    h: Tensor
    y: Tensor
    inverse_lr: Tensor  # 0 before the first round


class Local(NamedTuple):
    """The local model, and h_i, which is constant within the round."""

    y: Tensor
    h: Tensor


@algorithm(
    "scaffnew",
    title="Scaffnew",
    reference="Mishchenko et al. 2022",
    link="https://arxiv.org/abs/2202.09357",
    lr=0.1,
    paper_cost=1,
)
class Scaffnew(Algorithm):
    """SGD on F_i(y) - <h_i, y>, where h_i becomes the gradient of F_i at the optimum."""

    exact_messages = True  # the sum of all h_i stays 0 only if x is the mean of all y_K
    all_clients = True  # C63

    p: Number = option(
        0.0, "p, the probability that a local step is the last of its round; 0: 1 / mean K_i (C62)", low=0.0, high=1.0
    )
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, p=per_client(x))

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(h=zeros(x), y=zeros(x), inverse_lr=per_client(x))

    def begin(self, down: Server, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, h=client.h + down.p * client.inverse_lr * (down.x - client.y))

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_decay(grad, local.y, self.decay)
        return local._replace(y=descend(local.y, g - local.h, lr))

    def finish(self, local: Local, down: Server, client: Client, info: ClientInfo) -> tuple[Displacement, Client]:
        kept = Client(local.h, local.y, inverse_lr=per_client(local.y, 1 / info.lr))
        return Displacement(local.y - down.x), kept

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        p = 1 / info.mean_steps if is_exactly(self.p, 0) else self.p
        return Server(server.x + up.delta, p=per_client(server.x, p))  # without eta_g (C65)
