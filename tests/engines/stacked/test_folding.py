"""Clients are folded into the batch and taken out of it again."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.folding import at_least_float32, linear, per_client, unfold_clients


def test_clients_are_taken_out_of_the_batch():
    x = torch.arange(24).reshape(6, 4)
    assert torch.equal(unfold_clients(x, 3), torch.stack([x[:2], x[2:4], x[4:]]))


@pytest.mark.parametrize("axis", [2, -1])
def test_a_parameter_meets_its_own_clients_features(axis):
    parameter, x = torch.randn(2, 3), torch.zeros(2, 5, 3, 3)
    shifted = x + per_client(parameter, x, axis)
    for client in range(2):
        expected = parameter[client].unsqueeze(1).expand(3, 3) if axis == 2 else parameter[client].expand(3, 3)
        assert torch.equal(shifted[client, 4], expected)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=["vectors", "sequences"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_is_one_per_client(clients, shape, biased):
    torch.manual_seed(0)
    x = torch.randn(clients * shape[0], *shape[1:], 5, dtype=torch.float64)
    weight = torch.randn(clients, 6, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(clients, 6, dtype=torch.float64) if biased else None
    out = linear(x, weight, bias)
    parts = zip(x.chunk(clients), weight, bias if biased else [None] * clients, strict=True)
    expected = torch.cat([F.linear(*part) for part in parts])
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(result.square().sum(), weight)[0] for result in (out, expected)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].is_contiguous()


def test_statistics_are_computed_in_float32_or_better():
    types = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    assert {dtype: at_least_float32(torch.zeros(1, dtype=dtype)) for dtype in types} == types
