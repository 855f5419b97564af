"""Layers that take the step during the backward pass end where they do after it, to the last bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina.engines.stacked import overlap

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)


class Shared(nn.Module):
    """A layer that is used twice, and one whose weights are read once more, without a gradient."""

    def __init__(self):
        super().__init__()
        self.enter, self.twice = nn.Linear(192, 512), nn.Linear(512, 512)
        self.read, self.leave = nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x):
        x = F.relu(self.enter(x.flatten(1)))
        x = F.relu(self.twice(F.relu(self.twice(x))))
        x = F.linear(x, self.read.weight.detach())
        return self.leave(F.relu(self.read(F.relu(x))))


def early_layers(run):
    """Return the layers that take the step early in the captured steps of a run."""
    overlaps = [each for steps in run.engine.graphs._captured.values() for each in steps._overlaps]
    assert all(each.is_right for each in overlaps)
    return {name for each in overlaps for name in each._blocks}


def trained(monkeypatch, model, algorithm, overlaps=True, **settings):
    monkeypatch.setattr(overlap, "LARGE", 1 << 16 if overlaps else 1 << 40)
    torch.manual_seed(0)
    side = 8 if model == "shared" else 32
    data = torch.randint(0, 256, (120, 3, side, side), dtype=torch.uint8), torch.arange(120) % 10
    if model == "shared":
        net = Shared()
    elif model == "autoencoder":
        net = nn.Sequential(nn.Linear(3072, 64, bias=False), nn.Tanh(), nn.Linear(64, 3072, bias=False))
        flat = data[0].flatten(1) / 255
        data, settings = (flat, flat), {"loss": "mse"} | settings
    else:
        net = lamina.models.create(model, (3, side, side), 10, seed=0)
    settings = {"clients": 4, "batch_size": 7, "local_steps": 3, "lr": 0.01, "seed": 1} | settings
    run = lamina.Simulation(net, data, algorithm, device="cuda", engine="stacked", **settings)
    run.run(3)
    return run


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "algorithm",
    [
        lamina.FedAvg(),
        lamina.FedLada(),
        lamina.FedLada(moment_correction="m"),  # it counts the steps of every row
        lamina.create("scaffold"),
        lamina.create("fedlion"),
    ],
    ids=lambda algorithm: f"{type(algorithm).__name__}-{getattr(algorithm, 'moment_correction', '')}",
)
@pytest.mark.parametrize("model", ["cifar_cnn", "resnet18"])
def test_the_same_bits(monkeypatch, model, algorithm, precision):
    early, late = (trained(monkeypatch, model, algorithm, overlaps, precision=precision) for overlaps in (True, False))
    assert early_layers(early)
    assert not early_layers(late)
    assert torch.equal(early.state.server.x, late.state.server.x)


def test_clients_with_fewer_steps_keep_their_state(monkeypatch):
    settings = {"clients": [range(10), range(10, 60), range(60, 120)], "local_steps": None, "epochs": 1}
    early, late = (trained(monkeypatch, "cifar_cnn", "fedlada", overlaps, **settings) for overlaps in (True, False))
    assert early_layers(early)
    assert torch.equal(early.state.server.x, late.state.server.x)


def test_a_layer_whose_weights_are_read_again_waits(monkeypatch):
    early, late = (trained(monkeypatch, "shared", "fedavg", overlaps) for overlaps in (True, False))
    assert early_layers(early) == {"enter.weight", "twice.weight"}  # `leave` is small
    assert torch.equal(early.state.server.x, late.state.server.x)


def test_all_layers_may_be_early(monkeypatch):
    """Then no block is left for after the pass."""
    early, late = (trained(monkeypatch, "autoencoder", "fedlada", overlaps) for overlaps in (True, False))
    assert early_layers(early) == {"0.weight", "2.weight"}
    assert torch.equal(early.state.server.x, late.state.server.x)


@pytest.mark.parametrize("algorithm", ["fedlamb", "fedsps"])  # norms, and the loss of the batch
def test_a_step_that_needs_more_than_the_gradient_waits(monkeypatch, algorithm):
    assert not early_layers(trained(monkeypatch, "cifar_cnn", algorithm))


def test_clipped_gradients_wait(monkeypatch):
    assert not early_layers(trained(monkeypatch, "cifar_cnn", "fedavg", clip=1.0))


@pytest.mark.parametrize("times", [1, 2])
def test_a_module_that_changes_its_ways_steps_after_the_pass(monkeypatch, times):
    """Where the captured pass is not like the one that was watched, it is captured again without early steps."""
    name = "hidden.weight" if times == 2 else "conv1.missing"  # its gradient arrives once, or never
    monkeypatch.setattr(overlap.Watched, "finish", lambda self, pieces: self.early.update({name: times}))
    run = trained(monkeypatch, "cifar_cnn", "fedavg")
    assert not early_layers(run)
    monkeypatch.undo()
    plain = trained(monkeypatch, "cifar_cnn", "fedavg", overlaps=False)
    assert torch.equal(run.state.server.x, plain.state.server.x)
