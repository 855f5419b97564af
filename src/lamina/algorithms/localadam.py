"""LocalAdam: local AMSGrad with an averaged second moment; FedLADA without its amendment.

Sun et al. 2023, https://arxiv.org/abs/2308.00522, Algorithm 2 ("l." below) and Tables 3, 5, 11, read as in B1 and B13:
the second moment is synchronised (``sync=False`` gives Algorithm 2 as printed, which sends only the model). Lines 6 to
9 are lines 7 to 10 of FedLADA: `LocalAms.next_moments` in fedlada.py.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, ClientInfo, Nothing, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedlada import Local, LocalAms
from lamina.algorithms.primitives import add_decoupled, descend
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and, if synchronised, the second moment; both are broadcast."""

    x: Tensor
    v: Tensor | None


class Up(NamedTuple):
    """The displacement and, if synchronised, the second moment of the client's last step."""

    delta: Tensor
    v_hat: Tensor | None


@algorithm(
    "localadam",
    title="LocalAdam",
    reference="Sun et al. 2023, Alg. 2",
    link="https://arxiv.org/abs/2308.00522",
    lr=1e-3,
    paper_cost=2,
)
class LocalAdam(LocalAms):
    """Local AMSGrad and averaging."""

    sync: bool = option(True, "average the second moment over the clients (B13)")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v=zeros(x) + self.v_init if self.sync else None)

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        v = zeros(down.x) + self.v_init if down.v is None else down.v
        return self.initial_moments(down.x, v, info.round)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)
        return after._replace(y=descend(local.y, add_decoupled(psi, local.y, self), lr))  # l.10

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        return Up(local.y - down.x, local.v_hat if self.sync else None), client  # l.12, B13

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        return Server(server.x + self.server_lr * up.delta, v=up.v_hat)  # l.14-15

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, second_moment=server.v)
