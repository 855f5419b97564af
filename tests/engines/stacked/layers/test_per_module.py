"""Modules with parameters of their own run client by client and give the loop's trajectory."""

import pytest
import torch
from torch import nn

from stacked_layers import Masked, Scaled, assert_as_in_the_loop, chain, data, run


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


TENSORS = {
    "a subclass of Linear": (lambda: chain(Doubled(6, 4), features=4), (6,)),
    "parameters of a module's own": (Masked, (6,)),
    "and dropout": (lambda: Masked(dropout=0.5), (6,)),
}


@pytest.mark.parametrize(("make", "shape"), TENSORS.values(), ids=TENSORS.keys())
def test_layers(make, shape):
    assert_as_in_the_loop(make, data(shape))


def test_the_path_of_a_gpu():
    make, shape = TENSORS["and dropout"]
    assert_as_in_the_loop(make, data(shape), gpu_path=True)


def test_a_model_with_parameters_of_its_own_keeps_clients_apart():
    assert_as_in_the_loop(lambda: Scaled(6), data((6,)), "loop")


def test_bfloat16_of_own_and_frozen_parameters(monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = Masked(), data((6,))
    model.scaled.inner.requires_grad_(False)
    exact, rounded = (run(model, (x.float(), y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.precision == "bf16"
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)
