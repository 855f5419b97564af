"""What a model returns: a tensor, or a tuple, a dict or an object of tensors. Users' losses and metrics get all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lamina.base.errors import BadInput
from lamina.base.text import listed


def outputs_of(result: Any) -> Tensor:
    """Return the element that named losses and metrics take: a tensor, `.logits`, ["logits"], or a tuple's first.

    >>> outputs_of((torch.zeros(2, 3), "hidden states")).shape
    torch.Size([2, 3])
    """
    elements = elements_of(result)
    name = main_element(result)
    if name is None:
        kind = type(result).__name__ + (f" of {listed(list(elements))}" if elements else "")
        raise BadInput(
            f"the model returns a {kind}: named losses and metrics "
            "take a tensor, '.logits', ['logits'] or a tuple's first element; give a loss that is a function of "
            "(outputs, targets), which receives all that the model returns"
        )
    outputs: Tensor = elements[name]
    return outputs


def main_element(result: Any) -> str | None:
    """Return the name of the element that `outputs_of` returns, as code has it; None: there is none."""
    elements = elements_of(result)
    first = list(elements)[:1] if isinstance(result, tuple | list) else []
    names = ("", ".logits", "['logits']", *first)
    return next((name for name in names if isinstance(elements.get(name), Tensor)), None)


def other_elements(result: Any) -> list[str]:
    """Return the names of the elements with tensors that `outputs_of` leaves out.

    Of an output of transformers, only further losses: what else it holds leads to its logits, or repeats them.

    >>> other_elements({"logits": torch.zeros(2), "aux": torch.zeros(2), "note": "text"})
    ["['aux']"]
    """
    main = main_element(result)
    others = {name: tensors_in(value) for name, value in elements_of(result).items() if name != main}
    is_of_transformers = isinstance(result, Mapping) and main == ".logits"
    return [name for name, found in others.items() if found and (not is_of_transformers or found[0].numel() == 1)]


def map_outputs(function: Callable[[Tensor], Any], result: Any) -> Any:
    """Return what a model returns with every tensor replaced by the function's result; other values stay."""
    if isinstance(result, Tensor):
        return function(result)

    def replaced(value: Any, is_inside: bool = False) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if is_inside or isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
            return value
        changed = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(changed, name, tree_map(lambda leaf: replaced(leaf, is_inside=True), part))
        return changed

    return tree_map(replaced, result)


def tensors_in(result: Any) -> list[Tensor]:
    """Return all tensors in what a model returns."""
    tensors: list[Tensor] = []
    map_outputs(lambda tensor: tensors.append(tensor) or tensor, result)  # type: ignore[func-returns-value]
    return tensors


def sample_axes(result_of: Callable[[int], Any]) -> list[int | None]:
    """Return the axis of the samples in every tensor of a result, given for any number of samples; None: it has none.

    The hidden state of an LSTM has the samples on axis 1. One result would not tell: an LSTM may have as many layers as
    there are samples.
    """
    few, more = (tensors_in(result_of(samples)) for samples in (2, 3))
    shapes = (zip(one.shape, other.shape, strict=False) for one, other in zip(few, more, strict=False))
    return [next((axis for axis, sizes in enumerate(pairs) if sizes == (2, 3)), None) for pairs in shapes]


def join_outputs(parts: Sequence[Any], sizes: Sequence[int], axes: Iterable[int | None]) -> Any:
    """Return what a model returned for several batches of these sizes as if they were one; `sample_axes` finds `axes`.

    A tensor without samples, such as a penalty of the whole batch, becomes the mean over all samples.
    """

    def joined(tensors: Sequence[Tensor], axis: int | None) -> Tensor:
        if axis is not None and tensors[0].dim():
            return torch.cat(list(tensors), axis)
        weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return torch.stack([tensor * float(weight) for tensor, weight in zip(tensors, weights, strict=True)]).sum(0)

    columns = iter(list(map(joined, zip(*map(tensors_in, parts), strict=True), axes)))
    return map_outputs(lambda _: next(columns), parts[0])


def select_samples(result: Any, rows: Tensor, axes: Iterable[int | None]) -> Any:
    """Return what a model returned for some of the samples; a tensor without samples stays."""
    places = iter(axes)

    def selected(tensor: Tensor) -> Tensor:
        axis = next(places, None)
        return tensor if axis is None or not tensor.dim() else tensor.index_select(axis, rows.to(tensor.device))

    return map_outputs(selected, result)


def elements_of(result: Any) -> dict[str, Any]:
    """Return the elements of what a model returns, by the names that code has for them."""
    if isinstance(result, Tensor):
        return {"": result}
    if isinstance(result, Mapping):  # that of transformers is an object, too
        return {f".{name}" if hasattr(result, str(name)) else f"[{name!r}]": value for name, value in result.items()}
    if isinstance(result, tuple | list):
        names = [f".{name}" for name in getattr(result, "_fields", ())] or [f"[{i}]" for i in range(len(result))]
        return dict(zip(names, result, strict=True))
    names = [*getattr(result, "__dict__", {}), *(["logits"] if hasattr(result, "logits") else [])]
    return {f".{name}": getattr(result, name) for name in names}
