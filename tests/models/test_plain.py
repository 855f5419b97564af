"""The perceptron and the convolutional networks: layers, dropout, activations and clear errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lamina import models
from lamina.base.errors import LaminaError
from model_shapes import SHAPES, batch


def test_layer_order_is_that_of_the_papers() -> None:
    kinds = [type(layer).__name__ for layer in models.create("mlp", (1, 28, 28), 10, dropout=0.5).children()]
    assert kinds == ["Flatten", "Linear", "Dropout", "ReLU", "Linear"]
    deep = [type(layer).__name__ for layer in models.create("mlp", (1, 28, 28), 10, dropout=0.5, depth=3).children()]
    assert deep == ["Flatten", *["Linear", "Dropout", "ReLU"] * 3, "Linear"]
    kinds = [type(layer).__name__ for layer in models.create("cnn", (1, 28, 28), 10).children()]
    convolutions = ["Conv2d", "MaxPool2d", "ReLU", "Conv2d", "Dropout2d", "MaxPool2d", "ReLU"]
    assert kinds == [*convolutions, "Flatten", "Linear", "ReLU", "Dropout", "Linear"]


@pytest.mark.parametrize("name", ["mlp", "cnn", "cifar_cnn"])
def test_dropout_zero_is_off_and_changes_no_parameter(name: str) -> None:
    shape = SHAPES[name][0]
    off, on = (models.create(name, shape, 10, seed=0, dropout=p) for p in (0, 0.5))
    assert not any("Dropout" in type(m).__name__ for m in off.modules())
    assert any("Dropout" in type(m).__name__ for m in on.modules())
    assert off.state_dict().keys() == on.state_dict().keys()
    x = batch(shape)
    assert torch.equal(off(x), off(x))
    assert torch.equal(off(x), on.eval()(x))


def test_cifar_cnn_has_pfls_dropouts_and_xavier_weights() -> None:
    model = models.create("cifar_cnn", (3, 32, 32), 10, seed=0)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    bound = math.sqrt(6 / (12544 + 128))  # Xavier: U(-b, b) with b = sqrt(6 / (fan_in + fan_out))
    largest = model.get_parameter("hidden.weight").abs().max().item()
    assert 0.999 * bound < largest <= bound


def test_smu_is_its_formula() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for mu in (0.0, 0.3, 1.0, 5.0):
        expected = [0.5 * (v + v * math.erf(mu * v)) for v in x.tolist()]
        torch.testing.assert_close(models.SMU(mu)(x), torch.tensor(expected, dtype=torch.float64))


def test_smu_limits() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    torch.testing.assert_close(models.SMU(1 / math.sqrt(2))(x), nn.GELU()(x))
    gaps = [(models.SMU(mu)(x) - torch.relu(x)).abs().max().item() for mu in (1, 10, 100, 1e6)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-12
    assert torch.autograd.gradcheck(models.SMU(2.0), x.clone().requires_grad_())


def test_lenet_activations() -> None:
    for name, kind in (("relu", nn.ReLU), ("gelu", nn.GELU), ("smu", models.SMU)):
        model = models.create("lenet", (3, 32, 32), 10, activation=name, mu=3)
        assert sum(type(m) is kind for m in model.modules()) == 4
    assert "mu=3" in repr(model)
    model = models.create("lenet", (3, 32, 32), 10, activation="gelu")
    assert {m.approximate for m in model.modules() if isinstance(m, nn.GELU)} == {"tanh"}


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("mlp", (4,), 10, {"hidden": 0.5}, "hidden = 0.5 is not a whole number >= 1"),
        ("mlp", (4,), 10, {"hidden": True}, "hidden = True is not a whole number >= 1"),
        ("mlp", (4,), 10, {"dropout": 1}, "dropout = 1 is not a number >= 0 and < 1"),
        ("mlp", (4,), 10, {"dropout": "half"}, "dropout = 'half' is not a number >= 0 and < 1"),
        ("mlp", (4,), 10, {"dropout": float("nan")}, "dropout = nan is not a number"),
        ("lenet", (3, 32, 32), 10, {"activation": "gelo"}, "unknown activation 'gelo'; did you mean 'gelu'?"),
        ("lenet", (3, 32, 32), 10, {"activation": "smu", "mu": -1}, "mu = -1 is not a number >= 0"),
        ("lenet", (3, 32, 32), 10, {"channels": [6]}, "channels must be a list of 2 whole numbers, not [6]"),
        ("lenet", (3, 32, 32), 10, {"hidden": 384}, "hidden must be a list of whole numbers, not 384"),
        ("lenet", (3, 32, 32), 10, {"hidden": [384, 0]}, "hidden = 0 is not a whole number >= 1"),
    ],
)
def test_wrong_options_are_one_clear_line(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaminaError) as error:
        models.create(name, shape, classes, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
