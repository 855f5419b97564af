"""The step that is recorded before round 1 is the one that round 1 takes."""

import copy

import pytest
import torch
from torch import nn

import lamina
from lamina.data.feed import Augment
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.graphs import CapturedSteps, structure
from lamina.engines.stacked.precompile import first_work, precompile


def simulation(algorithm="fedlada", **settings):
    torch.manual_seed(0)
    data = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 4
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 4)
    )
    settings = {"clients": 4, "participation": 0.5, "batch_size": 5, "local_steps": 1} | settings
    return lamina.Simulation(model, data, algorithm, engine="stacked", **settings)


SETTINGS = [
    *({"algorithm": name} for name in sorted(lamina.algorithms.BUILT_IN)),
    {"clip": 1.0},
    {"algorithm": "scaffold", "clip": 1.0},
    {"augmentation": Augment(pad=1)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_step_that_is_recorded_is_that_of_round_1(settings, monkeypatch):
    run, taken = simulation(**settings), []
    take_steps = Stacked._take_steps

    def watched(self, problem, work, filled):
        if not problem.summed:
            taken.append(work)
        return take_steps(self, problem, work, filled)

    monkeypatch.setattr(Stacked, "_take_steps", watched)
    generators, buffers = torch.get_rng_state(), copy.deepcopy(run.objective.buffers)
    work = first_work(run.engine, cohort=2, batch=5)
    CapturedSteps(run.engine.problem, work, pool=None).launches(work)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in run.objective.buffers.items())
    assert torch.equal(torch.get_rng_state(), generators)
    run.run(1)
    first = taken[0]
    assert structure(work) == structure(first)
    assert [value is None for value in work.batches] == [value is None for value in first.batches]
    assert work.local.y.shape == first.local.y.shape == (2, run.objective.layers.size)
    assert {name: buffer.shape[1:] for name, buffer in work.buffers.items()} == {
        name: buffer.shape[1:] for name, buffer in first.buffers.items()
    }


def test_a_model_with_private_parts_is_recorded_as_one_without():
    run = simulation(private=["5.*"])
    work = first_work(run.engine, cohort=2, batch=5)
    assert CapturedSteps(run.engine.problem, work, pool=None).launches(work) == []  # on a CPU no kernel is launched


def test_without_a_gpu_nothing_is_compiled():
    run = simulation()
    precompile(run.engine, 2, 5)
