"""Clients: which samples each holds, and one clear line for lists and numbers that cannot be used."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.data.dataset import Dataset
from lamina.rounds.clients import Clients, deal
from ragged_clients import ragged
from small_linear import X, Y, simulate, weights


def test_a_million_clients_are_built_in_seconds():
    started = time.process_time()
    data = Dataset(torch.zeros(1_000_000, 1), torch.zeros(1_000_000))
    clients = deal(data, 1_000_000, None, seed=0)
    assert time.process_time() - started < 3
    assert clients.count == 1_000_000
    assert len(np.unique(clients.parts.samples)) == 1_000_000


def test_reallocated_clients_are_bounded():
    with pytest.raises(BadInput, match="clients = 1000000000 exceeds the limit of"):
        simulate(clients=10**9, partition=lamina.data.Reallocate(lamina.data.IID()))
    with pytest.raises(BadInput, match="clients"):
        Clients.elsewhere(10**9)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ragged([3, 0]), "client 1 has no samples"),
        (lambda: Clients([], samples=3), "at least one client"),
        (lambda: Clients([[0, 5]], samples=3), "client 0 is given sample 5, but the data have 3 samples"),
    ],
)
def test_bad_clients_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_partition_beside_lists_of_samples_is_refused():
    parts = [range(10), range(10, 20), range(20, 30)]
    for partition in ("iid", "dirichlet", lamina.data.IID()):
        with pytest.raises(lamina.BadInput, match=r"partition.*clients.*lists.*give one of them"):
            simulate(clients=parts, partition=partition)
    assert simulate(clients=parts).plan.clients.count == 3
    assert torch.equal(weights(simulate()), weights(simulate(partition="iid")))  # iid is the default


@pytest.mark.parametrize(("clients", "message"), [
    ([[0, 1, 2], [2, 3, 4]], "sample 2 is given to clients 0 and 1"),
    ([[0, 1], [2, 3, 3], [4]], "sample 3 is given to client 1 twice"),
    ([np.arange(30) < 20, np.arange(30) >= 19], "sample 19 is given to clients 0 and 1"),
])  # fmt: skip
def test_a_sample_given_twice_is_refused(clients, message):
    with pytest.raises(lamina.BadInput, match=message) as error:
        simulate(clients=clients)
    assert "\n" not in str(error.value)


def test_a_column_that_nobody_splits_by_is_named(caplog):
    data = lamina.Dataset(X, Y, columns={"town": np.array(["here", "there"] * 15)})
    for given in ({"clients": 3}, {"partition": lamina.data.ByColumn("town")}):
        lamina.Simulation(nn.Linear(4, 3), data, device="cpu", **given)
    assert not caplog.text
    lamina.Simulation(nn.Linear(4, 3), data, device="cpu")
    assert "partition=lamina.data.ByColumn('town')" in caplog.text
