"""States with one number per layer: the same numbers in every engine, on the wire and in checkpoints."""

import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup, assert_like_the_simulation
from lamina.algorithms.rehearsal import rehearse
from lamina.flower import wire
from lamina.rounds.ledger import wire_cost
from per_layer import PerLayer, PerModule
from small_simulations import assert_same, reference, simulation, take_gpu_path

TENSORS = 4  # of an MLP


@pytest.mark.parametrize("kind", [PerLayer, PerModule])
def test_the_contract_allows_numbers_per_layer(kind):
    rehearse(kind())
    assert tuple(wire_cost(kind())) == (1, 1, 0)  # in models


@pytest.mark.parametrize("engine", ["stacked", "captured", "gpu path"])
@pytest.mark.parametrize("kind", [PerLayer, PerModule])
@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_engines_agree(kind, engine, aggregation):
    loop = reference("cnn", kind(), 2, aggregation=aggregation)
    other = simulation("cnn", kind(), "stacked" if engine == "gpu path" else engine, aggregation=aggregation)
    if engine == "gpu path":
        take_gpu_path(other, channels_last=True)
    other.run(2)
    assert_same(other.state, loop.state, 1e-9)
    count = len(loop.objective.layers.group_sizes(kind().grouping))
    assert loop.state.server.scale.shape == other.state.server.scale.shape == (count,)
    assert len(set(loop.state.server.scale.tolist())) == count
    assert all(float(client.rounds) == int(client.rounds) > 0 for client in other.state.clients.values())


def test_the_ledger_counts_one_number_per_layer():
    run = simulation("mlp", PerLayer(), "stacked")
    size = (run.objective.layers.size + TENSORS) * 8
    assert [(row["bytes_down"], row["bytes_up"]) for row in run.run(2)] == [(3 * size, 3 * size)] * 2


def test_members_of_a_population_have_their_own():
    given = [{"algorithm": PerLayer(beta=beta), "lr": lr} for beta, lr in ((0.9, 0.1), (0.5, 0.02))]
    members, alone = ([simulation("mlp", engine="stacked", **own) for own in given] for _ in range(2))
    lamina.Population(members).run(3)
    for member, own in zip(members, alone, strict=True):
        own.run(3)
        assert_same(member.state, own.state, 1e-12)


def test_a_model_of_single_numbers():
    """Vectors, numbers per layer and numbers per client then have nearly the same shape."""
    x = torch.arange(12.0, dtype=torch.float64).reshape(12, 1) / 10
    for model in (nn.Linear(1, 1), nn.Linear(1, 1, bias=False)):
        runs = [
            lamina.Simulation(
                model.double(), (x, 2 * x), PerLayer(), loss="mse", clients=3, lr=0.1, engine=engine, device="cpu"
            )
            for engine in ("loop", "stacked")
        ]
        for run in runs:
            run.run(3)
        assert_same(runs[1].state, runs[0].state, 1e-9)


def test_a_restored_simulation_continues(tmp_path):
    whole, half, rest = (simulation("mlp", PerLayer(), "stacked") for _ in range(3))
    whole.run(4)
    half.run(2)
    half.save(tmp_path)
    rest.restore(tmp_path)
    rest.run(2)
    assert_same(rest.state, whole.state, 0.0)


def test_a_federation_agrees_with_its_simulation(tmp_path):
    setup = Setup(tmp_path, PerLayer(), more={"aggregation": "mean"})
    setup.run()
    assert_like_the_simulation(setup)


def test_a_federation_refuses_what_the_class_declares_impossible(tmp_path):
    def negative(grid, node, message, reply):
        if reply.has_content() and "up" in reply.content and node == next(iter(grid.contexts)):
            scale = wire.decode(reply.content["up"]["scale"], torch.zeros(TENSORS))
            reply.content["up"]["scale"] = wire.encode(-scale)
        return reply

    setup = Setup(tmp_path, PerLayer(), rounds=1, participation=1.0, more={"quorum": 0.5})
    setup.run(setup.grid(on_reply=negative))
    assert "'scale' has negative entries" in str(setup.journal[-1])
    assert setup.journal[-1]["complete"]
