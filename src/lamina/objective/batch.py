"""A batch: the inputs or targets of some samples as one tensor, a tuple or a dict of tensors, samples first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Targets = Inputs


def map_batch(function: Callable[[Tensor], Any], batch: Inputs) -> Any:
    """Return the batch with every tensor replaced by the function's result.

    >>> import torch
    >>> map_batch(len, {"ids": torch.zeros(3, 5), "mask": torch.ones(3)})
    {'ids': 3, 'mask': 3}
    """
    if isinstance(batch, dict):
        return {name: function(value) for name, value in batch.items()}
    return tuple(map(function, batch)) if isinstance(batch, tuple) else function(batch)


def take(batch: Inputs, rows: Any) -> Any:
    """Return some samples of a batch; `rows` is whatever indexes a tensor."""
    return map_batch(lambda values: values[rows], batch)


def tensors(batch: Inputs) -> list[Tensor]:
    """Return the tensors of a batch."""
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, tuple) else [batch]


def named_tensors(batch: Inputs, name: str = "x") -> dict[str, Tensor]:
    """Return the tensors of a batch by what messages call them: x, x[0] or x['ids'].

    >>> import torch
    >>> list(named_tensors((torch.zeros(1), torch.zeros(1))))
    ['x[0]', 'x[1]']
    """
    if not isinstance(batch, dict | tuple):
        return {name: batch}
    pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return {f"{name}[{key!r}]": value for key, value in pairs}


def arguments(batch: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments of a forward pass: model(x), model(*x) or model(**x)."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    return ((), batch) if isinstance(batch, dict) else (batch, {})


def same_kind(one: Inputs, other: Inputs) -> bool:
    """Return whether the samples of two batches have the same structure, shapes and types."""
    if type(one) is not type(other) or list(named_tensors(one)) != list(named_tensors(other)):
        return False
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all((a.shape[1:], a.dtype) == (b.shape[1:], b.dtype) for a, b in pairs)
