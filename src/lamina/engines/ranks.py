"""Share the clients of a round among the processes that torchrun started.

Every rank trains its share of the cohort, and one all-reduce per round adds up the sums. A client always belongs to the
same rank (its number modulo the number of ranks), so its state is never sent. Shares may be unequal; a rank without
clients adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lamina.base.errors import BadInput, Diverged
from lamina.engines.state import RoundSums

T = TypeVar("T")


class Ranks(NamedTuple):
    """The rank of this process, and the number of ranks."""

    rank: int
    world: int

    @classmethod
    def current(cls) -> Ranks:
        """Return the rank in the process group that torchrun started, or that of a single process."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def owns(self, client_id: int) -> bool:
        """Return whether this rank trains a client and keeps its state."""
        return client_id % self.world == self.rank

    def of_first(self, make: Callable[[], T]) -> T:
        """Return what a function returns in the first rank, the only one that calls it."""
        if self.world == 1:
            return make()
        shared: list[Any] = [None]
        try:
            if self.rank == 0:
                shared = [(make(),)]
        finally:  # the others do not wait for ever, even if it fails
            dist.broadcast_object_list(shared)
        if shared[0] is None:
            raise BadInput("the first process has failed: its message says why")
        return cast(T, shared[0][0])

    def add(self, vector: Tensor) -> Tensor:
        """Return the sum of a vector over all ranks."""
        if self.world > 1:
            dist.all_reduce(vector)
        return vector

    def gather(self, by_client: dict[int, Any]) -> dict[int, Any]:
        """Return the entries of all ranks, each of which has those of its own clients."""
        if self.world == 1:
            return by_client
        everyones: list[Any] = [None] * self.world
        dist.all_gather_object(everyones, by_client)
        return {client: value for theirs in everyones for client, value in theirs.items()}

    def combine(self, sums: list[RoundSums], layouts: list[tuple[Any, Tensor]], failed: dict[int, Diverged]) -> None:
        """Add up every member's sums over the ranks in one all-reduce, and their spreads in a second, tiny one.

        Args:
            sums: every member's sums over this rank's rows; completed in place.
            layouts: an Up and trust ratios of zeros for every member, for ranks without clients.
            failed: the members that diverged here; completed with those that diverged elsewhere.
        """
        if self.world == 1:
            return
        own_ups = [total.up for total in sums]
        of_members = [
            (
                zero_up if total.up is None else total.up,
                dict(sorted(total.buffers.items())),
                zero_up.delta.new_tensor([total.loss, total.within, float(e in failed)]),
                zero_trust if total.trust is None else total.trust,
            )
            for e, (total, (zero_up, zero_trust)) in enumerate(zip(sums, layouts, strict=True))
        ]
        values = [leaf for leaf in tree_leaves(of_members) if isinstance(leaf, Tensor)]
        flat = self.add(torch.cat([value.reshape(-1).to(values[0].dtype) for value in values]))
        pieces = iter(torch.split(flat, [value.numel() for value in values]))
        summed = tree_map_only(Tensor, lambda value: next(pieces).reshape(value.shape), of_members)
        somewhere = False
        for total, (up, buffers, numbers, trust) in zip(sums, summed, strict=True):
            total.up, total.buffers, total.trust = up, buffers, trust if len(trust) else None
            total.loss, total.within, flag = numbers.tolist()
            somewhere = somewhere or flag > 0
        self._combine_spreads(sums, own_ups)
        if somewhere:
            everyones: list[Any] = [None] * self.world
            failures = {e: (str(error), error.round, error.client, error.layer) for e, error in failed.items()}
            dist.all_gather_object(everyones, failures)
            for theirs in everyones:
                for e, (text, number, client, layer) in theirs.items():
                    failed.setdefault(e, Diverged(text, round=number, client=client, layer=layer))

    def _combine_spreads(self, sums: list[RoundSums], own_ups: list[Any]) -> None:
        """Add up every member's spread around the mean of all ranks; `own_ups` are the sums over this rank's rows."""
        spreads = []
        for total, own in zip(sums, own_ups, strict=True):
            gap = None if own is None else own.delta.double() / total.weight - total.up.delta.double()
            spreads.append(total.spread + (0.0 if gap is None else total.weight * float(torch.dot(gap, gap))))
        summed = self.add(torch.tensor(spreads, dtype=torch.float64, device=sums[0].up.delta.device))
        for total, spread in zip(sums, summed.tolist(), strict=True):
            total.spread, total.weight = spread, 1.0


def everywhere(here: bool) -> bool:
    """Return whether a condition holds in all processes."""
    ranks = Ranks.current()
    device = "cuda" if ranks.world > 1 and dist.get_backend() == "nccl" else "cpu"
    return int(ranks.add(torch.tensor(int(not here), device=device))) == 0
