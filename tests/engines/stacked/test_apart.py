"""Clients apart: every algorithm and kind of batch gives the loop's trajectory. On a CPU nothing is captured."""

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.stacked import graphs
from small_simulations import PARTS, assert_same, form, reference, simulation


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm_agrees_with_the_loop(name):
    run = simulation("batch_norm", name, "captured", clip=0.5)
    assert form(run) == "captured"
    history, loop = run.run(2), reference("batch_norm", name, 2, clip=0.5)
    assert_same(run.state, loop.state, 1e-9)
    assert history.column("train_loss") == pytest.approx(loop.history.column("train_loss"), rel=1e-9)
    assert history.column("bytes_up") == loop.history.column("bytes_up")


def test_members_of_a_population_end_as_if_alone():
    settings = [{"seed": 3, "lr": 0.01}, {"seed": 4, "lr": 0.02}]
    members = [simulation("cnn", "fedlamb", "captured", **more) for more in settings]
    lamina.Population(members).run(2)
    for member, more in zip(members, settings, strict=True):
        assert_same(member.state, reference("cnn", "fedlamb", 2, **more).state, 1e-9)


def test_a_batch_of_a_size_that_is_not_captured_runs_all_the_same(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_SIZES", 1)
    run = simulation("cnn", "fedlada", "captured")
    run.run(2)
    slots = [slot for of_kind in run.engine.graphs._slots.values() for slot in of_kind]
    assert {size for slot in slots for _, size in slot._graphs} <= {4}
    assert not any(slot._sent_addresses for slot in slots)  # only graphs keep their tables
    assert_same(run.state, reference("cnn", "fedlada", 2).state, 1e-9)


class Checkpointed(nn.Module):
    """Runs its layers again in the backward pass, when the module must still hold the client's parameters."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False))


def test_activation_checkpointing():
    torch.manual_seed(0)
    model = Checkpointed().double()
    data = torch.randn(48, 8, dtype=torch.float64), torch.arange(48) % 3
    settings = {"clients": PARTS, "batch_size": 4, "lr": 0.1, "device": "cpu"}
    captured, loop = (lamina.Simulation(model, data, "fedlada", engine=e, **settings) for e in ("captured", "loop"))
    captured.run(2)
    loop.run(2)
    assert_same(captured.state, loop.state, 1e-9)
