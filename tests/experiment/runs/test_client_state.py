"""The models of a run's clients, read from its checkpoints: ``lamina.load(folder).client(…)``."""

import copy
import shutil
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms import BUILT_IN
from lamina.algorithms.contract import Model

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BY_NAME = {"north": (X[:20], Y[:20]), "south": (X[20:45], Y[20:45]), "west": (X[45:], 1 - Y[45:])}


class Own(NamedTuple):
    v: torch.Tensor


class Both(NamedTuple):
    y: torch.Tensor
    v: torch.Tensor


@lamina.algorithm("two-models", title="Two models", reference="a test", lr=0.1)
class TwoModels(lamina.Algorithm):
    """A client keeps a model of its own beside the shared one."""

    def client_init(self, x, layers):
        return Own(x)

    def begin(self, down, client, info):
        return Both(down.x, client.v)

    def step(self, local, down, grad, lr, layers):
        return Both(local.y - lr * grad, local.v - 2 * lr * grad)

    def finish(self, local, down, client, info):
        up, _ = super().finish(local, down, client, info)
        return up, Own(local.v)

    def update(self, server, up, info):
        return Model(server.x + up.delta)

    def client_model(self, x, client):
        return client.v


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def trained(folder, algorithm="fedadam", data=None, rounds=3, **settings):
    settings = {"private": ["3.*", "1.running_mean"], "lr": 0.1, "batch_size": 5, "device": "cpu", **settings}
    simulation = lamina.Simulation(network(), data or BY_NAME, algorithm, out=folder, **settings)
    simulation.run(rounds)
    return simulation


def same_weights(module, other):
    return all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_a_loaded_client_has_its_own_model(tmp_path):
    simulation = trained(tmp_path / "run", metrics=["accuracy"])
    run = lamina.load(tmp_path / "run")
    assert same_weights(run.model, simulation.model)
    for name, data in BY_NAME.items():
        own = run.client(name)
        model = simulation.client_model(name)
        assert same_weights(own.model, model)
        assert not same_weights(own.model, run.model)
        assert torch.equal(own.predict(data[0]).outputs, model(data[0]))
        right = (model(data[0]).argmax(1) == data[1]).double().mean().item()
        assert own.evaluate(data)["accuracy"] == pytest.approx(right)
    assert same_weights(run.model, simulation.model)  # as it was
    assert "of client 'west'" in repr(run.client("west"))


def test_a_client_that_took_no_part_has_the_initial_private_values(tmp_path):
    simulation = trained(tmp_path / "run", rounds=1, participation=0.34)
    (absent,) = [name for name in ("north", "south") if name not in active(simulation)][:1]
    own = lamina.load(tmp_path / "run").client(absent)
    assert same_weights(own.model, simulation.client_model(absent))
    assert same_weights(own.model, simulation.model)


def active(simulation):
    return {simulation.reserved.names[number] for number in simulation.state.clients}


@pytest.mark.parametrize("channel", [None, {"codec": "sign", "feedback": True}], ids=["plain", "feedback"])
def test_the_algorithms_own_client_models_are_read_the_same_way(channel, tmp_path):
    simulation = trained(tmp_path / "run", TwoModels(), private=None, channel=channel)
    run = lamina.load(tmp_path / "run")
    assert same_weights(run.client("south").model, simulation.client_model("south"))
    assert not same_weights(run.client("south").model, run.model)


def test_an_algorithm_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    trained(tmp_path / "run", TwoModels(), private=None)
    monkeypatch.delattr(f"{__name__}.TwoModels")
    with pytest.raises(lamina.BadInput, match=r"algorithm 'two-models' is your own.*TwoModels"):
        lamina.load(tmp_path / "run").client("north")


@pytest.mark.parametrize("algorithm", sorted(BUILT_IN))
def test_every_algorithm_of_laminas_can_be_read(tmp_path, algorithm):
    """Options may be infinite, which JSON cannot say."""
    simulation = trained(tmp_path / "run", algorithm, rounds=1, lr=0.01)
    assert same_weights(lamina.load(tmp_path / "run").client("south").model, simulation.client_model("south"))


COLUMN = {"columns": {"site": np.array(["b", "a"] * 30, dtype=object)}, "client_column": "site"}


@pytest.mark.parametrize(
    ("data", "settings", "names"),
    [
        (BY_NAME, {}, ["north", "south", "west"]),
        ({30: BY_NAME["north"], 4: BY_NAME["west"]}, {}, [4, 30]),
        (lamina.Dataset(X, Y, **COLUMN), {}, ["a", "b"]),
        ([BY_NAME["north"], BY_NAME["south"], BY_NAME["west"]], {"heldout_clients": [1]}, [0, 2]),
        ((X, Y), {"clients": [range(20), range(20, 40), range(40, 60)], "heldout_clients": [0]}, [1, 2]),
    ],
)
def test_clients_are_called_by_what_the_user_gave(tmp_path, data, settings, names):
    simulation = trained(tmp_path / "run", data=data, rounds=2, **settings)
    run = lamina.load(tmp_path / "run")
    for number, name in enumerate(names):
        expected = copy.deepcopy(simulation.objective.module_at(*simulation.client_parameters(number)))
        assert same_weights(simulation.client_model(name), expected)
        assert same_weights(run.client(name).model, expected)
        assert same_weights(run.client(str(name)).model, expected)  # as on the command line
    for who in (simulation.client_model, run.client):
        with pytest.raises(lamina.BadInput, match=r"there is no client 'nrth'"):
            who("nrth")


def test_a_folder_without_its_checkpoints_says_so(tmp_path):
    trained(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run = lamina.load(tmp_path / "run")
    with pytest.raises(
        lamina.BadInput, match=r"no checkpoint of round 3, .*copy the run's folder with its checkpoints"
    ):
        run.client("north")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    trained(tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("clients-*"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(lamina.BadInput, match=r"client's model cannot be read: .* is damaged"):
        lamina.load(tmp_path / "run").client("north")


def test_there_is_no_client_of_the_best_model_or_of_a_shared_one(tmp_path):
    trained(tmp_path / "run", test=(X, Y), local_test=None, data=(X, Y), clients=3)
    with pytest.raises(lamina.BadInput, match="the best model is the shared one"):
        lamina.load(tmp_path / "run", best=True).client(0)
    trained(tmp_path / "plain", private=None)
    with pytest.raises(lamina.BadInput, match=r"all clients .* use one model"):
        lamina.load(tmp_path / "plain").client("north")
