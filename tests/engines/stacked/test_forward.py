"""The forward passes of many clients and of one: what they round, share and refuse."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina import models
from lamina.engines.stacked.forward import CapturedForward
from small_simulations import PARTS, assert_same, form
from stacked_layers import Places, Recurrent, data, run


@pytest.mark.parametrize("make", [lambda: Recurrent(nn.LSTM, 5, batch_first=True), Places], ids=["LSTM", "positions"])
def test_bfloat16(make, monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = make(), data()
    exact, rounded = (run(model, (x, y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.precision == "bf16"
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)


class Chosen(nn.Module):
    """Frozen parameters of all kinds: whole numbers, one axis in a layer that is trained, and in one that is not."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.tensor([257, 259, 263, 1, 2, 3]), requires_grad=False)
        self.norm, self.shared, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm.bias = nn.Parameter(torch.full((6,), 1.001), requires_grad=False)
        self.shared.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        wide = torch.cat([x, x.new_zeros(len(x), 300)], 1)
        return self.head(self.norm(self.shared(x)) + wide[:, self.order])


def test_bfloat16_rounds_frozen_parameters_as_it_rounds_trained_ones(monkeypatch):
    """Whole numbers stay: bfloat16 has no 257. So do vectors of layers that add them in float32, such as norms."""
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = Chosen(), data((6,))
    exact, rounded = (run(model, (x.float(), y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)
    frozen = rounded.engine.forward.frozen()
    assert {name: parameter.dtype for name, parameter in frozen.items()} == {
        "order": torch.int64,
        "norm.bias": torch.float32,
        "shared.weight": torch.bfloat16,
        "shared.bias": torch.bfloat16,
        "head.weight": torch.bfloat16,
    }
    assert torch.equal(frozen["order"], model.order)
    assert torch.equal(frozen["norm.bias"], model.norm.bias)


class Rotated(nn.Module):
    """Attention whose queries become float32 in bf16, and its keys do not."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("angles", torch.linspace(0, 1, 6))

    def forward(self, x):
        query, key = self.query(x).unsqueeze(1) * self.angles, self.key(x).unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(query, key, key).squeeze(1))


def test_types_that_do_not_match_in_bfloat16_are_found_before_the_run(monkeypatch, caplog):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    x, y = data((6,))
    with caplog.at_level("INFO", logger="lamina"):
        forms = [form(run(Rotated(), (x.float(), y), "auto", precision=precision)) for precision in ("fp32", "bf16")]
    assert forms == ["stacked", "loop"]
    assert "to have the same dtype" in caplog.text


def test_only_what_autocast_always_rounds_is_rounded_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.place, self.words = nn.Parameter(torch.zeros(1, 4)), nn.Embedding(5, 4)
            self.fc, self.tied = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.tied.weight = self.words.weight

        def forward(self, x):
            return self.tied(self.fc(self.words(x).mean(1) + self.place))

    data = torch.randint(0, 5, (48, 3)), torch.arange(48) % 5
    run = lamina.Simulation(Net(), data, "fedavg", clients=PARTS, device="cpu", engine="captured")
    for precision, rounded in (("fp32", set()), ("bf16", {"fc.weight", "fc.bias"})):
        forward = CapturedForward(run.objective, precision)
        assert {name for name, p in run.model.named_parameters() if forward.rounds(name, p)} == rounded


def test_float32_rounding_is_no_reason_to_fall_back():
    class Steps(nn.Module):
        """Rounds what the norm gives, so that an error in the last bit becomes one in the first."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.GroupNorm(4, 64), nn.Linear(64, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(h * torch.remainder(h.detach() * 2.0**20, 1.0).round())

    torch.manual_seed(0)
    data = torch.randn(48, 64), torch.arange(48) % 3
    assert form(lamina.Simulation(Steps(), data, "fedavg", clients=4, device="cpu")) == "stacked"


class Sneaky(nn.Module):
    """A layer's weight used directly, and a mean over all samples."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x) * (1 + (x @ self.fc.weight.transpose(-1, -2)).mean())


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


def test_bf16_on_a_cpu_says_nothing():
    x = torch.randn(32, 1, 28, 28)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = lamina.Simulation(models.create("mlp", (1, 28, 28), 10, seed=0), (x, torch.arange(32) % 10), "fedavg",
                                clients=2, batch_size=16, device="cpu", precision="bf16")  # fmt: skip
        run.run(1)
    assert not [str(w.message).splitlines()[0] for w in caught]
