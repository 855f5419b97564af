"""FedMuon: Local Muon that starts from the clients' mean momentum and follows the global direction.

Liu et al. 2025, "FedMuon: accelerating federated learning with matrix orthogonalization". (Two other papers share the
name: arXiv 2509.26337 and 2510.03866.) Its full text was not at hand: this follows a third-party transcription and the
authors' code. "C8" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, ClientInfo, Nothing, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.localadamw import Local
from lamina.algorithms.localmuon import LocalMuon
from lamina.algorithms.primitives import descend, is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the mean momentum of the matrices, and the mean step of the previous round; all are sent."""

    x: Tensor
    m: Tensor  # 0 outside of matrices
    g_a: Tensor  # a descent direction, as the steps


class Up(NamedTuple):
    """The displacement and the matrices' momentum at the end, 0 outside of them."""

    delta: Tensor
    m: Tensor


@algorithm(
    "fedmuon",
    title="FedMuon",
    reference="Liu et al. 2025",
    link="https://arxiv.org/abs/2510.27403",
    lr=0.03,
    presets=LocalMuon.card.presets,
)
class FedMuon(LocalMuon):
    """Muon with a shared momentum, aligned with the mean step of the previous round."""

    references: ClassVar = {"m": "m"}

    alpha: Number = option(0.5, "alpha, weight of the global direction", low=0.0, high=1.0)
    beta: Number = option(0.98, "beta, decay rate of the matrices' momentum", low=0.0, high=1.0)

    def check(self) -> None:
        """Refuse a step without the client's own direction."""
        super().check()
        if is_exactly(self.alpha, 1):
            raise BadInput("alpha = 1 leaves out the clients' own steps, so nothing is learned: choose alpha < 1")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, m=zeros(x), g_a=zeros(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        local = super().begin(down, client, info)
        return local._replace(m=info.layers.where_matrix(down.m, local.m, self.muon_on))  # AdamW restarts (C14)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, direction = self.local_step(local, grad, layers)
        return after._replace(y=descend(local.y, (1 - self.alpha) * direction + self.alpha * down.g_a, lr))

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        m = info.layers.where_matrix(local.m, zeros(local.m), self.muon_on)
        return Up(local.y - down.x, m), client

    def update(self, server: Server, up: Any, info: ServerInfo) -> Server:
        g_a = -up.delta / (info.lr * info.mean_steps)  # by the mean K_i
        return Server(server.x + self.server_lr * up.delta, up.m, g_a)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, amendment=server.g_a)
