"""The sample indices of every client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Labels = Indices


class Parts(Sequence[Indices]):
    """The sample indices of every client, which behave like a list of arrays.

    They are stored as one array and the bounds of every client's part in it, because a million arrays take seconds to
    create and most of a gigabyte.

    >>> parts = Parts.of([np.array([0, 2]), np.array([1])])
    >>> len(parts), parts[0], parts.sizes
    (2, array([0, 2]), array([2, 1]))
    """

    def __init__(self, samples: Indices, bounds: Indices, may_repeat: bool = False) -> None:
        self.samples = samples  # [n], client after client
        self.bounds = bounds  # [clients + 1]: client i holds samples[bounds[i] : bounds[i + 1]]
        self.may_repeat = may_repeat  # whether a sample may be given twice

    @classmethod
    def of(cls, arrays: Sequence[Indices]) -> Parts:
        """Return the same parts in one array."""
        sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
        samples = np.concatenate([np.zeros(0, np.int64), *arrays])
        return cls(samples, np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def by_owner(cls, owners: Labels, clients: int) -> Parts:
        """Return the samples of every client, ascending, from the client of every sample."""
        sizes = np.bincount(owners, minlength=clients)
        return cls(stable_order(owners), np.concatenate([[0], np.cumsum(sizes)]))

    @property
    def sizes(self) -> Indices:
        """The number of samples of every client [clients]."""
        return np.diff(self.bounds)

    def owners(self, positions: Indices) -> Indices:
        """Return the clients that hold the samples at these positions of `samples`."""
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.samples[self.bounds[client] : self.bounds[client + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parts):
            return NotImplemented
        return np.array_equal(self.samples, other.samples) and np.array_equal(self.bounds, other.bounds)

    __hash__ = None  # type: ignore[assignment]


def stable_order(kinds: Labels) -> Labels:
    """Return the stable order that sorts whole numbers, as few bits: numpy then needs one pass over each byte."""
    if not len(kinds):
        return np.zeros(0, np.int64)
    from_zero = kinds - kinds.min()
    return np.argsort(from_zero.astype(np.min_scalar_type(int(from_zero.max()))), kind="stable")
