"""Delta-SGD: every client measures how fast its gradient turns, and chooses the sizes of its steps by that.

Kim, Toghani, Uribe & Kyrillidis 2024, "Adaptive federated learning with auto-tuned clients". Its full text was not at
hand: this follows the authors' code (auto-tuned-FL) and a third-party transcription. "C48" is an entry in the list of
choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    ClientInfo,
    Displacement,
    Model,
    Needs,
    Number,
    ServerInfo,
    per_client,
    zeros,
)  # fmt: skip
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend
from lamina.objective.layers import Layers


class Local(NamedTuple):
    """The local models of this step and the one before, and the step size, 0 before the first step, with its growth."""

    y: Tensor
    previous: Tensor
    gradient: Tensor | None  # of the step before, if it is compared with
    rate: Tensor  # eta_{k-1}
    growth: Tensor  # theta_{k-1} = eta_{k-1} / eta_{k-2}


@algorithm(
    "deltasgd",
    title="Δ-SGD",
    reference="Kim et al. 2024",
    link="https://arxiv.org/abs/2306.11201",
    lr=0.2,  # eta_0, of the first step of every round
    paper_cost=1,
    # their code's defaults; its first step is longer by theta_0 (C49), so that lr = 0.2 there is 0.202 here
    presets={"authors": {"delta": 0.02, "theta_init": 1.02**0.5, "eps": 1e-8}},
)
class DeltaSgd(Algorithm):
    """SGD with steps of gamma / 2 over the local Lipschitz constant of the gradient, which grow slowly."""

    gamma: Number = option(2.0, "gamma, factor of the step size", low=0.0, open_low=True)
    delta: Number = option(0.1, "delta, how fast the step size may grow (C50)", low=0.0)
    theta_init: Number = option(1.0, "theta_0, growth of the step size before the first step", low=0.0)
    eps: Number = option(0.0, "epsilon, added to the step size (C51)", low=0.0)
    gradients: Literal["same_batch", "consecutive"] = option(
        "same_batch", "the gradient at the previous model: of the new batch, or of its own (C48)"
    )
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)

    def needs(self, round: int) -> Needs:
        return Needs(second_gradient=self.gradients == "same_batch")

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Local:
        x = down.x
        gradient = zeros(x) if self.gradients == "consecutive" else None
        return Local(x, x, gradient, rate=per_client(x), growth=per_client(x, self.theta_init))

    def second_point(self, local: Local, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Tensor:
        """Return the previous local model; before the first step, the current one."""
        return local.previous

    def step(
        self, local: Local, down: Any, grad: Tensor, lr: Number, layers: Layers, second_grad: Tensor | None = None
    ) -> Local:
        g = add_decay(grad, local.y, self.decay)
        previous_gradient = local.gradient
        if previous_gradient is None:
            assert second_grad is not None
            previous_gradient = add_decay(second_grad, local.previous, self.decay)
        distance = torch.linalg.vector_norm(local.y - local.previous, dim=-1, keepdim=True)
        gradient_change = torch.linalg.vector_norm(g - previous_gradient, dim=-1, keepdim=True)
        largest = (1 + self.delta * local.growth).sqrt() * local.rate
        by_curvature = self.gamma * distance / (2 * torch.where(gradient_change > 0, gradient_change, 1.0))
        has_both = (distance > 0) & (gradient_change > 0)
        rate = torch.where(has_both, torch.minimum(by_curvature, largest) + self.eps, largest)  # C52
        has_rate = local.rate > 0
        rate = torch.where(has_rate, rate, lr)  # the first is eta_0 (C49)
        growth = torch.where(has_rate, rate / torch.where(has_rate, local.rate, 1.0), local.growth)
        gradient = None if local.gradient is None else g
        return Local(descend(local.y, g, rate), local.y, gradient, rate, growth)

    def update(self, server: Model, up: Displacement, info: ServerInfo) -> Model:
        return Model(server.x + self.server_lr * up.delta)
