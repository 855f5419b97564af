"""FedYogi: FedAdam whose second moment grows and shrinks by steps of at most (1 - beta_2) D^2.

Reddi et al. 2021, "Adaptive federated optimization". Its full text was not at hand: this follows public code and our
memory of the paper. "C25" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import refuse_dead_moments
from lamina.algorithms.server_moments import (
    RATE_CORRECTION,
    RateCorrection,
    ServerMoments,
    corrected_rate,
    refuse_zero_rate,
)


@algorithm(
    "fedyogi",
    title="FedYogi",
    reference="Reddi et al. 2021",
    link="https://arxiv.org/abs/2003.00295",
    lr=0.1,
    paper_cost=1,
    presets={  # C25, C68
        "google": {"v_init": 0.0, "beta2": 0.999, "rate_correction": "round"},  # the research code of Reddi et al.
        "tff": {"beta2": 0.999, "rate_correction": "round"},  # TensorFlow Federated
        "flower": {"v_init": 0.0},
    },
)
class FedYogi(ServerMoments):
    """Clients run SGD; the server runs Yogi on their mean displacement."""

    beta2: Number = option(0.99, "1 - beta_2 is the largest step of v, in squared displacements", low=0.0, high=1.0)
    rate_correction: RateCorrection = option("none", RATE_CORRECTION)

    def check(self) -> None:
        """Refuse decay rates with which nothing is learned."""
        super().check()
        refuse_zero_rate(self)
        refuse_dead_moments(self, self.tau)

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()

    def as_used(self, m: Tensor, v: Tensor, round: int) -> tuple[Tensor, Tensor]:
        return corrected_rate(m, self, round), v
