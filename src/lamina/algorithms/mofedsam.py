"""MoFedSAM: FedCM with the gradient at the worst point nearby.

Qu et al. 2022, "Generalized federated learning via sharpness aware minimization". Its full text was not at hand: this
follows public code (FL-Simulator). "C41" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from lamina.algorithms.declaration import algorithm
from lamina.algorithms.fedcm import FedCM
from lamina.algorithms.fedsam import SharpnessAware


@algorithm(
    "mofedsam",
    title="MoFedSAM",
    reference="Qu et al. 2022",
    link="https://arxiv.org/abs/2206.02618",
    lr=0.1,
    paper_cost=2,
    # FL-Simulator: decay outside the mix, the mix clipped at norm 10 (C41)
    presets={"fl_simulator": {"decay": 1e-3, "decay_form": "decoupled", "clip_direction": 10.0}},
)
class MoFedSam(SharpnessAware, FedCM):  # type: ignore[misc]
    """FedCM with the gradient at y + rho g / ||g||, of the same batch."""
