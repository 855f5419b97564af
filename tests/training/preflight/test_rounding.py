"""Gradients that are zero but for rounding move no parameter, and all engines agree on it."""

import logging

import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup, assert_like_the_simulation, small_model

X, Y = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


class Attention(nn.Module):
    """`joint`: one bias for queries, keys and values, of which the keys' has no gradient."""

    def __init__(self, joint):
        super().__init__()
        self.joint, self.embed, self.head = joint, nn.Linear(24, 8), nn.Linear(8, 3)
        if joint:
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        else:
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        h = self.embed(x.flatten(2).transpose(1, 2).reshape(len(x), 8, 24))
        if self.joint:
            return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 8**0.5
        return self.head((scores.softmax(-1) @ self.value(h)).mean(1))


def before_norms():
    convolution = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*convolution, nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


MODELS = {
    "norms": (before_norms, {"0.bias": 4, "3.bias": 4}),
    "joint bias": (lambda: Attention(True), {"attention.in_proj_bias": 8}),
    "key bias": (lambda: Attention(False), {"key.bias": 8}),
}


def simulation(model, algorithm="fedlamb", **more):
    settings = {"clients": 4, "batch_size": 5, "lr": 0.05, "device": "cpu", "seed": 1}
    return lamina.Simulation(model, (X, Y), algorithm, **settings | more)


def ignored(run):
    return {name: int((kept == 0).sum()) for name, kept in run.objective.kept_gradients.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", [lamina.FedLamb(), lamina.FedLada(decay=0.0)], ids=["fedlamb", "fedlada"])
def test_engines_agree_although_rounding_would_be_scaled_up(name, algorithm):
    make, zeros = MODELS[name]
    torch.manual_seed(0)
    model = make()
    stacked, loop = (simulation(model, algorithm, engine=engine) for engine in ("auto", "loop"))
    assert stacked.engine.name != "loop"
    assert ignored(stacked) == ignored(loop) == zeros
    stacked.run(5)
    loop.run(5)
    torch.testing.assert_close(stacked.state.server.x, loop.state.server.x, rtol=1e-4, atol=1e-5)
    before, after = dict(model.named_parameters()), dict(loop.model.named_parameters())
    for parameter in zeros:
        is_zero = loop.objective.kept_gradients[parameter] == 0
        assert torch.equal(before[parameter][is_zero], after[parameter][is_zero])
        if not is_zero.all():
            assert not torch.equal(before[parameter][~is_zero], after[parameter][~is_zero])


def test_the_parameters_are_named(caplog):
    with caplog.at_level(logging.INFO, "lamina"):
        simulation(before_norms())
    assert "the training loss does not depend on 0.bias, 3.bias, or on a part of it" in caplog.text


class Balanced(nn.Module):
    """The head's bias has a gradient of zero at the start, where all classes are equally likely and frequent."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(x.flatten(1))


class SwitchedOff(nn.Module):
    """All units but one are switched off at the start."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(192, 8), nn.Linear(8, 3)
        nn.init.constant_(self.first.bias[1:].data, -50.0)

    def forward(self, x):
        return self.head(torch.relu(self.first(x.flatten(1))))


class Saturated(nn.Module):
    """Gradients of the first bias are small, but no rounding errors."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(192, 8), nn.Linear(8, 3)
        nn.init.constant_(self.first.bias, 9.0)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.flatten(1))))


@pytest.mark.parametrize("kind", [Balanced, SwitchedOff, Saturated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_zero_or_small_for_another_reason_counts(kind, dtype):
    run = lamina.Simulation(kind().to(dtype), (X.to(dtype), Y), "fedlamb", clients=3, device="cpu")
    assert ignored(run) == {}


def test_a_module_that_runs_in_one_type_only_is_not_examined():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = before_norms()

        def forward(self, x):
            assert x.dtype == torch.float32
            return self.net(x)

    assert ignored(simulation(Single())) == {}


def test_a_federation_agrees_with_the_simulation(tmp_path):
    setup = Setup(tmp_path, "fedlamb", model=lambda: small_model(norm=True), rounds=2, batch_size=None)
    setup.run()
    assert ignored(setup.simulation()) == {"0.bias": 8}
    assert torch.equal(setup.weights()["0.bias"], small_model(norm=True)[0].bias)
    assert_like_the_simulation(setup)
