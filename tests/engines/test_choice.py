"""Which engine is taken: stacked layers, captured steps or the loop; and why."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lamina
from small_simulations import PARTS, form, noise, simulation


class Mixing(nn.Module):
    """The order of the samples in a batch: no stacked form."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3) / 3)

    def forward(self, x):
        return torch.tanh(x - x.flip(0)) @ self.w


class Recurrent(nn.Module):
    """An LSTM of a packed sequence, which has no stacked form."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        lengths = torch.full((len(x),), 2)
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), 2, 4), lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][0][-1])


@pytest.mark.parametrize("model", [Mixing, Recurrent])
def test_fallbacks_give_the_same_result_and_say_why(model, caplog):
    torch.manual_seed(0)
    net, x = model().double(), torch.randn(48, 8, dtype=torch.float64)
    data = (x, torch.arange(48) % 3)
    with caplog.at_level("INFO", logger="lamina"):
        auto = lamina.Simulation(net, data, "fedlamb", clients=PARTS, batch_size=4, device="cpu")
    assert len([r for r in caplog.records if r.name.startswith("lamina")]) == 1
    assert ("the module mixes samples of a batch" in caplog.text) == (model is Mixing)
    assert form(auto) == "loop"  # on a CPU nothing can be captured
    engines = ["loop", "captured"] if model is Mixing else ["loop"]
    auto.run(2)
    for engine in engines:
        run = lamina.Simulation(net, data, "fedlamb", clients=PARTS, batch_size=4, device="cpu", engine=engine)
        run.run(2)
        assert torch.allclose(auto.state.server.x, run.state.server.x, rtol=1e-9, atol=1e-12)
    with pytest.raises(lamina.BadInput, match="engine='stacked' is not possible"):
        lamina.Simulation(net, data, "fedlamb", clients=PARTS, device="cpu", engine="stacked")


def test_a_module_that_reads_values_cannot_be_captured():
    data = torch.randn(48, 8), torch.arange(48) % 3
    with pytest.raises(lamina.BadInput, match=r"engine='captured' is not possible .* reads tensors' values"):
        lamina.Simulation(Recurrent(), data, "fedavg", clients=PARTS, device="cpu", engine="captured")


class Branching(lamina.algorithms.FedAvg):
    """Stops where the gradient is small: for every client alone that is fine."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad if grad.norm() > 1 else 0 * grad, lr, layers)


class BranchingOnRows(lamina.algorithms.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad if grad.norm(dim=-1) > 1 else 0 * grad, lr, layers)


@pytest.mark.parametrize("kind", [Branching, BranchingOnRows])
def test_an_algorithm_that_branches_on_values_runs_in_the_loop(kind, caplog):
    with caplog.at_level("INFO"):
        run = simulation("mlp", kind(), "auto")
    assert form(run) == "loop"
    assert "engine loop: the algorithm gives other results for several clients" in caplog.text
    with pytest.raises(
        lamina.BadInput, match="engine='stacked' is not possible here: the algorithm gives other results"
    ):
        simulation("mlp", kind(), "stacked")


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm_of_ours_can_be_stacked(name):
    """`engine="stacked"` refuses an algorithm whose step mixes clients."""
    for preset in (None, *lamina.algorithms.find(name).card.presets):
        assert form(simulation("mlp", lamina.create(name, preset), "stacked")) == "stacked"


@pytest.mark.long
def test_a_run_does_not_import_the_compiler():
    """torch.compile's package takes seconds to import, and many corners of torch import it by the way."""
    code = """
import sys, torch, lamina
x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
net = lamina.models.create("small_cnn", (1, 8, 8), 3, seed=0)
for engine in ("stacked", "loop"):
    lamina.Simulation(net, (x, y), "fedlamb", clients=4, test=(x, y), device="cpu", engine=engine).run(1)
print("torch._dynamo" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("False")


def test_simulations_of_the_same_model_only_share_the_choice_of_an_engine():
    first = noise(lr=0.1)
    assert noise(1, lr=0.2).engine.forward is first.engine.forward
    tanh = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    assert noise(net=tanh).engine.forward is not first.engine.forward
    mse = noise(loss=lambda outputs, targets: outputs[:, 0] ** 2)
    assert mse.engine.forward is not first.engine.forward
    captured = noise(engine="captured")
    assert noise(engine="captured").engine.forward is not captured.engine.forward  # it belongs to its own model
