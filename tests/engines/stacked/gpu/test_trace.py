"""A step is written as a kernel only if its operations do not depend on the sizes of the model."""

import pytest
import torch

import lamina
from lamina.algorithms.contract import ClientInfo, LocalModel, ServerInfo
from lamina.algorithms.declaration import options
from lamina.engines.stacked.gpu.trace import CannotFuse, kind_of, trace_step
from lamina.engines.stacked.independence import number_options
from lamina.objective.layers import Layers

LAYERS = Layers({"a.weight": (30, 8, 3, 3), "a.bias": (30,), "b.weight": (5, 30)}).channels_last()


def traced(algorithm):
    """Trace a step on the layers above, with its numbers as columns."""
    x, needs = torch.rand(LAYERS.size), algorithm.needs(1)
    server_info = ServerInfo(1, 0.1, LAYERS, mean_gradient=x if needs.control_variate else None)
    down = algorithm.broadcast(algorithm.init(x, LAYERS), server_info)
    info = ClientInfo(1, 0.1, LAYERS, full_gradient=x if needs.full_gradient else None)
    local = algorithm.begin(down, algorithm.client_init(x, LAYERS), info)
    per_layer = len(LAYERS.group_sizes(algorithm.grouping))
    sizes = {1: "row", per_layer: kind_of(algorithm.grouping), LAYERS.size: "element"}
    kinds = (
        {"lr": "row", "clip": "row"}
        | ({"loss": "row"} if needs.loss else {})
        | {f"number_{name}": "row" for name in number_options(algorithm)}
    )
    for prefix, record in (("local", local), ("down", down)):
        fields = zip(record._fields, record, strict=True)
        kinds |= {f"{prefix}_{name}": sizes[value.shape[-1]] for name, value in fields if value is not None}
    return trace_step(algorithm, local, down, clipped=True, kinds=kinds, layers=LAYERS)


MORE = {
    "by module": lamina.FedLamb(layers="module"),
    "whole model": lamina.FedLamb(layers="model"),
}


OURS = [name for name in sorted(lamina.algorithms.BUILT_IN) if not lamina.create(name).needs(1).second_gradient]


@pytest.mark.parametrize("name", [*OURS, *MORE])
def test_our_steps_are_the_same_on_a_real_model_as_on_a_tiny_one(name):
    ours = MORE.get(name) or lamina.create(name)
    kind = type("Theirs", (type(ours),), {"__module__": "theirs"})  # only a user's step is traced on the real model
    theirs = kind(**{option: getattr(ours, option) for option in options(type(ours))})
    assert traced(theirs) == traced(ours)


class Scales(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad / grad.shape[-1] ** 0.5)


class Branches(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * (grad if layers.size < 100 else 2 * grad))


class UsesALayersSize(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad / layers.sizes[0])


@pytest.mark.parametrize("kind", [Scales, Branches, UsesALayersSize])
def test_a_step_that_depends_on_the_sizes_of_the_model_is_not_fused(kind):
    with pytest.raises(CannotFuse):
        traced(kind())
