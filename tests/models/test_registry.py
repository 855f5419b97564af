"""The registry of models: what it records, and shapes that a model cannot take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lamina import models
from lamina.base.errors import LaminaError
from model_shapes import SHAPES, batch


def test_registry_records() -> None:
    for name, card in models.registry().items():
        assert card.name == name
        assert card.description.endswith(".")
        assert card.paper
        assert inspect.Parameter.empty not in card.options.values()
        assert not {"input_shape", "classes", "seed"} & set(card.options)
        assert card.factory is getattr(models, name)
    assert models.registry()["cnn"].options == {"dropout": 0.5}


def test_a_shape_may_be_a_list() -> None:
    shape: Any = [1, 28, 28]
    assert models.create("cnn", shape, 10)(batch((1, 28, 28))).shape == (4, 10)


def test_the_table_of_shapes_covers_every_registered_model() -> None:
    assert {*SHAPES, "transformer"} == set(models.registry())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        (
            "cnn",
            (1, 8, 8),
            10,
            {},
            "cnn needs images [channels, height, width] of at least 16x16, not [1, 8, 8]: small",
        ),
        ("cnn", (1, 28, 15), 10, {}, "at least 16x16, not [1, 28, 15]"),
        ("cifar_cnn", (3, 5, 5), 10, {}, "at least 6x6"),
        ("cifar_cnn3", (3, 17, 17), 10, {}, "at least 18x18"),
        ("lenet", (784,), 10, {}, "lenet needs images [channels, height, width] of at least 16x16, not [784]"),
        ("resnet9", (3, 7, 8), 10, {}, "resnet9 needs images [channels, height, width] of at least 8x8, not [3, 7, 8]"),
        ("small_cnn", (1, 1, 8), 10, {}, "at least 2x2, not [1, 1, 8]: mlp takes any shape"),
        ("mlp", (), 10, {}, "mlp: input_shape must be positive whole numbers such as [1, 28, 28], not ()"),
        ("mlp", (0, 8), 10, {}, "input_shape must be positive"),
        ("mlp", 784, 10, {}, "input_shape must be positive whole numbers such as [1, 28, 28], not 784"),
        ("mlp", (2.5, 2), 10, {}, "input_shape must be positive"),
        ("mlp", (4,), 0, {}, "classes = 0 is not a whole number >= 1"),
        ("mlp", (4,), "10", {}, "classes = '10' is not a whole number >= 1"),
    ],
)
def test_shapes_that_a_model_cannot_take_are_one_clear_line(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaminaError) as error:
        models.create(name, shape, classes, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
