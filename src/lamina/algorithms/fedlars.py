"""Fed-LARS, a method of ours: Fed-LAMB's layer-wise steps without a second moment, for half of its upload.

LARS is You, Gitman & Ginsburg 2017, "Large batch training of convolutional networks". With ``order="lamb"`` this is
Fed-LAMB whose v_hat is 1 everywhere: the ablation of the second moment. "C45" is an entry in the list of choices:
docs/reference/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Displacement, Model, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedlamb import Layerwise
from lamina.algorithms.primitives import add_decoupled, add_l2, descend, ema, refuse_dead_momentum
from lamina.objective.layers import Layers


class Client(NamedTuple):
    """The momentum at the end of the client's last round."""

    m: Tensor


class Local(NamedTuple):
    """The local model and momentum."""

    y: Tensor
    m: Tensor
    ratio: Tensor | None = None  # Fed-LARS: the trust ratio of every layer in the last step


@dataclass(frozen=True, eq=False)
class LocalMomentum(Algorithm):
    """SGD with momentum on the clients; Fed-LARS replaces `rescale`."""

    order: Literal["lars", "lamb"] = option(
        "lars", "rescale the gradient, which enters the momentum; or the momentum, as Fed-LAMB does"
    )
    beta1: Number = option(0.9, "beta_1, decay rate of the momentum (C46)", low=0.0, high=1.0)
    momentum: Literal["keep", "restart"] = option(
        "keep", "a client's momentum in its next round: as it was, or zero (A5)"
    )
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = option("l2", "where the decay acts")

    def check(self) -> None:
        super().check()
        refuse_dead_momentum(self)

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        return Client(m=zeros(x))

    def begin(self, down: Model, client: Client, info: ClientInfo) -> Local:
        return Local(down.x, client.m if self.momentum == "keep" else zeros(down.x))

    def step(self, local: Local, down: Model, grad: Tensor, lr: Number, layers: Layers) -> Local:
        y, g = local.y, add_l2(grad, local.y, self)
        if self.order == "lars":
            rescaled, ratio = self.rescale(g, y, layers)
            m = direction = ema(local.m, rescaled, self.beta1)
        else:
            m = ema(local.m, g, self.beta1)
            direction, ratio = self.rescale(m, y, layers)
        return Local(descend(y, add_decoupled(direction, y, self), lr), m, ratio)

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the direction as it is, and no ratios."""
        return psi, None

    def finish(self, local: Local, down: Model, client: Client, info: ClientInfo) -> tuple[Displacement, Client]:
        return Displacement(local.y - down.x), Client(local.m)

    def update(self, server: Any, up: Displacement, info: ServerInfo) -> Any:
        return Model(server.x + self.server_lr * up.delta)


@algorithm(
    "fedlars",
    title="Fed-LARS",
    reference="lamina: LARS (You et al. 2017) in place of LAMB",
    link="https://arxiv.org/abs/1708.03888",
    lr=0.01,
)
class FedLars(Layerwise, LocalMomentum):
    """Local LARS and averaging."""
