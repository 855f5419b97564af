"""FedDyn: clients train on a regularised objective whose linear term remembers their earlier displacements.

Acar et al. 2021, "Federated learning based on dynamic regularization". Its full text was not at hand: this follows the
authors' code and our memory of the paper, with q_i = -h_i / alpha and q = -h / alpha, so that nothing is divided by
alpha: q_i is the sum of the client's displacements, and q the mean of all N clients' q_i. (A run that weights clients
by their examples also weights them in q, which is the weighted mean of all q_i only if all clients take part.) "C20"
is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    Analysis,
    ClientInfo,
    Displacement,
    Model,
    Number,
    ServerInfo,
    zeros,
)  # fmt: skip
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and q, of which only the model is broadcast."""

    x: Tensor
    q: Tensor


class Client(NamedTuple):
    """The sum of the client's displacements."""

    q: Tensor


class Local(NamedTuple):
    """The local model, and q_i of the rounds before."""

    y: Tensor
    q: Tensor


@algorithm(
    "feddyn",
    title="FedDyn",
    reference="Acar et al. 2021",
    link="https://arxiv.org/abs/2111.04263",
    lr=0.1,
    paper_cost=1,
    presets={"fl_simulator": {"alpha": 0.1, "decay": 1e-3}, "authors": {"decay": 1e-3, "evaluate": "clients"}},
)
class FedDyn(Algorithm):
    """SGD on F_i(y) - <h_i, y> + alpha/2 ||y - x||^2."""

    all_clients = "examples"  # C20

    alpha: Number = option(0.01, "alpha, weight of the regulariser (C20)", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)
    evaluate: Literal["server", "clients"] = option(
        "server", "the model that is evaluated and saved: the server's x, or the mean of the round's local models (C21)"
    )

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, q=zeros(x))

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(q=zeros(x))

    def broadcast(self, server: Server, info: ServerInfo) -> Any:
        return Model(server.x)

    def begin(self, down: Any, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, client.q)

    def step(self, local: Local, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_decay(grad, local.y, self.decay) + self.alpha * (local.y - down.x + local.q)
        return local._replace(y=descend(local.y, g, lr))

    def finish(self, local: Local, down: Any, client: Client, info: ClientInfo) -> tuple[Displacement, Client]:
        delta = local.y - down.x
        return Displacement(delta), Client(client.q + delta)

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        q = server.q + info.participation * up.delta  # over all N clients: those that are absent keep their q_i
        return Server(server.x + up.delta + q, q)

    def trained_model(self, server: Server) -> Tensor:
        return server.x if self.evaluate == "server" else server.x - server.q  # C21: x + mean delta of the round

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x)
