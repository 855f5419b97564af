"""What the two boxes of the Fed-LAMB paper's Algorithm 1 share: options, and the lazy synchronisation of v_hat (A16).

Karimi, Li & Li, https://arxiv.org/abs/2110.00532: `fedams.py` has the blue boxes, `mime.py` the red ones, and
`fedlamb.py` the layer-wise step of both. With lazy synchronisation ("Extension" at the end of section 4, Figure 5) the
server updates and broadcasts v_hat in every Z-th round only; in the others a client starts from the v_hat that it
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, Number
from lamina.algorithms.declaration import option
from lamina.algorithms.primitives import refuse_dead_moments
from lamina.objective.layers import Layers


@dataclass(frozen=True, eq=False)
class Algorithm1(Algorithm):
    """A method whose clients divide their momentum by the root of a second moment that the server broadcasts."""

    beta1: Number = option(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = option(0.999, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = option(1e-6, "epsilon, the second moment before round 1 (A4)", low=0.0)
    eps: Number = option(0.0, "added to the root of v_hat (A4)", low=0.0)
    sync_every: int = option(1, "Z, synchronise the second moment every Z rounds (A16)", low=1)
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = option("l2", "where the decay acts")

    def check(self) -> None:
        super().check()
        refuse_dead_moments(self, self.eps)

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the direction of a step, here psi as it is; `fedlamb.py` rescales it and also returns the ratios."""
        return psi, None

    def is_sync(self, round: int) -> bool:
        """Return whether the second moment is synchronised at the end of this round (A16)."""
        return round % self.sync_every == 0

    @property
    def cycle(self) -> int:
        return self.sync_every

    def down_versions(self, round: int) -> Mapping[str, int]:
        return {"v_hat": (round - 1) // self.sync_every} if self.sync_every > 1 else {}

    def paper_models(self, round: int) -> int | None:
        models = super().paper_models(round)
        return models if models is None or self.is_sync(round) else models - 1  # without the second moment

    def analysis(self, server: Any, previous: Any) -> Analysis:
        return Analysis(server.x, second_moment=server.v_hat)
