"""FedSPS: every local step has the stochastic Polyak step size, capped by the learning rate.

Mukherjee, Loizou & Stich 2024, "Locally adaptive federated learning". Its full text was not at hand: this follows our
memory of it, and public code of SPS_max (Loizou et al. 2021), on which it is built. "C56" is an entry in the list of
choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Displacement, LocalModel, Model, Needs, Number, ServerInfo
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend, is_exactly
from lamina.objective.layers import Layers


@algorithm(
    "fedsps",
    title="FedSPS",
    reference="Mukherjee, Loizou & Stich 2024",
    link="https://arxiv.org/abs/2307.06306",
    lr=1.0,  # gamma_b, the largest step (C56)
    paper_cost=1,
)
class FedSps(Algorithm):
    """SGD with steps of (F_i(y) - l*) / (c ||g||^2), at most the learning rate."""

    c: Number = option(0.5, "c, divisor of the step; smaller is bolder", low=0.0, open_low=True)
    lower_bound: Number = option(0.0, "l*, a lower bound of the clients' losses")
    eps: Number = option(0.0, "epsilon, added to c ||g||^2 (C57)", low=0.0)
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay, also in the loss (C58)", low=0.0)

    def needs(self, round: int) -> Needs:
        return Needs(loss=True)

    def step(  # type: ignore[override]
        self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers, loss: Tensor
    ) -> LocalModel:
        g = add_decay(grad, local.y, self.decay)
        if not is_exactly(self.decay, 0):  # F + lambda/2 ||y||^2
            loss = loss + 0.5 * self.decay * torch.linalg.vector_norm(local.y, dim=-1, keepdim=True) ** 2
        gap = (loss - self.lower_bound).clamp(min=0)
        square = torch.linalg.vector_norm(g, dim=-1, keepdim=True) ** 2
        divisor = self.c * torch.where(square > 0, square, 1.0) + self.eps  # without a gradient there is no step
        gamma = (gap / divisor).clamp(max=lr)
        return LocalModel(descend(local.y, g, gamma))

    def update(self, server: Model, up: Displacement, info: ServerInfo) -> Model:
        return Model(server.x + self.server_lr * up.delta)
