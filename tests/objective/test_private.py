"""Private parts: which names they cover, and how vectors and records are split and put together."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import lamina
from lamina.objective.layers import Layers
from lamina.objective.objective import Objective
from lamina.objective.private import Private

SHAPES = {"head.weight": (2, 1), "conv.weight": (2, 3, 1, 2), "norm.bias": (2,), "head.bias": (1,)}
BUFFERS = ("norm.mean", "norm.var")
CPU = torch.device("cpu")


def private(*patterns):
    return Private(patterns, Layers(SHAPES), BUFFERS, CPU)


def test_names_match_by_shell_patterns():
    assert private("head.*").layers.names == ("head.weight", "head.bias")
    assert private("*.bias").layers.names == ("norm.bias", "head.bias")
    assert private("norm.*").names == ("norm.bias", "norm.mean", "norm.var")
    assert private("norm.mean").layers is None
    assert private("head.*").shared.names == ("conv.weight", "norm.bias")


@pytest.mark.parametrize("layout", [None, Layers(SHAPES).channels_last()], ids=["usual", "channels last"])
def test_join_undoes_split(layout):
    parts, whole = private("head.*"), torch.arange(2 * 17.0).reshape(2, 17)
    in_layout = whole if layout is None else whole[:, layout.order]
    shared, own = parts.split(in_layout, layout)
    # the parts are in the usual order, whatever the order of the vector
    assert own.tolist() == whole[:, [0, 1, 16]].tolist()
    assert shared.tolist() == whole[:, 2:16].tolist()
    assert parts.join(shared, own, layout).tolist() == in_layout.tolist()


def test_one_shared_vector_serves_many_clients():
    parts = private("head.*")
    joined = parts.join(torch.zeros(14).expand(3, 14), torch.ones(3, 3))
    assert joined.sum(1).tolist() == [3, 3, 3]


class Record(NamedTuple):
    x: torch.Tensor
    by_layer: torch.Tensor
    by_client: torch.Tensor
    absent: None = None


def test_records_split_vectors_and_numbers_per_layer():
    parts = private("head.*")
    whole = Record(torch.arange(17.0), torch.arange(4.0), torch.tensor([5.0]))
    shared, own = parts.split_record(whole)
    assert (shared.by_layer.tolist(), own.by_layer.tolist()) == ([1, 2], [0, 3])
    assert (shared.by_client.tolist(), own.by_client.tolist(), own.absent) == ([5], [5], None)
    again = parts.join_records(shared, own)
    assert (again.x.tolist(), again.by_layer.tolist()) == (whole.x.tolist(), whole.by_layer.tolist())


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["head.weigth"], "matches no trained parameter and no buffer of the model; did you mean 'head.weight'"),
        (["*"], "clients would share nothing"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, words):
    with pytest.raises(lamina.BadInput, match=words):
        private(*patterns)


@pytest.mark.parametrize("given", ["head.*", [3], 3, lambda name: True])
def test_private_must_be_a_list_of_patterns(given):
    with pytest.raises(lamina.BadInput, match="give a list of patterns of names"):
        lamina.Simulation(nn.Linear(2, 2), (torch.ones(8, 2), torch.zeros(8).long()), private=given)


def test_a_frozen_parameter_is_not_private():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].requires_grad_(False)
    with pytest.raises(lamina.BadInput, match=r"private = '1\.\*' matches only frozen parameters, .*leave the"):
        Objective(module, private=["1.*"])


def test_objectives_with_other_private_parts_differ():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "private" in Objective(module, private=["1.*"]).difference(Objective(module))


def test_any_name_of_a_tied_parameter_makes_it_private():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4)
            self.head.weight = self.embed.weight

    assert Objective(Tied(), private=["head.*"]).private.layers.names == ("embed.weight", "head.bias")
