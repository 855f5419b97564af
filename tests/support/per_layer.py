"""Algorithms that keep one number per layer or per module."""

from typing import NamedTuple

import torch

import lamina
from lamina.algorithms.contract import per_client, per_layer


class Server(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor  # [..., layers], the mean of the clients'


class Client(NamedTuple):
    scale: torch.Tensor  # [..., layers], its own
    rounds: torch.Tensor  # [..., 1]


class Local(NamedTuple):
    y: torch.Tensor
    scale: torch.Tensor
    steps: torch.Tensor


class Up(NamedTuple):
    delta: torch.Tensor
    scale: torch.Tensor


class PerLayer(lamina.Algorithm):
    """SGD whose every layer is divided by a moving average of its gradient's norm, kept by clients and the server."""

    non_negative = ("scale",)
    beta: lamina.Number = lamina.option(0.9, "decay rate of the averages", low=0.0, high=1.0)

    def init(self, x, layers):
        return Server(x, per_layer(x, layers, 1.0, self.grouping))

    def client_init(self, x, layers):
        return Client(per_layer(x, layers, 1.0, self.grouping), per_client(x))

    def begin(self, down, client, info):
        return Local(down.x, (down.scale + client.scale) / 2, per_client(down.x))

    def step(self, local, down, grad, lr, layers):
        norms = layers.norms(grad, self.grouping)
        scale = self.beta * local.scale + (1 - self.beta) * norms
        return Local(local.y - lr * grad / layers.spread(scale, self.grouping), scale, local.steps + 1)

    def finish(self, local, down, client, info):
        return Up(local.y - down.x, local.scale), Client(local.scale, client.rounds + local.steps / info.steps)

    def update(self, server, up, info):
        return Server(server.x + up.delta, torch.maximum(server.scale / 2, up.scale))


class PerModule(PerLayer):
    """The same with one number per module."""

    grouping = "module"


PerLayer = lamina.algorithm("per_layer", title="Per layer", reference="-", lr=0.1)(PerLayer)
PerModule = lamina.algorithm("per_module", title="Per module", reference="-", lr=0.1)(PerModule)
for kind in (PerLayer, PerModule):  # so that no other test finds them
    del lamina.registry()[kind.card.name]
