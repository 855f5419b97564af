"""FedLADA-LAMB: FedLADA whose local adaptive step is rescaled layer by layer. Not in any paper yet.

FedLADA (Sun et al. 2023, Algorithm 3) mixes a local adaptive direction with the mean step g_a of the previous round.
Here the local direction is Fed-LAMB's: every layer has length phi(||y||). It is rescaled *before* the mix, so that
both parts have the same unit (a step at learning rate 1) and FedLADA's identity
g_a+ = alpha * mean(local direction) + (1 - alpha) * g_a still holds.
"""

from __future__ import annotations

from lamina.algorithms.declaration import algorithm
from lamina.algorithms.fedlada import FedLada
from lamina.algorithms.fedlamb import Layerwise


@algorithm(
    "fedlada_lamb", title="FedLADA-LAMB", reference="lamina: Sun et al. 2023 with Karimi, Li & Li, eq. 3", lr=0.01
)
class FedLadaLamb(Layerwise, FedLada):
    """FedLADA with the layer-wise step of Fed-LAMB."""
