"""FedNova: the server averages the clients' mean directions, so that nobody counts more for taking more local steps.

Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous federated optimization". Its full text
was not at hand: this follows the authors' code and our memory of the paper. Client i sends d_i = (y_K - x) / a_i and
a_i, the sum of the weights with which its K_i gradients enter y_K. "C32" is an entry in the list of choices:
docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Model, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend, is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Local(NamedTuple):
    """The local model, a_i so far, the momentum and the weight of gradients in it."""

    y: Tensor
    a: Tensor
    b: Tensor
    b_weight: Tensor


class Up(NamedTuple):
    """The normalised displacement d_i and a_i; the displacement, which is a_i d_i, is not sent (C34)."""

    delta: None
    d: Tensor
    a: Tensor


@algorithm(
    "fednova",
    title="FedNova",
    reference="Wang et al. 2020",
    link="https://arxiv.org/abs/2007.07481",
    lr=0.1,
    paper_cost=1,
    presets={"authors": {"decay": 1e-4}},
)
class FedNova(Algorithm):
    """Local SGD, with momentum or a proximal term; x <- x + eta_g tau mean d_i."""

    non_negative = ("a",)

    momentum: Number = option(
        0.0, "rho, decay rate of the clients' momentum, which starts from zero in every round", low=0.0, high=1.0
    )
    mu: Number = option(0.0, "mu, weight of the proximal term", low=0.0)
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay (C33)", low=0.0)

    def check(self) -> None:
        """Refuse momentum together with the proximal term."""
        are_numbers = not isinstance(self.momentum, Tensor) and not isinstance(self.mu, Tensor)
        if are_numbers and self.momentum and self.mu:
            raise BadInput("FedNova's a_i is defined for momentum or for mu, not for both: set one of them to 0 (C32)")

    def begin(self, down: Model, client: Any, info: ClientInfo) -> Local:
        x = down.x
        return Local(x, a=per_client(x), b=zeros(x), b_weight=per_client(x))

    def step(self, local: Local, down: Model, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_decay(grad, local.y, self.decay)
        b = g if is_exactly(self.momentum, 0) else self.momentum * local.b + g
        b_weight = self.momentum * local.b_weight + 1  # the momentum's own recursion with g = 1
        if is_exactly(self.mu, 0):
            return Local(descend(local.y, b, lr), local.a + b_weight, b, b_weight)
        y = descend(local.y, b + self.mu * (local.y - down.x), lr)
        return Local(y, (1 - lr * self.mu) * local.a + b_weight, b, b_weight)

    def finish(self, local: Local, down: Model, client: Any, info: ClientInfo) -> tuple[Up, Any]:
        return Up(None, d=(local.y - down.x) / local.a, a=local.a), client

    def displacement(self, up: Up) -> Tensor:
        return up.a * up.d

    def update(self, server: Model, up: Up, info: ServerInfo) -> Model:
        tau = up.a if is_exactly(self.mu, 0) else info.mean_steps  # mean a_i; with the proximal term, mean K_i
        return Model(server.x + self.server_lr * tau * up.d)
