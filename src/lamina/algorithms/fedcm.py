"""FedCM: every local step is mixed with the mean local step of the previous round.

Xu et al. 2021, "FedCM: federated learning with client-level momentum".
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, Displacement, LocalModel, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decoupled, add_l2, clip_by_norm, descend, is_exactly
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model and the mean local step of the previous round; both are broadcast."""

    x: Tensor
    momentum: Tensor


@algorithm(
    "fedcm",
    title="FedCM",
    reference="Xu et al. 2021",
    link="https://arxiv.org/abs/2106.10874",
    lr=0.1,
    paper_cost=2,
    presets={
        "fedlada_paper": {"decay": 1e-3},
        # The public simulator of FedLADA's first author: decay outside the mix, the mix clipped at norm 10.
        "fl_simulator": {"decay": 1e-3, "decay_form": "decoupled", "clip_direction": 10.0},
    },
)
class FedCM(Algorithm):
    """y <- y - lr (alpha g + (1 - alpha) Delta)."""

    alpha: Number = option(
        0.1, "alpha, weight of the client's own gradient; 1 is FedAvg", low=0.0, high=1.0, open_low=True
    )
    clip_direction: Number = option(
        math.inf, "largest norm of the mixed direction, in place of train.clip (B17)", low=0.0, open_low=True
    )
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = option("l2", "inside g, or outside the mix")

    @property
    def clips_direction(self) -> bool:
        return not is_exactly(self.clip_direction, math.inf)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, momentum=zeros(x))

    def step(self, local: LocalModel, down: Server, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_l2(grad, local.y, self)
        mix = self.alpha * g + (1 - self.alpha) * down.momentum
        mix = clip_by_norm(mix, self.clip_direction) if self.clips_direction else mix
        return LocalModel(descend(local.y, add_decoupled(mix, local.y, self), lr))

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        return Server(server.x + self.server_lr * up.delta, momentum=-up.delta / (info.lr * info.mean_steps))

    def analysis(self, server: Server, previous: Server) -> Analysis:
        z = (server.x - (1 - self.alpha) * previous.x) / self.alpha  # as in FedLADA's proof
        return Analysis(z, amendment=server.momentum)
