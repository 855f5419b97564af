"""Captured steps as a CPU runs them: the same buffers and in-place writes as on a GPU, without the graph."""

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.stacked import graphs
from lamina.engines.stacked.graphs import CapturedSteps, Graphs, size_class
from small_simulations import assert_as_in_the_loop, assert_same, reference, simulation, take_gpu_path


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm(name):
    assert_as_in_the_loop("cnn", lamina.create(name), gpu_path=True)


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb", "scaffold"])
def test_buffers_and_clipping(name):
    assert_as_in_the_loop("batch_norm", lamina.create(name), gpu_path=True, clip=0.5)


def test_control_variates():
    assert_as_in_the_loop("cnn", lamina.create("mime", "mime"), gpu_path=True)


def test_one_graph_is_kept_while_the_number_of_steps_varies(monkeypatch):
    captured = []

    def counted(*arguments):
        captured.append(1)
        return CapturedSteps(*arguments)

    monkeypatch.setattr(graphs, "CapturedSteps", counted)
    settings = {"clients": [range(13), range(13, 24), range(24, 48)], "participation": 0.3}
    run = simulation("mlp", "fedlamb", "stacked", **settings)
    take_gpu_path(run)
    run.run(6)
    assert {int(run.plan.round(r).steps.max()) for r in range(1, 7)} == {3, 4, 6}
    rounds = [run.plan.round(r) for r in range(1, 7)]
    kinds = {(plan.steps.max() > 4, bool((plan.filled == 1).any()), bool((plan.filled < 4).any())) for plan in rounds}
    assert len(kinds) < 6  # room for 4 or for 8 steps, a lone sample or none, short batches or none
    assert len(captured) == len(kinds)
    assert_same(run.state, reference("mlp", "fedlamb", 6, **settings).state, 1e-9)


def test_a_lone_sample_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    run = lamina.Simulation(net, data, "fedavg", clients=8, partition="reallocate", participation=0.5, batch_size=11,
                            device="cpu", engine="stacked")  # 48 samples over 4 clients: 12 = 11 + 1  # fmt: skip
    take_gpu_path(run)
    with pytest.raises(lamina.BadInput, match="BatchNorm cannot train on a batch of one sample"):
        run.run(1)


def test_a_cohort_of_varying_size_needs_few_captures(monkeypatch):
    """Bernoulli sampling: a cohort larger than all before takes new buffers; smaller ones share them."""
    sizes = []

    def counted(problem, work, pool):
        sizes.append(work.rows)
        return CapturedSteps(problem, work, pool)

    monkeypatch.setattr(graphs, "CapturedSteps", counted)
    settings = {"clients": [range(i, i + 4) for i in range(0, 48, 4)], "participation": 0.4, "sampling": "bernoulli"}
    run = simulation("mlp", "fedlamb", "stacked", **settings)
    take_gpu_path(run)
    run.run(8)
    cohorts = [len(run.plan.round(r).cohort) for r in range(1, 9)]
    assert len(set(cohorts)) > 3
    assert sizes == sorted(set(sizes))
    assert max(sizes) == max(cohorts)
    assert_same(run.state, reference("mlp", "fedlamb", 8, **settings).state, 1e-9)


def test_one_capture_serves_all_numbers(monkeypatch):
    """Rates, options and clipping limits are inputs: only the first of three runs captures."""
    captured = []

    def counted(*arguments):
        captured.append(1)
        return CapturedSteps(*arguments)

    monkeypatch.setattr(graphs, "CapturedSteps", counted)
    shared = Graphs()
    for lr, decay, clip in ((0.01, 0.0, 0.5), (0.02, 0.1, 0.7), (0.005, 0.3, 10.0)):
        run = simulation("mlp", lamina.FedLamb(decay=decay), "stacked", lr=lr, clip=clip)
        run.engine.graphs = shared
        run.run(2)
        alone = simulation("mlp", lamina.FedLamb(decay=decay), "loop", lr=lr, clip=clip)
        alone.run(2)
        assert_same(run.state, alone.state, 1e-9)
    assert len(captured) == 1


def test_few_rows_of_a_captured_step_are_idle():
    for rows in range(1, 2000):
        assert rows <= size_class(rows) <= 1.125 * rows
    assert len({size_class(rows) for rows in range(1, 1025)}) < 70
