"""How far the uploads of a chunk lie apart, for `consistency`: distances from means, which nothing cancels in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.engines.stacked.layers.convolution import kernels_for
from lamina.engines.stacked.rows import Row, send
from lamina.engines.state import RoundSums

PIECE_ELEMENTS = 1 << 24  # of a difference in memory at a time


def chunk_distances(
    chunk: Sequence[Row],
    delta: Tensor,
    sums: Sequence[RoundSums],
    totals: Mapping[int, tuple[Any, Any]],
    in_layout: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the squared distances of the rows' deltas from the means of their members' rows in the chunk [rows].

    And those of these means from the means of the members' earlier chunks [members]; 0 if there are none.

    Args:
        chunk: the rows, of one or several members.
        delta: the rows' deltas [rows, p], in the forward pass's layout.
        sums: every member's sums before this chunk.
        totals: the members' sums of uploads with this chunk; a member that diverged has none.
        in_layout: brings vectors into the forward pass's layout.
    """

    def mean(e: int) -> Tensor:
        """Return the mean delta of a member's rows in the chunk."""
        if e not in totals:
            return torch.zeros_like(delta[0])
        weight = sum(row.weight for row in chunk if row.member == e)
        after, before = totals[e][0].delta, sums[e].up
        return in_layout((after if before is None else after - before.delta) / weight).to(delta.dtype)

    owners = [row.member for row in chunk]
    members = list(dict.fromkeys(owners))
    if len(chunk) == 1:  # its own mean
        centres, by_row = delta, 0 * delta.sum(-1)  # NaN unless all is finite
    else:
        centres = torch.stack([mean(e) for e in members])
        by_row = squared_distances(delta, centres, [members.index(e) for e in owners])
    between = [_squared_gap(centre, sums[e], in_layout) for e, centre in zip(members, centres, strict=True)]
    return by_row, torch.stack(between)


def squared_distances(rows: Tensor, centres: Tensor, which: Sequence[int]) -> Tensor:
    """Return every row's squared distance from the centre that `which` names, in float32 or better."""
    kernels = kernels_for(rows.device, rows.dtype)
    if kernels is not None:  # which reads the rows once and writes nothing
        nearest = send(np.array(which), rows.device)
        distances: Tensor = kernels.squared_distances(rows.contiguous(), centres.contiguous(), nearest)
        return distances
    dtype = torch.promote_types(rows.dtype, torch.float32)  # half precision holds few squares
    index = None if len(centres) == 1 else send(np.array(which), rows.device)
    total = torch.zeros(len(rows), dtype=dtype, device=rows.device)
    width = max(1, PIECE_ELEMENTS // len(rows))
    for piece, centre in zip(torch.split(rows, width, -1), torch.split(centres, width, -1), strict=True):
        nearest_pieces = centre if index is None else centre.index_select(0, index)
        total += _squares(piece.to(dtype) - nearest_pieces)
    return total


def _squares(rows: Tensor) -> Tensor:
    """Return every row's squared length, by the dot products of the BLAS: torch's norms are slow on a CPU."""
    if rows.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norms**2
    return torch.bmm(rows.unsqueeze(1), rows.unsqueeze(2)).reshape(len(rows))


def _squared_gap(mean: Tensor, before: RoundSums, in_layout: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the squared distance of a mean from the mean of the clients that are in the sums."""
    if before.up is None:
        return torch.zeros((), dtype=torch.float64, device=mean.device)
    gap = mean.double() - in_layout(before.up.delta).double() / before.weight
    return torch.dot(gap, gap)
