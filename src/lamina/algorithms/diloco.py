"""DiLoCo: clients keep their AdamW between rounds, and the server steps with Nesterov momentum.

Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models". Its full text was not at
hand: this follows public code (OpenDiLoCo) and our memory of the paper. "C39" is an entry in the list of choices:
docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, ClientInfo, Displacement, Model, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.localadamw import Local, LocalAdamW
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the outer momentum, of which only the model is broadcast."""

    x: Tensor
    b: Tensor


class Client(NamedTuple):
    """The moments of the client's AdamW, and the weights of the gradients in them."""

    m: Tensor
    v: Tensor
    m_weight: Tensor
    v_weight: Tensor


@algorithm(
    "diloco",
    title="DiLoCo",
    reference="Douillard et al. 2023",
    link="https://arxiv.org/abs/2311.08105",
    lr=4e-4,
    paper_cost=1,
    presets={"opendiloco": {"beta1": 0.9, "beta2": 0.95, "decay": 0.1, "server_lr": 0.7, "mu": 0.9}},  # C40
)
class DiLoCo(LocalAdamW):
    """Inner AdamW, whose moments never leave the client; outer SGD with Nesterov momentum."""

    beta2: Number = option(0.95, "beta_2, decay rate of the inner second moment (C40)", low=0.0, high=1.0)
    decay: Number = option(0.1, "lambda, decoupled weight decay", low=0.0)
    server_lr: Number = option(0.7, "eta_g, the outer step size", low=0.0, open_low=True)
    mu: Number = option(0.9, "mu, decay rate of the outer momentum", low=0.0, high=1.0)
    inner_state: Literal["keep", "restart"] = option(
        "keep", "a client's moments in its next round: as they were, or zero (C39)"
    )

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, b=zeros(x))

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(m=zeros(x), v=zeros(x), m_weight=per_client(x), v_weight=per_client(x))

    def broadcast(self, server: Server, info: ServerInfo) -> Any:
        return Model(server.x)

    def begin(self, down: Any, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, *client) if self.inner_state == "keep" else super().begin(down, client, info)

    def finish(self, local: Local, down: Any, client: Client, info: ClientInfo) -> tuple[Displacement, Client]:
        return Displacement(local.y - down.x), Client(local.m, local.v, local.m_weight, local.v_weight)

    def update(self, server: Any, up: Displacement, info: ServerInfo) -> Any:
        b = self.mu * server.b + up.delta
        return Server(server.x + self.server_lr * (up.delta + self.mu * b), b)

    def analysis(self, server: Any, previous: Any) -> Analysis:
        return Analysis(server.x)
