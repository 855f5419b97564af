"""Embedding tables of many clients give the loop's trajectory."""

import pytest
import torch
from torch import nn

from lamina.engines.stacked.folding import CannotStack
from lamina.engines.stacked.layers.modules import stack
from stacked_layers import Places, assert_as_in_the_loop, data


def test_one_row_of_positions_for_all_samples():
    assert_as_in_the_loop(Places, data())


def stacked(layer, weight):
    """Return the stacked form of a layer with the tables [C, number, features] of several clients."""
    (form,) = stack(nn.Sequential(layer))
    return lambda *inputs: torch.func.functional_call(form, {"weight": weight}, inputs)


def test_every_client_reads_its_own_table():
    weight, ids = torch.randn(2, 5, 3), torch.tensor([[0, 4], [1, 1], [2, 3], [4, 0]])  # two samples of each client
    rows = stacked(nn.Embedding(5, 3), weight)(ids)
    assert torch.equal(rows, torch.cat([weight[0][ids[:2]], weight[1][ids[2:]]]))


def test_the_row_of_the_padding_has_no_gradient():
    weight = torch.randn(2, 5, 3, requires_grad=True)
    rows = stacked(nn.Embedding(5, 3, padding_idx=1), weight)(torch.tensor([[1, 2], [1, 0]]))
    (gradient,) = torch.autograd.grad(rows.sum(), weight)
    assert gradient.sum(2).tolist() == [[0, 0, 3, 0, 0], [3, 0, 0, 0, 0]]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_every_client(mode):
    weight, ids = torch.randn(2, 5, 3), torch.tensor([[0, 1, 4], [1, 1, 1], [2, 3, 1], [4, 0, 0]])
    bags = stacked(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=1), weight)(ids)
    parts = zip(ids.chunk(2), weight, strict=True)
    expected = [torch.nn.functional.embedding_bag(own, table, mode=mode, padding_idx=1) for own, table in parts]
    torch.testing.assert_close(bags, torch.cat(expected))


def test_bags_with_offsets_have_no_stacked_form():
    with pytest.raises(CannotStack, match="EmbeddingBag with offsets has no stacked form"):
        stacked(nn.EmbeddingBag(5, 3), torch.randn(2, 5, 3))(torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
