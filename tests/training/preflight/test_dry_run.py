"""The dry run: which samples it takes, and how often it runs the model."""

import pytest
import torch
from torch import nn

import lamina
from lamina.data.dataset import as_dataset
from lamina.objective.objective import Objective
from lamina.training.preflight.dry_run import DryRun, Pairs

X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


class Counted(nn.Module):
    """Counts the passes of all its copies."""

    passes = 0

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        Counted.passes += 1
        return self.body(x)


def own_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(("settings", "passes"), [
    ({}, 4 + 2),  # twice in both modes, once for the gradients, and once for their rounding
    ({"test": (X, Y)}, 4 + 2 + 1),
    ({"test": (X, Y), "metrics": ["f1", "accuracy"], "loss": own_loss}, 4 + 2 + 1),
])  # fmt: skip
def test_all_checks_share_the_passes(settings, passes):
    Counted.passes = 0
    lamina.Simulation(Counted(nn.Linear(4, 3)), (X, Y), "fedavg", clients=2, engine="loop", device="cpu", **settings)
    assert Counted.passes == passes


def dry_run(module, y=Y, loss="cross_entropy"):
    return DryRun(Objective(module, loss), as_dataset((X, y)), "train", rows=1)


def test_the_samples_have_several_targets():
    assert dry_run(nn.Linear(4, 3), y=(torch.arange(60) == 59).long()).targets.tolist() == [0, 1]
    assert dry_run(nn.Linear(4, 3), y=torch.zeros(60, dtype=torch.int64)).targets.tolist() == [0, 0]
    assert dry_run(nn.Linear(4, 3), loss=own_loss).targets.tolist() == [0, 1, 1, 2, 0, 1]


class Noisy(nn.Linear):
    """Draws in a mode, from torch's generator or from one of its own."""

    def __init__(self, mode, generator=None):
        super().__init__(4, 3)
        self.mode, self.generator = mode, generator

    def forward(self, x):
        noise = torch.rand(len(x), 3, generator=self.generator) if self.training == self.mode else 0.0
        return super().forward(x) + noise


@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.parametrize("mode", [True, False])
def test_a_module_that_draws_random_numbers_is_random(mode, generator):
    assert dry_run(Noisy(mode, generator)).is_random


def test_dropout_from_streams_is_not_random():
    assert not dry_run(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))).is_random


def test_a_pass_changes_no_parameter_and_no_buffer():
    run = dry_run(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    start, mean = run.objective.start.clone(), run.objective.buffers["0.running_mean"].clone()
    assert run.training.error is None
    assert torch.equal(run.objective.start, start)
    assert torch.equal(run.objective.buffers["0.running_mean"], mean)


def test_pairs_of_samples_are_noticed():
    for outputs, found in ((torch.ones(5, 1), True), (torch.ones(5), False)):
        with Pairs(5) as pairs:
            _ = outputs - torch.ones(5)
        assert pairs.found is found
