"""FedAvg: local SGD and averaging. The Fed-LAMB paper calls it Fed-SGD.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data".
"""

from __future__ import annotations

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Displacement, LocalModel, Model, Number, ServerInfo
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import add_decay, descend
from lamina.objective.layers import Layers


@algorithm(
    "fedavg",
    title="FedAvg (Fed-SGD)",
    reference="McMahan et al. 2017",
    link="https://arxiv.org/abs/1602.05629",
    lr=0.1,
    paper_cost=1,
    presets={"fedlada_paper": {"decay": 1e-3}},
    grids={"lamb-paper": {"lr": [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5]}},
)
class FedAvg(Algorithm):
    """Clients run SGD; the server averages."""

    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(0.0, "lambda, weight decay", low=0.0)

    def step(self, local: LocalModel, down: Model, grad: Tensor, lr: Number, layers: Layers) -> LocalModel:
        g = add_decay(grad, local.y, self.decay)
        return LocalModel(descend(local.y, g, lr))

    def update(self, server: Model, up: Displacement, info: ServerInfo) -> Model:
        return Model(server.x + self.server_lr * up.delta)
