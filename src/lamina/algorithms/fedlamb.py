"""Fed-LAMB: Fed-AMS whose step is rescaled layer by layer. mimelamb.py applies the same step to Mime.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", https://arxiv.org/abs/2110.00532,
Algorithm 1, line 13 ("l.13"), which blue and red boxes share. "A10" is an entry in the list of choices where the text
is ambiguous: docs/reference/algorithms.md.

Fed-AMS steps along psi = m / sqrt(v_hat). Fed-LAMB steps along u = psi + lambda * y and multiplies every layer of u by
its trust ratio phi(||y||) / ||u||. So the step of a layer has the length phi(||y||) times the learning rate, however
long its gradients are. Everything else is inherited: the `step` of fedams.py and mime.py computes psi and calls
`rescale`, which this file replaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Number, per_layer
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.fedams import FedAms
from lamina.algorithms.primitives import add_decay
from lamina.base.errors import BadInput
from lamina.objective.layers import Grouping, Layers


@dataclass(frozen=True, eq=False)
class Layerwise(Algorithm):
    """The layer-wise step: inherit from it first, then from the method whose `rescale` it replaces.

    The option `layers` says what counts as a layer; the argument `layers` of the functions knows where each one lies.
    """

    phi_min: Number = option(1e-2, "least value of phi, with zero_norm 'floor' (A10)", low=0.0)
    phi_max: Number = option(float("inf"), "ceiling of phi (A10)", low=0.0, open_low=True)
    zero_norm: Literal["floor", "lamb", "literal"] = option(
        "floor",
        "least phi: phi_min; or none, so that a layer of norm 0 has ratio 1 (lamb) or never moves (literal) (A10)",
    )
    layers: Grouping = option("tensor", "what a layer is (A11)")
    decay: Number = option(0.0, "lambda, weight decay; the paper tunes it over 0, 0.01, 0.1", low=0.0)
    decay_form: Literal["ratio", "l2", "decoupled"] = option(
        "ratio", "where the decay acts; ratio: inside the normalised step"
    )

    def check(self) -> None:
        super().check()
        limits = (self.phi_min, self.phi_max)
        # an option is a tensor where several runs train as one; each run has checked its own number before
        if not any(isinstance(limit, Tensor) for limit in limits) and self.phi_min > self.phi_max:
            raise BadInput(f"phi_min = {self.phi_min:g} is above phi_max = {self.phi_max:g}")

    @property
    def grouping(self) -> Grouping:
        """What one layer is, for the engines and the report."""
        return self.layers

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Any:
        """Return the other method's local state, with room for the ratios: no step changes the shape of the state."""
        return super().begin(down, client, info)._replace(ratio=per_layer(down.x, info.layers, by=self.grouping))

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
        """Return the direction u with every layer rescaled to length phi(||y||), and the trust ratio of every layer."""
        u = add_decay(psi, y, self.decay) if self.decay_form == "ratio" else psi  # l.13: psi + lambda * y
        ratio = self.ratios(y, u, layers)
        return layers.spread(ratio, self.grouping) * u, ratio  # eq. 3: every element by its layer's ratio

    def ratios(self, y: Tensor, u: Tensor, layers: Layers) -> Tensor:
        """Return phi(||y||) / ||u|| for every layer. A layer with ||u|| = 0 does not move.

        phi is the identity, cut at `phi_max` and, by default, at `phi_min`, as in Assumption 4.4 (A10). By the paper's
        text a tensor that starts at zero would never move (``zero_norm="literal"``: no floor). LAMB's implementations
        use the ratio 1 for it (``"lamb"``).
        """
        y_norm, u_norm = layers.norms(y, self.grouping), layers.norms(u, self.grouping)
        phi = torch.clamp(y_norm, max=self.phi_max)
        if self.zero_norm == "floor":
            phi = torch.clamp(phi, min=self.phi_min)
        ratio = torch.where(u_norm > 0, phi / u_norm, 0.0)
        if self.zero_norm == "lamb":
            ratio = torch.where((y_norm > 0) & (u_norm > 0), ratio, 1.0)
        return ratio

    def trust_ratios(self, local: Any) -> Tensor | None:
        """Return the ratios of the last step, for the report."""
        ratios: Tensor | None = local.ratio
        return ratios


@algorithm(
    "fedlamb",
    title="Fed-LAMB",
    reference="Karimi, Li & Li, Alg. 1",
    link="https://arxiv.org/abs/2110.00532",
    lr=0.01,
    paper_cost=2,
    presets={"authors": {**FedAms.card.presets["authors"], "zero_norm": "literal"}},
    # In the paper, only the LAMB methods have a lambda.
    grids={"lamb-paper": {"lr": [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5], "decay": [0.0, 0.01, 0.1]}},
)
class FedLamb(Layerwise, FedAms):
    """Local AMSGrad with a shared second moment, every layer's step scaled to the norm of the layer."""
