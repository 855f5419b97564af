"""Masks of padded sequences, in the form that a module's forward takes them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lamina.base.errors import BadInput
from lamina.base.registry import parameters_of
from lamina.data.dataset import Dataset
from lamina.objective.batch import tensors

MASK_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": lambda mask: mask.long(),
    "mask": lambda mask: mask,
    "lengths": lambda mask: mask.sum(1),
}


def with_mask(data: Dataset, module: nn.Module) -> Dataset:
    """Return data with padded sequences whose inputs include the mask, if the module's forward takes one.

    The names are `attention_mask` (1 and 0), `mask` (bool) and `lengths`. If several inputs are padded, these names
    are for a mask that all of them share, and `<input>_mask` and so on for the mask of one.
    """
    forward_parameters, _ = parameters_of(forward_of(module))
    parameters = list(forward_parameters)
    inputs = data.x if isinstance(data.x, dict) else dict(zip(parameters, tensors(data.x), strict=False))
    if data.mask is None:
        forms = (forward_parameters[name] for name in MASK_FORMS if name in forward_parameters and name not in inputs)
        if all(form.default is not inspect.Parameter.empty for form in forms):
            return data
        # No sequence was padded, for all have the same length; this module needs a mask all the same.
        sequences = {name: values for name, values in inputs.items() if values.dim() in (2, 3)}
        tokens = {name: values for name, values in sequences.items() if values.dtype == torch.int64} or sequences
        given = {name: values.new_ones(values.shape[:2], dtype=torch.bool) for name, values in tokens.items()}
        if not given:
            return data
    else:
        given = data.mask if isinstance(data.mask, dict) else {0: data.mask}
    places: dict[Any, str] = dict(enumerate(parameters))
    masks = {places.get(key, str(key)): mask for key, mask in given.items()}
    first = next(iter(masks.values()))
    wanted = {f"{name}_{kind}": form(mask) for name, mask in masks.items() for kind, form in MASK_FORMS.items()}
    is_shared = all(torch.equal(mask, first) for mask in masks.values())
    if is_shared:
        wanted |= {kind: form(first) for kind, form in MASK_FORMS.items()}
    free = [name for name in parameters if name not in inputs]
    missing = {name: values for name, values in wanted.items() if name in free}
    unclear = [name for name in MASK_FORMS if name in free]
    if unclear and not missing:
        names = " and ".join(f"{name}_{unclear[0]}" for name in masks)
        raise BadInput(
            f"the model's forward takes '{unclear[0]}', but the lists of {' and '.join(masks)} differ in length: let "
            f"it take {names}, or pad the lists and give '{unclear[0]}' as an input"
        )
    return dataclasses.replace(data, x={**inputs, **missing}, mask=None) if missing else data


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward; of a peft model, which passes everything on, that of its base."""
    inner = getattr(module, "get_base_model", None)
    forward: Callable[..., Any] = (inner() if callable(inner) else module).forward
    return forward
