"""Mime-LAMB: Mime whose step is rescaled layer by layer.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1, red boxes: the step
of mime.py with the `rescale` of fedlamb.py.
"""

from __future__ import annotations

from lamina.algorithms.declaration import algorithm
from lamina.algorithms.fedlamb import FedLamb, Layerwise
from lamina.algorithms.mime import Mime


@algorithm(
    "mimelamb",
    title="Mime-LAMB",
    reference="Karimi, Li & Li, Alg. 1",
    link="https://arxiv.org/abs/2110.00532",
    lr=0.01,
    paper_cost=2,
    presets={**Mime.card.presets, "authors": {**Mime.card.presets["authors"], "zero_norm": "literal"}},
    grids=FedLamb.card.grids,
)
class MimeLamb(Layerwise, Mime):
    """Mime, with every layer's step scaled to the norm of the layer."""
