"""Finite tensors."""

import pytest
import torch

from lamina.base.finite import all_finite


def test_finite_values_are_found_finite_even_if_their_sum_is_not():
    assert all_finite()
    assert all_finite(torch.ones(2), None)
    assert all_finite(torch.full((4,), 3e38))
    assert all_finite(torch.full((4,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found(value):
    bad = torch.ones(1000)
    bad[500] = value
    assert not all_finite(None, torch.ones(2), bad)
    assert not all_finite(torch.tensor([torch.inf, -torch.inf]))
