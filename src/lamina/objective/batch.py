"""A batch: the inputs of some samples as one tensor, a tuple of tensors or a dict of tensors, samples first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lamina.base.errors import BadInput

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def map_batch(function: Callable[[Tensor], Any], batch: Inputs) -> Any:
    """Return the batch with every tensor replaced by the function's result.

    >>> import torch
    >>> map_batch(len, {"ids": torch.zeros(3, 5), "mask": torch.ones(3)})
    {'ids': 3, 'mask': 3}
    """
    if isinstance(batch, dict):
        return {name: function(value) for name, value in batch.items()}
    return tuple(map(function, batch)) if isinstance(batch, tuple) else function(batch)


def tensors(batch: Inputs) -> list[Tensor]:
    """Return the tensors of a batch."""
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, tuple) else [batch]


def named_tensors(batch: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a batch by what messages call them: x, x[0] or x['ids'].

    >>> import torch
    >>> list(named_tensors((torch.zeros(1), torch.zeros(1))))
    ['x[0]', 'x[1]']
    """
    if not isinstance(batch, dict | tuple):
        return {"x": batch}
    pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return {f"x[{key!r}]": value for key, value in pairs}


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


def outputs_of(result: Any) -> Tensor:
    """Return the outputs in what a forward pass returns: a tensor, `.logits`, ["logits"], or a tuple's first element.

    >>> import torch
    >>> outputs_of((torch.zeros(2, 3), "hidden states")).shape
    torch.Size([2, 3])
    """
    if isinstance(result, Tensor):
        return result
    outputs = getattr(result, "logits", None)
    if outputs is None and isinstance(result, Mapping):
        outputs = result.get("logits")
    elif outputs is None and isinstance(result, tuple | list) and result:
        outputs = result[0]
    if not isinstance(outputs, Tensor):
        raise BadInput(
            f"the model returns a {type(result).__name__} without outputs: it must return a tensor, a tuple whose "
            "first element is one, or an object or dict with 'logits'"
        )
    return outputs
