"""Fed-LAMB: Fed-AMS whose step is rescaled layer by layer.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1, blue boxes. "l.12" is
a line of it. "A10" is an entry in the list of choices where the text is ambiguous: docs/reference/algorithms.md. Those
of Fed-LAMB are A1 to A6, A10 to A12, A16 and A17.

Fed-AMS steps along psi = m / sqrt(v_hat). Fed-LAMB steps along u = psi + lambda * y and multiplies every layer of u by
its trust ratio phi(||y||) / ||u||. So the step of a layer is as long as the layer itself, times the learning rate.

Everything else is inherited: `FedAms.step` computes psi and calls `rescale`, the function that this file replaces.
contract.py explains the functions of an algorithm, and what `hyper` and `algorithm` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Number, algorithm, hyper, per_layer
from lamina.algorithms.fedams import FedAms
from lamina.algorithms.primitives import is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Grouping, Layers


@dataclass(frozen=True, eq=False)
class Layerwise(Algorithm):
    """The layer-wise step: inherit from it first, then from the method whose `rescale` it replaces.

    The option `layers` says what counts as a layer; the argument `layers` of the functions knows where each one lies.
    """

    trust_ratio: bool = hyper(True, "normalise the step layer by layer")
    phi_min: Number = hyper(1e-2, "floor of phi, with zero_norm 'floor' (A10)", low=0.0)
    phi_max: Number = hyper(float("inf"), "ceiling of phi (A10)", low=0.0, open_low=True)
    zero_norm: Literal["floor", "lamb", "literal"] = hyper(
        "floor", "a layer of norm 0: floor phi at phi_min; or no floor, and ratio 1 or no step (A10)"
    )
    layers: Grouping = hyper("tensor", "what a layer is (A11)")
    decay: Number = hyper(0.0, "lambda, weight decay; the paper tunes it over 0, 0.01, 0.1", low=0.0)
    decay_form: Literal["ratio", "l2", "decoupled"] = hyper(
        "ratio", "where the decay acts; ratio: inside the normalised step"
    )
    decay_on: Literal["all", "matrices"] = hyper("all", "tensors that decay under form 'ratio' (A12)")

    def check(self) -> None:
        """Refuse options that contradict each other. Creating an algorithm calls the `check` of each of its classes."""
        limits = (self.phi_min, self.phi_max)
        # an option is a tensor where several runs train as one; each run has checked its own number before
        if not any(isinstance(limit, Tensor) for limit in limits) and self.phi_min > self.phi_max:
            raise BadInput(f"phi_min = {self.phi_min:g} is above phi_max = {self.phi_max:g}")
        if self.decay_on != "all" and self.decay_form != "ratio":
            raise BadInput(f"decay_on = '{self.decay_on}' acts only with decay_form = 'ratio'")

    @property
    def grouping(self) -> Grouping:
        """What one layer is, for the engines and the report."""
        return self.layers

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Any:
        """Return the other method's local state, with room for the ratios: no step changes the shape of the state."""
        local = super().begin(down, client, info)
        return local._replace(ratio=per_layer(down.x, info.layers, by=self.grouping)) if self.trust_ratio else local

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the direction u with every layer rescaled to length phi(||y||), and the trust ratio of every layer."""
        u = psi  # the decay forms "l2" and "decoupled" act elsewhere in the step, as in Fed-AMS
        if self.decay_form == "ratio" and not is_exactly(self.decay, 0):
            decays = 1.0 if self.decay_on == "all" else layers.matrix_mask(y)  # A12: 1 on weights, 0 on biases
            u = psi + self.decay * decays * y  # l.12
        if not self.trust_ratio:
            return u, None
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
    lr=0.01,
    paper_cost=2,
    presets={"authors": {**FedAms.card.presets["authors"], "zero_norm": "literal"}},
    # In the paper, only the LAMB methods have a lambda.
    grids={"lamb-paper": {"lr": [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5], "decay": [0.0, 0.01, 0.1]}},
)
class FedLamb(Layerwise, FedAms):
    """Local AMSGrad with a shared second moment, every layer's step scaled to the norm of the layer."""
