"""How the server combines what the clients of a round send: the weighted mean, or a mean that outliers cannot move.

An aggregation is a frozen record with one pure function, `combine`, from stacked vectors ``[clients, ...]`` and weights
``[clients]`` that sum to one to a single vector. Every engine applies it to each field of the uploads and to each
floating buffer on its own. All of them return values between the smallest and the largest of each coordinate, so a
second moment stays non-negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lamina.base.limits import check_count, check_number
from lamina.base.registry import as_object, create_named, explain_options

# The rounding error allowed in a sum of weights that is one half, by the weights' own precision.
HALF_TOLERANCE, HALF_TOLERANCE_FLOAT32 = 1e-9, 1e-7


@runtime_checkable
class Aggregation(Protocol):
    """Combines the clients' vectors into one."""

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return one vector for the rows ``[clients, ...]`` and their weights ``[clients]``, which sum to one."""


@dataclass(frozen=True)
class Mean:
    """The weighted mean, which all the papers' algorithms are defined with."""

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean."""
        return _weighted_sum(rows, weights)


@dataclass(frozen=True)
class Median:
    """The coordinate-wise weighted median (Yin et al. 2018); the midpoint where two values share the middle."""

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted median of every coordinate."""
        return median(rows, weights)


@dataclass(frozen=True)
class TrimmedMean:
    """The coordinate-wise mean without the largest and the smallest values (Yin et al. 2018).

    Args:
        share: the share of the total weight that is cut off at either end of every coordinate. A client on the edge
            keeps the part of its weight that lies inside.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        check_number("aggregation 'trimmed_mean': share", self.share, least=0, below=0.5)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of what is left of every coordinate."""
        ordered, order = torch.sort(rows, dim=0)
        upper = torch.cumsum(weights.to(rows.dtype)[order], dim=0)
        lower = torch.cat([torch.zeros_like(upper[:1]), upper[:-1]])
        inside = upper.clamp(self.share, 1 - self.share) - lower.clamp(self.share, 1 - self.share)
        return (inside * ordered).sum(0) / inside.sum(0)


@dataclass(frozen=True)
class CentredClipping:
    """The mean of vectors that are clipped to a ball around a centre (Karimireddy, He & Jaggi 2021).

    The paper's first centre is the aggregate of the last round. Here it is the round's coordinate-wise median, so that
    a round depends on nothing but what was sent in it.

    Args:
        radius: tau, the radius of the ball; None: the weighted median of the clients' distances from the centre.
        iterations: L, how often the centre moves to the clipped mean.
    """

    radius: float | None = None
    iterations: int = 3

    def __post_init__(self) -> None:
        if self.radius is not None:
            check_number("aggregation 'centred_clipping': radius", self.radius, above=0)
        check_count("aggregation 'centred_clipping': iterations", self.iterations)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the centre after its last move."""
        centre = median(rows, weights)
        for _ in range(self.iterations):
            centre = centre + _weighted_sum(_clipped(rows - centre, weights, self.radius), weights)
        return centre.clamp(rows.amin(0), rows.amax(0))  # rounding must not make a second moment negative


MEAN = Mean()
AGGREGATIONS: dict[str, type[Any]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "centred_clipping": CentredClipping,
}
for _aggregation in AGGREGATIONS.values():
    explain_options(_aggregation)


def make(name: str, **options: Any) -> Aggregation:
    """Make an aggregation by name.

    >>> make("trimmed_mean", share=0.1)
    TrimmedMean(share=0.1)
    """
    aggregation: Aggregation = create_named("aggregation", AGGREGATIONS, name, options)
    return aggregation


def as_aggregation(given: Any) -> Aggregation:
    """Return an aggregation given by name, as a table or as an object."""
    aggregation: Aggregation = as_object("aggregation", given, make, "combine", "lamina.aggregation.Median()")
    return aggregation


def name_of(aggregation: Aggregation) -> str:
    """Return the name of an aggregation, as `make` takes it; the class name of one that is not lamina's."""
    names = {cls: name for name, cls in AGGREGATIONS.items()}
    return names.get(type(aggregation), type(aggregation).__qualname__)


def combine_vectors(aggregation: Aggregation, vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Combine one vector of every client."""
    rows = torch.stack(list(vectors))
    return aggregation.combine(rows, torch.tensor(weights, dtype=torch.float64, device=rows.device))


def combine_uploads(
    aggregation: Aggregation,
    uploads: Sequence[tuple[Any, dict[str, Tensor]]],
    weights: Sequence[float],
    uniform_fields: Sequence[str] = (),
) -> tuple[Any, dict[str, Tensor]]:
    """Combine the Ups and the floating buffers of a round, field by field; a field that is not sent stays None.

    `uniform_fields` are the fields of Up that are combined without weights.
    """
    ups = [up for up, _ in uploads]
    uniform = [1 / len(uploads)] * len(uploads)

    def combine(name: str) -> Tensor | None:
        vectors = [getattr(up, name) for up in ups]
        chosen = uniform if name in uniform_fields else weights
        return None if vectors[0] is None else combine_vectors(aggregation, vectors, chosen)

    up = type(ups[0])(*map(combine, ups[0]._fields))
    buffers = [buffers for _, buffers in uploads]
    return up, {n: combine_vectors(aggregation, [each[n] for each in buffers], weights) for n in buffers[0]}


def median(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the coordinate-wise weighted median of the rows.

    >>> median(torch.tensor([[1.0], [2.0], [9.0], [4.0]]), torch.full((4,), 0.25))
    tensor([3.])
    """
    tolerance = HALF_TOLERANCE if weights.dtype == torch.float64 else HALF_TOLERANCE_FLOAT32
    shares = weights.double() / weights.double().sum()  # rounded weights sum to one only nearly
    ordered, order = torch.sort(rows, dim=0)
    reached = torch.cumsum(shares[order], dim=0)
    lower = (reached < 0.5 - tolerance).sum(0, keepdim=True)
    upper = (reached <= 0.5 + tolerance).sum(0, keepdim=True).clamp(max=len(rows) - 1)
    return (0.5 * (ordered.gather(0, lower) + ordered.gather(0, upper))).squeeze(0)


def _clipped(rows: Tensor, weights: Tensor, most: float | None) -> Tensor:
    """Scale rows down to a largest norm; None: the weighted median of their norms."""
    norms = torch.linalg.vector_norm(rows.flatten(1), dim=1)
    limit = median(norms.unsqueeze(1), weights) if most is None else norms.new_tensor([most])
    factors = torch.where(norms > limit, limit / norms, 1.0)
    return rows * factors.reshape(-1, *[1] * (rows.dim() - 1))


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights.tolist(), strict=True):
        total = total + weight * row
    return total
