"""Residual networks: norms, scales of the image and clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lamina import models
from lamina.base.errors import LaminaError
from model_shapes import batch


def test_full_resnet18_runs_forward_and_backward() -> None:
    model = models.create("resnet18", (3, 32, 32), 10, seed=0)
    torch.autograd.backward(model(batch((3, 32, 32), 2)).sum())
    assert all(p.grad is not None for p in model.parameters())
    assert not list(model.buffers())  # GroupNorm keeps no running statistics


def test_resnet_norms() -> None:
    grouped = models.create("resnet18", (3, 32, 32), 10, width=8)
    norms = [m for m in grouped.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20  # stem, 8 blocks of 2, 3 projections
    assert {m.num_groups for m in norms} == {2}
    batched = models.create("resnet18", (3, 32, 32), 10, width=8, norm="batch")
    assert sum(isinstance(m, nn.BatchNorm2d) for m in batched.modules()) == 20
    assert grouped.state_dict().keys() <= batched.state_dict().keys()


def test_resnet_sees_the_image_at_four_scales() -> None:
    model = models.create("resnet18", (3, 32, 32), 10, width=8)
    x, scales = batch((3, 32, 32)), {}
    for name, layer in model.named_children():
        x = layer(x)
        scales[name] = tuple(x.shape[1:])
    assert [scales[f"stage{i}"] for i in (1, 2, 3, 4)] == [(8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("resnet18", (3, 32, 32), 10, {"norm": "layer"}, "unknown norm 'layer' (known: batch, group)"),
        ("resnet18", (3, 32, 32), 10, {"norm": None}, "unknown norm 'None'"),
        ("resnet18", (3, 32, 32), 10, {"groups": 3}, "groups must divide the 64 channels of the first stage, 3 does"),
        ("resnet18", (3, 32, 32), 10, {"stem": "imagnet"}, "unknown stem 'imagnet'; did you mean 'imagenet'?"),
    ],
)
def test_wrong_options_are_one_clear_line(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaminaError) as error:
        models.create(name, shape, classes, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
