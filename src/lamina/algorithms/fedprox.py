"""FedProx: FedAvg with a proximal term that pulls every client towards the broadcast model.

Li et al. 2020, "Federated optimization in heterogeneous networks".
The papers compared here do not state mu; 0.1 is the value in public code for FedLADA.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import LocalModel, Model, Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedavg import FedAvg
from lamina.algorithms.primitives import add_decay, descend
from lamina.objective.layers import Layers


@algorithm(
    "fedprox",
    title="FedProx",
    reference="Li et al. 2020",
    link="https://arxiv.org/abs/1812.06127",
    lr=0.1,
    paper_cost=1,
    presets={"fedlada_paper": {"decay": 1e-3}},
)
class FedProx(FedAvg):
    """FedAvg on F_i(y) + mu/2 ||y - x||^2."""

    mu: Number = option(0.1, "mu, weight of the proximal term", low=0.0)

    def step(self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_decay(grad, local.y, self.decay) + self.mu * (local.y - down.x)
        return LocalModel(descend(local.y, g, lr))
