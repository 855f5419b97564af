"""Tell whether tensors hold a NaN or an infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(*values: Tensor | None) -> bool:
    """Return whether no value is NaN or infinite.

    >>> all_finite(torch.ones(2), None), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return all(_is_finite(value) for value in values if value is not None)


def _is_finite(values: Tensor) -> bool:
    # A sum is finite only if all its terms are; the other way round it may overflow. On a CPU it takes a tenth of the
    # time.
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
