"""FedAdam: Adam on the server, with the clients' mean displacement as its gradient. "Adp-Fed" in the Fed-LAMB paper.

Reddi et al. 2021, "Adaptive federated optimization". Its full text was not at hand: this follows the Fed-LAMB paper's
Algorithm 2, the FedLADA paper's Algorithm 1 (which prints the decay rates the other way round: B1) and public code.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import ema, is_exactly, refuse_dead_moments
from lamina.algorithms.server_moments import (
    RATE_CORRECTION,
    RateCorrection,
    Server,
    ServerMoments,
    corrected_rate,
    refuse_zero_rate,
)
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


@algorithm(
    "fedadam",
    title="FedAdam (Adp-Fed)",
    reference="Reddi et al. 2021",
    link="https://arxiv.org/abs/2003.00295",
    lr=0.1,
    paper_cost=1,
    presets={
        "reddi": {"v_init": 1e-6, "tau": 1e-3, "beta1": 0.9, "beta2": 0.99},  # v_init = tau^2
        "fedlamb_paper": {"v_init": 1e-6, "tau": 0.0, "beta1": 0.9, "beta2": 0.999},  # v_0 = epsilon (A4)
        "fedlada_paper": {"v_init": 1e-2, "tau": 0.0, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3},
        "fl_simulator": {  # B12
            "v_init": 0.0, "tau": 1e-2, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "decay": 1e-3
        },
        "authors": {"v_init": 0.0, "tau": 0.0, "root_eps": 1e-8, "beta1": 0.9, "beta2": 0.999},
        # C68: the research code of Reddi et al., TensorFlow Federated's Adam, Flower's FedAdam, and torch's Adam
        "google": {"v_init": 0.0, "tau": 1e-3, "beta2": 0.999, "rate_correction": "round"},
        "tff": {"v_init": 0.0, "tau": 1e-7, "beta2": 0.999, "rate_correction": "round"},
        "flower": {"v_init": 0.0, "server_lr": 0.1, "rate_correction": "next_round"},
        "torch": {"v_init": 0.0, "tau": 1e-8, "beta2": 0.999, "bias_correction": True},
    },
    grids={
        "lamb-paper": {
            "lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5],
            "server_lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1],
        },
    },
)  # fmt: skip
class FedAdam(ServerMoments):
    """Clients run SGD; the server runs Adam on their mean displacement."""

    beta2: Number = option(0.99, "beta_2, decay rate of the server's second moment", low=0.0, high=1.0)
    root_eps: Number = option(0.0, "added to v under the root", low=0.0)
    amsgrad: bool = option(False, "divide by the running maximum of v")
    bias_correction: bool = option(False, "divide copies of m and v by 1 - beta^r")
    rate_correction: RateCorrection = option("none", RATE_CORRECTION)

    def check(self) -> None:
        """Refuse decay rates with which nothing is learned."""
        super().check()
        if self.bias_correction and is_exactly(self.beta2, 1):
            raise BadInput("bias_correction divides by 1 - beta2^t, which is 0 for beta2 = 1: choose beta2 < 1")
        if self.bias_correction and self.rate_correction != "none":
            raise BadInput("bias_correction and rate_correction are two forms of the same correction: choose one")
        refuse_zero_rate(self)
        refuse_dead_moments(self, self.tau, self.root_eps)

    def init(self, x: Tensor, layers: Layers) -> Server:
        server = super().init(x, layers)
        return server._replace(v_hat=server.v) if self.amsgrad else server

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return ema(v, square, self.beta2)

    def as_used(self, m: Tensor, v: Tensor, round: int) -> tuple[Tensor, Tensor]:
        if self.bias_correction:
            m, v = m / (1 - self.beta1**round), v / (1 - self.beta2**round)
        return corrected_rate(m, self, round), v + self.root_eps
