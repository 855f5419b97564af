"""Local steps of many rows: their batches, and the parts that an algorithm's step gets."""

import dataclasses

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms import FedAvg
from lamina.algorithms.contract import LocalModel, Model
from lamina.algorithms.primitives import clip_by_norm
from lamina.algorithms.rehearsal import TINY
from lamina.engines.stacked.independence import parts_of
from lamina.engines.stacked.steps import Batches, LocalWork, NoBroadcast, Summing, SumOfGradients
from lamina.objective.layers import Layers
from small_simulations import PARTS, assert_as_in_the_loop, assert_same, reference


@pytest.mark.parametrize("gpu_path", [False, True])
@pytest.mark.parametrize("name", ["fedcm", "scaffold", "fedadam_star"])
def test_a_clipped_direction_takes_the_place_of_a_clipped_gradient(name, gpu_path):
    """The norm is that of a client's whole vector, so the state cannot be kept in one part per layer."""
    algorithm = lamina.create(name, clip_direction=0.05, decay=0.1)
    assert parts_of(algorithm, TINY, torch.device("cpu")) == [TINY]
    assert_as_in_the_loop("mlp", algorithm, gpu_path=gpu_path, clip=0.01)
    with_clip, without = (reference("mlp", algorithm, 3, **more) for more in ({"clip": 0.01}, {}))
    assert_same(with_clip.state, without.state, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class WholeNorm(FedAvg):
    """Normalises the whole gradient: its step couples all layers."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad / torch.linalg.vector_norm(grad, dim=-1, keepdim=True), lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class ClipsInside(FedAvg):
    """Clips the whole gradient in its own step: couples layers, but only when the gradient is long."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, clip_by_norm(grad, 0.5), lr, layers)


def test_an_algorithm_that_couples_layers_gets_whole_vectors():
    for algorithm in (WholeNorm(), ClipsInside(), lamina.FedLamb(layers="module")):
        assert_as_in_the_loop("cnn", algorithm)


def test_parameters_that_are_added_share_a_gradient_and_get_a_step_each():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))

        def forward(self, x):
            return x @ (self.a + self.b)

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(48, 5, generator=generator, dtype=torch.float64), torch.arange(48) % 3
    ends = []
    for engine in ("loop", "captured"):
        torch.manual_seed(0)
        run = lamina.Simulation(Added().double(), data, "fedavg", clients=PARTS, lr=0.1, device="cpu", engine=engine)
        run.run(3)
        ends.append(run.state)
    assert_same(ends[1], ends[0], 1e-9)


def test_batches_that_are_equally_short_are_cut_and_others_stay_padded():
    samples = torch.arange(16).reshape(2, 2, 4)
    batches = Batches(samples, torch.tensor([[3, 2], [3, 1]]), samples + 100, torch.tensor([[5, 6], [7, 8]]))
    first, second = batches.at(0), batches.at(1)
    assert first.counts is None
    assert torch.equal(first.samples, samples[:, 0, :3])
    assert torch.equal(first.keys, samples[:, 0, :3] + 100)
    assert first.streams.tolist() == [5, 7]
    assert second.counts.tolist() == [2, 1]
    assert torch.equal(second.samples, samples[:, 1, :2])


def test_the_work_of_one_row_has_its_own_numbers():
    column = torch.tensor([[0.1], [0.2]])
    values, samples = torch.arange(6.0).reshape(2, 3), torch.arange(8).reshape(2, 1, 4)
    work = LocalWork(
        algorithm=lamina.FedLamb(decay=column), local=LocalModel(values), down=Model(-values),
        buffers={"mean": values}, batches=Batches(samples, torch.tensor([[4], [2]]), None, None), lr=column, clip=0.5,
    )  # fmt: skip
    row = work.row(1)
    assert (work.rows, row.rows) == (2, 1)
    assert torch.equal(row.algorithm.decay, column[1:])
    assert torch.equal(row.lr, column[1:])
    assert row.clip == 0.5
    assert torch.equal(row.local.y, values[1:])
    assert torch.equal(row.down.x, -values[1:])
    assert torch.equal(row.buffers["mean"], values[1:])
    assert torch.equal(row.batches.samples, samples[1:])
    assert row.batches.counts is None


def test_the_gradient_over_all_data_is_a_sum_of_steps_that_stay():
    layers, start = Layers({"w": (2,)}), Summing(torch.ones(1, 2), torch.zeros(1, 2))
    local = start
    for gradient in (torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])):
        local = SumOfGradients().step(local, NoBroadcast(), gradient, 0.1, layers)
    assert torch.equal(local.y, start.y)
    assert local.total.tolist() == [[11.0, 22.0]]
