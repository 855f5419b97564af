"""Which form is taken: stacked layers, captured steps or the loop; and why."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.devices import has_bf16_instructions
from small_simulations import PARTS, assert_same, form, simulation


class Direct(nn.Module):
    """Parameters used outside any layer: no stacked form."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3) / 3)

    def forward(self, x):
        return torch.tanh(x) @ self.w


class Sneaky(nn.Module):
    """A layer's weight used directly: stacks without complaint, but wrongly; the probe must notice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x) * (1 + (x @ self.fc.weight.transpose(-1, -2)).mean())


class Recurrent(nn.Module):
    """An LSTM of a packed sequence, which has no stacked form."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        lengths = torch.full((len(x),), 2)
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), 2, 4), lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][0][-1])


@pytest.mark.parametrize("model", [Direct, Recurrent])
def test_fallbacks_give_the_same_result_and_say_why(model, caplog):
    torch.manual_seed(0)
    net, x = model().double(), torch.randn(48, 8, dtype=torch.float64)
    data = (x, torch.arange(48) % 3)
    with caplog.at_level("INFO", logger="lamina"):
        auto = lamina.Simulation(net, data, "fedlamb", clients=PARTS, batch_size=4, device="cpu")
    assert len([r for r in caplog.records if r.name.startswith("lamina")]) == 1
    assert ("parameters of Direct itself have no stacked form; move them into a submodule" in caplog.text) == (
        model is Direct
    )
    assert form(auto) == "loop"  # on a CPU nothing can be captured
    engines = ["loop", "captured"] if model is Direct else ["loop"]
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


def test_a_module_that_mixes_samples_or_clients_is_not_stacked():
    torch.manual_seed(0)
    data = torch.randn(48, 8, dtype=torch.float64), torch.arange(48) % 3
    assert form(lamina.Simulation(Sneaky().double(), data, "fedavg", clients=PARTS, device="cpu")) != "stacked"


class OwnStatistics(nn.Module):
    """Keeps a running mean of its own, over the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.8).add_(0.2 * x.detach().mean(0))
        return self.fc(x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_module_that_keeps_statistics_of_its_own_keeps_clients_apart(dropout):
    torch.manual_seed(0)
    net, x = nn.Sequential(OwnStatistics(), nn.Dropout(dropout)).double(), torch.randn(48, 8, dtype=torch.float64)
    auto = lamina.Simulation(net, (x, torch.arange(48) % 3), "fedavg", clients=PARTS, batch_size=4, device="cpu")
    assert form(auto) == "loop"
    captured = lamina.Simulation(
        net, (x, torch.arange(48) % 3), "fedavg", clients=PARTS, batch_size=4, device="cpu", engine="captured"
    )
    auto.run(2)
    captured.run(2)
    assert_same(captured.state, auto.state, 1e-9)
    with pytest.raises(
        lamina.BadInput, match=r"computes one value over all samples of a batch|training changes the buffer"
    ):
        lamina.Simulation(net, (x, torch.arange(48) % 3), "fedavg", clients=PARTS, device="cpu", engine="stacked")


def test_a_cpu_without_bf16_instructions_computes_in_fp32_and_says_so(caplog, monkeypatch):
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: False)
    run = lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf16")
    assert run.precision == "fp32"
    assert "this CPU has no bf16 instructions, so the run uses fp32" in caplog.text


def test_bf16_is_never_dropped_in_silence(monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    settings = {"clients": PARTS, "batch_size": 4, "lr": 0.1, "device": "cpu"}
    runs = {
        (engine, precision): lamina.Simulation(net, data, "fedlada", engine=engine, precision=precision, **settings)
        for engine in ("loop", "captured")
        for precision in ("fp32", "bf16")
    }
    ends = {}
    for kind, run in runs.items():
        run.run(2)
        ends[kind] = run.state.server.x
    for engine in ("loop", "captured"):
        change = (ends[engine, "fp32"] - ends[engine, "bf16"]).abs().max()
        assert ends[engine, "bf16"].dtype == torch.float32
        assert 1e-6 < change < 0.05
    assert torch.allclose(ends["loop", "bf16"], ends["captured", "bf16"], atol=1e-3)
    with pytest.raises(lamina.BadInput, match="did you mean 'bf16'"):
        lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf61")


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
    assert "running client by client: the algorithm gives other results for several clients" in caplog.text
    with pytest.raises(
        lamina.BadInput, match="engine='stacked' is not possible here: the algorithm gives other results"
    ):
        simulation("mlp", kind(), "stacked")


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm_of_ours_can_be_stacked(name):
    """`engine="stacked"` refuses an algorithm whose step mixes clients."""
    for preset in (None, *lamina.algorithms.find(name).card.presets):
        assert form(simulation("mlp", lamina.create(name, preset), "stacked")) == "stacked"


@pytest.mark.parametrize("kind", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_an_x86_cpu_needs_more_than_avx512_for_bf16(kind, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not has_bf16_instructions()
    monkeypatch.setattr(torch.cpu, kind, lambda: True)
    assert has_bf16_instructions()


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
