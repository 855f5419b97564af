"""FedAdam(*): FedAdam whose clients take FedCM's amended steps, the combination that the FedLADA paper shows to fail.

Sun et al. 2023, Table 3 and Fig. 5. The amendment is the clients' mean local step, not Adam's displacement (B14).
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from lamina.algorithms import fedcm
from lamina.algorithms.contract import Displacement, Number, ServerInfo, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedadam import FedAdam
from lamina.algorithms.server_moments import Server
from lamina.objective.layers import Layers


@algorithm(
    "fedadam_star",
    title="FedAdam(*)",
    reference="Sun et al. 2023, Table 3",
    link="https://arxiv.org/abs/2308.00522",
    lr=0.1,
    paper_cost=2,
    presets=FedAdam.card.presets,
)
class FedAdamStar(FedAdam):
    """Clients run FedCM; the server runs Adam on their mean displacement."""

    alpha: Number = option(
        0.1, "alpha, weight of the client's own gradient; 1 is FedAdam", low=0.0, high=1.0, open_low=True
    )
    clip_direction: Number = option(
        math.inf, "largest norm of the mixed direction, in place of train.clip (B17)", low=0.0, open_low=True
    )
    decay_form: Literal["l2", "decoupled"] = option("l2", "inside g, or outside the mix")

    # FedCM's local step, with the options above.
    clips_direction = fedcm.FedCM.clips_direction
    step = fedcm.FedCM.step

    def init(self, x: Tensor, layers: Layers) -> Server:
        return super().init(x, layers)._replace(momentum=zeros(x))

    def broadcast(self, server: Server, info: ServerInfo) -> fedcm.Server:
        assert server.momentum is not None
        return fedcm.Server(server.x, server.momentum)

    def update(self, server: Server, up: Displacement, info: ServerInfo) -> Server:
        after = super().update(server, up, info)
        return after._replace(momentum=-up.delta / (info.lr * info.mean_steps))  # B14
