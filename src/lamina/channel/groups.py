"""Groups of neighbouring numbers of a vector, which share a scale: whole layers, or buckets of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Groups:
    """The groups of a layout: `bucket` numbers each, or whole layers."""

    def __init__(self, sizes: tuple[int, ...], bucket: int | None) -> None:
        self.sizes = [
            length
            for size in sizes
            for length in ([size] if bucket is None else [min(bucket, size - at) for at in range(0, size, bucket)])
        ]
        # the runs of groups of one length, which are reduced together: their number, and the length
        self._runs: list[tuple[int, int]] = []
        for length in self.sizes:
            if self._runs and self._runs[-1][1] == length:
                self._runs[-1] = (self._runs[-1][0] + 1, length)
            else:
                self._runs.append((1, length))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, sizes: tuple[int, ...], bucket: int | None) -> Groups:
        """Return the groups of a layout; the same object again for the same layout."""
        return cls(sizes, bucket)

    def largest(self, values: Tensor) -> Tensor:
        """Return every group's largest magnitude [..., groups]."""
        pieces = torch.split(values, [count * length for count, length in self._runs], -1)
        grouped = [
            piece.reshape(*piece.shape[:-1], count, length).abs().amax(-1)
            for piece, (count, length) in zip(pieces, self._runs, strict=True)
        ]
        return torch.cat(grouped, -1)

    def spread(self, per_group: Tensor) -> Tensor:
        """Repeat one number per group over the group [..., n]."""
        pieces = torch.split(per_group, [count for count, _ in self._runs], -1)
        spread = [
            piece.unsqueeze(-1).expand(*piece.shape, length).reshape(*piece.shape[:-1], -1)
            for piece, (_, length) in zip(pieces, self._runs, strict=True)
        ]
        return spread[0] if len(spread) == 1 else torch.cat(spread, -1)


def positive(scale: Tensor) -> Tensor:
    """Return scales to divide by: one in place of zero, as all numbers of such a group are zero."""
    return torch.where(scale > 0, scale, 1.0)
