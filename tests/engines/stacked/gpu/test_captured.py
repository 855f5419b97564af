"""Captured steps of any module on a GPU: the loop's numbers, and what cannot be captured runs in the loop."""

import copy

import pytest
import torch
from torch import nn

import lamina

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)


class Positions(nn.Module):
    """A transformer with dropout, and a parameter in the outermost module."""

    def __init__(self):
        super().__init__()
        self.place, self.embed, self.head = nn.Parameter(torch.randn(1, 8, 16) / 8), nn.Linear(4, 16), nn.Linear(16, 5)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x) + self.place).mean(1))


class Depthwise(nn.Module):
    """Grouped convolutions with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.drop, self.head = nn.BatchNorm2d(8), nn.Dropout(0.2), nn.Linear(256, 5)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.deep(self.wide(x.unsqueeze(1))))).flatten(1)))


class Recurrent(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Reading(Recurrent):
    """Copies a value to the host."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().cpu().numpy() > 1e9 else 2.0)


def simulation(model, algorithm="fedlada", engine="auto", **settings):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(400, 8, 4, generator=generator), torch.randint(0, 5, (400,), generator=generator)
    clients = [range(40 * i, 40 * i + 20 + 3 * i) for i in range(6)]  # short batches, unequal numbers of steps
    settings = {"participation": 0.5, "batch_size": 8, "epochs": 2, "lr": 0.001, "clip": 1.0, "seed": 1} | settings
    return lamina.Simulation(model, data, algorithm, clients=clients, engine=engine, device="cuda", **settings)


@pytest.mark.parametrize("algorithm", lamina.registry())
@pytest.mark.parametrize("kind", [Positions, Depthwise, Recurrent])
def test_captured_steps_are_the_loops(kind, algorithm):
    torch.manual_seed(0)
    model = kind()
    runs = [simulation(copy.deepcopy(model), algorithm, engine) for engine in ("captured", "loop")]
    for run in runs:
        run.run(5)
    captured, loop = (run.state for run in runs)
    moved = (loop.server.x - runs[1].objective.start).norm()
    assert (captured.server.x - loop.server.x).norm() < 2e-3 * moved  # rounding grows over 30 steps
    for name, buffer in loop.buffers.items():
        assert torch.allclose(captured.buffers[name].double(), buffer.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [Positions, Depthwise, Recurrent])
def test_one_captured_step_is_exact(kind):
    torch.manual_seed(0)
    model = kind()
    settings = {"epochs": None, "local_steps": 1}
    runs = [simulation(copy.deepcopy(model), "fedavg", engine, **settings) for engine in ("captured", "loop")]
    for run in runs:
        run.run(1)
    captured, loop = (run.state.server.x for run in runs)
    assert (captured - loop).norm() < 1e-6 * loop.norm()


def test_bf16_keeps_weights_in_float32_and_learns_as_the_loop_does():
    torch.manual_seed(0)
    model = Positions()
    runs = [simulation(copy.deepcopy(model), engine=engine, precision="bf16") for engine in ("captured", "loop")]
    losses = [run.run(5).column("train_loss") for run in runs]
    assert runs[0].state.server.x.dtype == torch.float32
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_gpu_trains_recurrent_models_apart_unless_they_are_many():
    assert simulation(Recurrent()).engine.name == "captured"
    data = torch.randn(400, 8, 4), torch.arange(400) % 5
    many = lamina.Simulation(Recurrent(), data, "fedavg", clients=40, device="cuda")
    assert many.engine.name == "stacked"


def test_what_cannot_be_captured_runs_in_the_loop_and_the_gpu_goes_on(caplog):
    torch.manual_seed(0)
    with caplog.at_level("INFO", logger="lamina"):
        run = simulation(Reading())
    assert run.engine.name == "loop"
    assert "engine loop: " in caplog.text
    run.run(1)
    with pytest.raises(lamina.BadInput, match=r"engine='captured' is not possible here: "):
        simulation(Reading(), engine="captured")
    simulation(Recurrent()).run(1)
