"""Fed-LAMB: local AMSGrad whose step is normalised layer by layer; the second moment is shared.

Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1 ("l." below),
blue boxes. Readings of the text: A1 to A6, A10 to A12, A16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.algorithms import moments
from lamina.algorithms.contract import Algorithm, Info, Number, algorithm, zeros
from lamina.algorithms.fedams import Server, Up
from lamina.algorithms.moments import AmsOptions, Client, Local
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
    "fedlamb",
    title="Fed-LAMB",
    reference="Karimi, Li & Li, Alg. 1",
    lr=0.01,
    paper_cost=2,
    presets={  # what the authors' public research code does, where it differs from the text
        "authors": {
            "m_init": 1e-8,
            "v_init": 1e-8,
            "eps": 1e-8,
            "first_round": "running",
            "v_seed": "client",
            "zero_norm": "literal",
        }
    },
)
class FedLamb(LayerwiseOptions, AmsOptions, Algorithm):
    """Local AMSGrad with a shared second moment, every layer's step scaled to the norm of the layer."""

    def init(self, x: Tensor) -> Server:
        m = zeros(x) + self.m_init if self.momentum == "average" else None
        return Server(x, v_hat=zeros(x) + self.v_init, m=m)  # l.2

    def client_init(self, x: Tensor) -> Client:
        return moments.client_init(self, x)

    def broadcast(self, server: Server, info: Info) -> Server:
        return server

    def begin(self, down: Server, client: Client, info: Info) -> Local:
        local = moments.begin(self, down.x, client, down.m)._replace(ratio=begin_ratio(down.x, self, info))  # l.6
        return moments.begin_v(self, local, down.v_hat, client, info)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        local = moments.advance(self, local, add_l2(grad, local.y, self))  # l.10-11
        u = add_ratio_decay(moments.psi(self, local, down.v_hat), local.y, self, layers)  # l.12
        update, ratio = layerwise(local.y, u, self, layers)  # eq. 3
        return local._replace(y=descend(local.y, update, lr, self), ratio=keep_ratio(local.ratio, ratio))  # l.13

    def finish(self, local: Local, down: Server, client: Client, info: Info) -> tuple[Up, Client]:
        v = moments.to_send(self, local, info)  # l.16, A2, A16
        m = local.m if self.momentum == "average" else None
        return Up(local.y - down.x, v, m), moments.keep(self, local, info)  # l.15

    def update(self, server: Server, up: Up, info: Info) -> Server:
        x = server.x + self.server_lr * up.delta  # l.19
        v_hat = server.v_hat if up.v is None else torch.maximum(server.v_hat, up.v)  # l.20
        return Server(x, v_hat, up.m)

    def down_versions(self, round: int) -> Mapping[str, int]:
        return moments.versions(self, round, "v_hat")
