"""Mime-LAMB: Mime with a step that is normalised layer by layer.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1 ("l." below),
red boxes. Readings of the text: A5, A6, A10 to A14, A16.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lamina.algorithms import mime, moments
from lamina.algorithms.contract import Algorithm, Info, Needs, Number, algorithm
from lamina.algorithms.mime import Down, MimeOptions, Server, Up
from lamina.algorithms.moments import Client, Local
from lamina.algorithms.primitives import (
    LayerwiseOptions,
    add_l2,
    add_ratio_decay,
    begin_ratio,
    descend,
    keep_ratio,
    layerwise,
)
from lamina.layers import Layers


@algorithm(
    "mimelamb",
    title="Mime-LAMB",
    reference="Karimi, Li & Li, Alg. 1",
    lr=0.01,
    paper_cost=2,
    presets={**mime.PRESETS, "authors": {**mime.PRESETS["authors"], "zero_norm": "literal"}},
)
class MimeLamb(LayerwiseOptions, MimeOptions, Algorithm):
    """Mime, every layer's step scaled to the norm of the layer."""

    def init(self, x: Tensor) -> Server:
        return mime.init(self, x)

    def client_init(self, x: Tensor) -> Client:
        return moments.client_init(self, x)

    def broadcast(self, server: Server, info: Info) -> Down:
        mean_gradient = info.full_gradient if self.control_variate else None
        return Down(server.x, server.v_hat, server.m, server.m_share, mean_gradient)

    def begin(self, down: Down, client: Client, info: Info) -> Local:
        local = moments.begin(self, down.x, client, down.m, down.m_share)  # l.6
        return local._replace(ratio=begin_ratio(down.x, self, info))

    def step(self, local: Local, down: Down, grad: Tensor, lr: Number, layers: Layers) -> Local:
        moved = moments.advance(self, local, add_l2(mime.gradient(self, grad, down), local.y, self))  # l.10
        u = add_ratio_decay(moments.psi(self, moved, down.v_hat), local.y, self, layers)  # l.12
        update, ratio = layerwise(local.y, u, self, layers)  # eq. 3
        kept = local if self.momentum == "server" else moved  # A14
        return kept._replace(y=descend(local.y, update, lr, self), ratio=keep_ratio(local.ratio, ratio))  # l.13

    def finish(self, local: Local, down: Down, client: Client, info: Info) -> tuple[Up, Client]:
        m, m_share = (local.m, local.m_share) if self.momentum == "average" else (None, None)
        return Up(local.y - down.x, info.full_gradient, m, m_share), moments.keep(self, local, info)  # l.15, l.17

    def update(self, server: Server, up: Up, info: Info) -> Server:
        return mime.update(self, server, up)  # l.19, l.21-23

    def needs(self, round: int) -> Needs:
        return Needs(moments.is_sync(self, round), self.control_variate)

    def down_versions(self, round: int) -> Mapping[str, int]:
        return moments.versions(self, round, *(("v_hat", "m") if self.momentum == "server" else ("v_hat",)))
