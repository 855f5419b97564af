"""FedExP: FedAvg whose server steps further than the mean, the more the clients' displacements differ.

Jhunjhunwala, Wang & Joshi 2023, "FedExP: speeding up federated averaging via extrapolation". Its full text was not at
hand: this follows the authors' code and our memory of the paper. "C27" is an entry in the list of choices:
docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, LocalModel, Model, Number, ServerInfo
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, which is broadcast, and that of the round before."""

    x: Tensor
    previous: Tensor


class Up(NamedTuple):
    """The displacement and its squared norm: one number per layer, because private layers do not count."""

    delta: Tensor
    squared_norm: Tensor


@algorithm(
    "fedexp",
    title="FedExP",
    reference="Jhunjhunwala et al. 2023",
    link="https://arxiv.org/abs/2301.09604",
    lr=0.01,
    paper_cost=1,
    # The code's epsilon in a round with its 5 clients: 5 * 1e-3 * 0.998^(2r).
    presets={"authors": {"eps": 5e-3, "eps_decay": 0.998**2, "decay": 1e-4}},
)
class FedExp(Algorithm):
    """Local SGD; x <- x + eta_g D, eta_g = max(1, mean ||delta_i||^2 / (2 (||D||^2 + epsilon)))."""

    non_negative = ("squared_norm",)
    exact_messages = True  # eta_g compares the norms of the clients' displacements with that of their mean

    eps: Number = option(1e-3, "epsilon, added to the squared norm of the mean displacement (C27)", low=0.0)
    eps_decay: Number = option(1.0, "factor of epsilon in every round (C27)", low=0.0, high=1.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, previous=x.clone())

    def broadcast(self, server: Server, info: ServerInfo) -> Model:
        return Model(server.x)

    def step(self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        return LocalModel(descend(local.y, add_decay(grad, local.y, self.decay), lr))

    def finish(self, local: LocalModel, down: Model, client: Any, info: ClientInfo) -> tuple[Up, Any]:
        delta = local.y - down.x
        return Up(delta, info.layers.norms(delta) ** 2), client

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        eps = self.eps * self.eps_decay**info.round
        mean_of_squares = up.squared_norm.sum(-1, keepdim=True)  # mean ||delta_i||^2
        square_of_mean = (up.delta**2).sum(-1, keepdim=True)  # ||D||^2
        eta = (mean_of_squares / (2 * (square_of_mean + eps))).nan_to_num(1.0).clamp(min=1)  # 1 where nobody moved
        return Server(server.x + eta * up.delta, previous=server.x)

    def trained_model(self, server: Server) -> Tensor:
        return (server.x + server.previous) / 2  # C29
