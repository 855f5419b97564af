"""FedAdam(*): FedAdam whose clients take FedCM's amended steps, the combination that the FedLADA paper shows to fail.

Sun et al. 2023, Table 3 and Fig. 5. The amendment is the clients' mean local step, not Adam's displacement (B14).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import ClientInfo, Displacement, LocalModel, Number, ServerInfo, algorithm, hyper, zeros
from lamina.algorithms.fedadam import FedAdam, Server
from lamina.algorithms.primitives import add_decoupled, add_l2, clip_by_norm, descend, is_finite
from lamina.layers import Layers


class Down(NamedTuple):
    """The model and the mean local step of the previous round."""

    x: Tensor
    momentum: Tensor


@algorithm(
    "fedadam_star",
    title="FedAdam(*)",
    reference="Sun et al. 2023, Table 3",
    lr=0.1,
    paper_cost=2,
    presets=FedAdam.card.presets,
)
class FedAdamStar(FedAdam):
    """Clients run FedCM; the server runs Adam on their mean displacement."""

    alpha: Number = hyper(
        0.1, "alpha, weight of the client's own gradient; 1 is FedAdam", low=0.0, high=1.0, open_low=True
    )
    clip_direction: Number = hyper(
        math.inf, "largest norm of the mixed direction, in place of train.clip (B17)", low=0.0, open_low=True
    )
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "inside g, or outside the mix")

    @property
    def clips_direction(self) -> bool:
        return is_finite(self.clip_direction)

    def init(self, x: Tensor, layers: Layers) -> Server:
        return super().init(x, layers)._replace(momentum=zeros(x))

    def broadcast(self, server: Server, info: ServerInfo) -> Down:
        assert server.momentum is not None
        return Down(server.x, server.momentum)

    def step(self, local: LocalModel, down: Down, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_l2(grad, local.y, self)
        mix = self.alpha * g + (1 - self.alpha) * down.momentum
        mix = clip_by_norm(mix, self.clip_direction) if self.clips_direction else mix
        return LocalModel(descend(local.y, add_decoupled(mix, local.y, self), lr))

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        after = super().update(server, up, info)
        return after._replace(momentum=-up.delta / (info.lr * info.mean_steps))  # B14

    def inherited_step(self, down: Down, info: ClientInfo) -> Tensor | None:
        if self.clips_direction:
            return None  # the gradients decide how much of the momentum is left after the clip
        return -info.lr * info.steps * (1 - self.alpha) * down.momentum
