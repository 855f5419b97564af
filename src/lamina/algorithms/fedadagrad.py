"""FedAdagrad: FedAdam whose second moment is the sum of all squares.

Reddi et al. 2021, "Adaptive federated optimization", without momentum. Its full text was not at hand: this follows
public code and our memory of the paper. "C25" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import refuse_dead_momentum
from lamina.algorithms.server_moments import ServerMoments


@algorithm(
    "fedadagrad",
    title="FedAdagrad",
    reference="Reddi et al. 2021",
    link="https://arxiv.org/abs/2003.00295",
    lr=0.1,
    paper_cost=1,
    presets={  # C25
        "google": {"v_init": 0.0},  # the research code of Reddi et al.
        "tff": {"v_init": 0.1 + 1e-7, "tau": 0.0},  # TensorFlow Federated, and optax: 1e-7 under the root
        "flower": {"v_init": 0.0},
    },
)
class FedAdagrad(ServerMoments):
    """Clients run SGD; the server runs Adagrad on their mean displacement."""

    beta1: Number = option(0.0, "beta_1, decay rate of the server's momentum", low=0.0, high=1.0)
    server_lr: Number = option(0.1, "eta_g, the server's step size", low=0.0, open_low=True)

    def check(self) -> None:
        """Refuse a decay rate with which nothing is learned."""
        super().check()
        refuse_dead_momentum(self)

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
