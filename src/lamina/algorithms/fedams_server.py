"""FedAMS of Wang, Lin & Chen: FedAdam with a running maximum of the second moment, and FedCAMS with compressed uploads.

Wang, Lin & Chen 2022, "Communication-efficient adaptive federated learning". Its full text was not at hand: this
follows the authors' code and our memory of the paper. `fedams` is another method (Chen et al. 2020), whose clients
adapt. FedCAMS is this method with the channel ``{ codec = { name = "sign", scale = "model" }, feedback = true }``, or
with "topk". "C16" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import Number, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import ema, is_exactly, refuse_dead_moments
from lamina.algorithms.server_moments import Server, ServerMoments
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


@algorithm(
    "fedams_server",
    title="FedAMS (server)",
    reference="Wang, Lin & Chen 2022",
    link="https://arxiv.org/abs/2205.02719",
    lr=0.01,
    paper_cost=1,
    presets={
        "option2": {"v_hat_init": 0.0, "tau": 1e-3},
        "authors": {"bias_correction": True},  # C16
    },
)
class FedAmsServer(ServerMoments):
    """Clients run SGD; the server runs AMSGrad on their mean displacement."""

    beta2: Number = option(0.99, "beta_2, decay rate of the server's second moment", low=0.0, high=1.0)
    tau: Number = option(0.0, "epsilon of option 2, added to the root of v_hat", low=0.0)
    v_init: Number = option(0.0, "v_0, the second moment before round 1", low=0.0)
    v_hat_init: Number = option(1e-3, "epsilon of option 1, the least v_hat (C17, C18)", low=0.0)
    bias_correction: bool = option(False, "divide copies of m and v_hat by 1 - beta^r (C16)")
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)

    def check(self) -> None:
        """Refuse decay rates with which nothing is learned."""
        super().check()
        if self.bias_correction and is_exactly(self.beta2, 1):
            raise BadInput("bias_correction divides by 1 - beta2^t, which is 0 for beta2 = 1: choose beta2 < 1")
        refuse_dead_moments(self, self.tau, self.v_hat_init)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return super().init(x, layers)._replace(v_hat=zeros(x) + self.v_hat_init)

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return ema(v, square, self.beta2)

    def as_used(self, m: Tensor, v: Tensor, round: int) -> tuple[Tensor, Tensor]:
        if not self.bias_correction:
            return m, v
        return m / (1 - self.beta1**round), v / (1 - self.beta2**round)
