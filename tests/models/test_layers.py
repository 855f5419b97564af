"""Modules of torch's own layers as JSON."""

import json

import pytest
import torch
from torch import nn

from lamina.models.layers import build, describe


@pytest.mark.parametrize(
    ("module", "sample"),
    [
        (nn.Linear(4, 2, bias=False), torch.randn(3, 4)),
        (nn.Sequential(nn.Conv2d(1, 4, (3, 5), padding="same"), nn.GroupNorm(2, 4), nn.GELU("tanh"), nn.MaxPool2d(2),
                       nn.Flatten(), nn.Linear(64, 3)), torch.randn(2, 1, 8, 8)),
        (nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4), nn.Sequential(nn.LeakyReLU(0.3)),
                       nn.Identity(), nn.Flatten(), nn.Dropout(0.4)), torch.randint(0, 9, (2, 5))),
        (nn.Sequential(nn.ConvTranspose2d(1, 4, 3, stride=2), nn.BatchNorm2d(4, eps=0.1, affine=False),
                       nn.AdaptiveAvgPool2d((2, 1))), torch.randn(2, 1, 4, 4)),
    ],
)  # fmt: skip
def test_a_module_of_torchs_layers_is_built_again(module, sample):
    again = build(json.loads(json.dumps(describe(module))))
    assert repr(again) == repr(module)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.eval()(sample), module.eval()(sample))


class Own(nn.Sequential):
    """More than its layers, perhaps."""


def changed():
    module = nn.Sequential(nn.Linear(2, 2))
    module.scale = 3.0
    return module


@pytest.mark.parametrize(
    "module",
    [Own(nn.Linear(2, 2)), nn.Sequential(Own()), changed(), nn.MultiheadAttention(4, 2), nn.ModuleList(), nn.LSTM(2, 3),
     nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_not_described(module):
    assert describe(module) is None


def test_only_layers_are_built():
    with pytest.raises(ValueError, match="no layer 'functional'"):
        build({"layer": "functional", "options": {}})
