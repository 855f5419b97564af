"""FedSAM: FedAvg with the gradient at the worst point nearby. mofedsam.py does the same to FedCM.

Qu et al. 2022, "Generalized federated learning via sharpness aware minimization". Its full text was not at hand: this
follows public code (FL-Simulator). "C42" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Needs, Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedavg import FedAvg
from lamina.objective.layers import Layers

# Added to the norm, so that there is no perturbation without a gradient: FL-Simulator's number. Other public codes have
# 1e-12; both are far below the norms of gradients, so the perturbation has length rho.
LEAST_NORM = 1e-7


@dataclass(frozen=True, eq=False)
class SharpnessAware(Algorithm):
    """The perturbation: inherit from it first, then from the method whose gradient is taken elsewhere."""

    rho: Number = option(0.1, "rho, length of the perturbation; 0 is the method without it (C44)", low=0.0)

    def needs(self, round: int) -> Needs:
        return Needs(second_gradient=True)

    def second_point(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Tensor:
        """Return y + rho g / ||g||, with the raw gradient g over the whole vector (C42)."""
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        point: Tensor = local.y + self.rho * grad / (norm + LEAST_NORM)
        return point

    def step(  # type: ignore[override]
        self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers, second_grad: Tensor
    ) -> Any:
        return super().step(local, down, second_grad, lr, layers)  # type: ignore[safe-super]


@algorithm(
    "fedsam",
    title="FedSAM",
    reference="Qu et al. 2022",
    link="https://arxiv.org/abs/2206.02618",
    lr=0.1,
    paper_cost=1,
    presets={"fl_simulator": {"decay": 1e-3}, "fluke": {"rho": 0.05}},  # C44
)
class FedSam(SharpnessAware, FedAvg):  # type: ignore[misc]  # its `step` takes the second gradient, too
    """FedAvg with the gradient at y + rho g / ||g||, of the same batch."""
