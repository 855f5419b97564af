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
        v_hat, share = zeros(x) + self.v_init, moments.no_share(self, x)  # l.2
        if self.momentum == "average":
            return Server(x, v_hat, m=zeros(x) + self.m_init, v_share=share, m_share=share)
        return Server(x, v_hat, m=None, v_share=share, m_share=None)

    def client_init(self, x: Tensor) -> Client:
        return moments.client_init(self, x)

    def broadcast(self, server: Server, info: Info) -> Server:
        return server

    def begin(self, down: Server, client: Client, info: Info) -> Local:
        local = moments.begin(self, down.x, client, down.m, down.m_share)  # l.6
        local = local._replace(ratio=begin_ratio(down.x, self, info))
        return moments.begin_v(self, local, down.v_hat, down.v_share, client, info)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        local = moments.advance(self, local, add_l2(grad, local.y, self))  # l.10-11
        u = add_ratio_decay(moments.psi(self, local, down.v_hat, down.v_share), local.y, self, layers)  # l.12
        update, ratio = layerwise(local.y, u, self, layers)  # eq. 3
        return local._replace(y=descend(local.y, update, lr, self), ratio=keep_ratio(local.ratio, ratio))  # l.13

    def finish(self, local: Local, down: Server, client: Client, info: Info) -> tuple[Up, Client]:
        v, v_share = moments.to_send(self, local, info)  # l.16, A2, A16
        m, m_share = (local.m, local.m_share) if self.momentum == "average" else (None, None)
        return Up(local.y - down.x, v, m, v_share, m_share), moments.keep(self, local, info)  # l.15

    def update(self, server: Server, up: Up, info: Info) -> Server:
        x = server.x + self.server_lr * up.delta  # l.19
        v_hat, v_share = server.v_hat, server.v_share
        if up.v is not None:
            v_hat = torch.maximum(v_hat, up.v)  # l.20
            v_share = moments.larger(v_share, up.v_share)  # A6
        return Server(x, v_hat, up.m, v_share, up.m_share)

    def inherited_moments(self, down: Server, info: Info) -> Mapping[str, Tensor]:
        return moments.inherited(self, down.v_hat, info)

    def down_versions(self, round: int) -> Mapping[str, int]:
        return moments.versions(self, round, "v_hat", *(("v_share",) if self.bias_correction else ()))
