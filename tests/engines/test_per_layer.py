"""States with one number per layer: the same numbers in every engine, on the wire and in checkpoints."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup, assert_like_the_simulation
from lamina.algorithms.contract import per_client, per_layer
from lamina.algorithms.rehearsal import rehearse
from lamina.flower import wire
from lamina.rounds.ledger import wire_cost
from small_simulations import assert_same, reference, simulation, take_gpu_path

TENSORS = 4  # of an MLP


class Server(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor  # [..., layers], the mean of the clients'


class Client(NamedTuple):
    scale: torch.Tensor  # [..., layers], its own
    rounds: torch.Tensor  # [..., 1]


class Local(NamedTuple):
    y: torch.Tensor
    scale: torch.Tensor
    steps: torch.Tensor


class Up(NamedTuple):
    delta: torch.Tensor
    scale: torch.Tensor


class PerLayer(lamina.Algorithm):
    """SGD whose every layer is divided by a moving average of its gradient's norm, kept by clients and the server."""

    non_negative = ("scale",)
    beta: lamina.Number = lamina.option(0.9, "decay rate of the averages", low=0.0, high=1.0)

    def init(self, x, layers):
        return Server(x, per_layer(x, layers, 1.0, self.grouping))

    def client_init(self, x, layers):
        return Client(per_layer(x, layers, 1.0, self.grouping), per_client(x))

    def begin(self, down, client, info):
        return Local(down.x, (down.scale + client.scale) / 2, per_client(down.x))

    def step(self, local, down, grad, lr, layers):
        norms = layers.norms(grad, self.grouping)
        scale = self.beta * local.scale + (1 - self.beta) * norms
        return Local(local.y - lr * grad / layers.spread(scale, self.grouping), scale, local.steps + 1)

    def finish(self, local, down, client, info):
        return Up(local.y - down.x, local.scale), Client(local.scale, client.rounds + local.steps / info.steps)

    def update(self, server, up, info):
        return Server(server.x + up.delta, torch.maximum(server.scale / 2, up.scale))


class PerModule(PerLayer):
    """The same with one number per module."""

    grouping = "module"


PerLayer = lamina.algorithm("per_layer", title="Per layer", reference="-", lr=0.1)(PerLayer)
PerModule = lamina.algorithm("per_module", title="Per module", reference="-", lr=0.1)(PerModule)
for kind in (PerLayer, PerModule):  # so that no other test finds them
    del lamina.registry()[kind.card.name]


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
