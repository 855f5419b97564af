"""Groups of neighbouring numbers: their largest magnitudes, and one number per group spread over the vector."""

import pytest
import torch

from lamina.channel.groups import Groups, positive

SIZES = (5, 1, 4, 4)


@pytest.mark.parametrize("bucket", [None, 1, 2, 3, 100])
def test_groups_end_with_their_layer(bucket):
    values = torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(0))
    lengths, start, largest = [], 0, []
    for size in SIZES:
        for piece in torch.split(values[:, start : start + size], bucket or size, -1):
            lengths.append(piece.shape[-1])
            largest.append(piece.abs().max(-1).values)
        start += size
    groups = Groups.of(SIZES, bucket)
    assert groups.sizes == lengths
    assert torch.equal(groups.largest(values), torch.stack(largest, -1))
    numbers = torch.arange(3.0)[:, None] * 100 + torch.arange(float(len(lengths)))
    assert torch.equal(groups.spread(numbers), torch.repeat_interleave(numbers, torch.tensor(lengths), -1))


def test_a_group_of_zeros_is_divided_by_one():
    assert positive(torch.tensor([0.0, 2.0])).tolist() == [1.0, 2.0]
