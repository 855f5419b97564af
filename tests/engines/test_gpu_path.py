"""The path of the GPU on a CPU: the same buffers and in-place writes, without the graph."""

import pytest
import torch
from lamina.engines.stacked.graphed import GraphedSteps
from torch import nn

import lamina
from lamina.engines.stacked import engine as stacked_engine
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
    graphs = []

    def counted(*arguments, **options):
        graphs.append(1)
        return GraphedSteps(*arguments, **options)

    monkeypatch.setattr(stacked_engine, "GraphedSteps", counted)
    settings = {"clients": [range(13), range(13, 24), range(24, 48)], "participation": 0.3}
    run = simulation("mlp", "fedlamb", "stacked", **settings)
    take_gpu_path(run)
    run.run(6)
    assert {int(run.plan.round(r).steps.max()) for r in range(1, 7)} == {3, 4, 6}
    rounds = [run.plan.round(r) for r in range(1, 7)]
    kinds = {(plan.steps.max() > 4, bool((plan.filled == 1).any()), bool((plan.filled < 4).any())) for plan in rounds}
    assert len(kinds) < 6  # room for 4 or for 8 steps, a lone sample or none, short batches or none
    assert len(graphs) == len(kinds)
    assert_same(run.state, reference("mlp", "fedlamb", 6, **settings).state, 1e-9)


def test_a_lone_sample_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    run = lamina.Simulation(net, data, "fedavg", clients=8, partition="reallocate", participation=0.5, batch_size=11,
                            device="cpu", engine="stacked")  # 48 samples over 4 clients: 12 = 11 + 1  # fmt: skip
    take_gpu_path(run)
    with pytest.raises(lamina.BadInput, match="BatchNorm cannot train on a batch of one sample"):
        run.run(1)


def test_a_run_continues_uncompiled_if_the_compiler_fails(monkeypatch, caplog):
    def fails(*_arguments, **_settings):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    run = simulation("mlp", "fedlamb", "stacked")
    take_gpu_path(run, compiled=True)
    run.run(2)
    assert "torch.compile fails on this model, so it runs uncompiled: no compiler here" in caplog.text
    assert_same(run.state, reference("mlp", "fedlamb", 2).state, 1e-9)
