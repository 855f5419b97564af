"""Values of both sides: the fields of our records, copies for the other side, and what it returns as vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lamina.base.errors import BadInput, short_repr
from lamina.objective.layers import Layers


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record that its options use."""
    return {name: value for name, value in record._asdict().items() if value is not None}


def equal_records(one: Any, other: Any) -> bool:
    """Return whether two records hold the same values."""
    others = fields_of(other)
    return all(torch.equal(value, others[name]) for name, value in fields_of(one).items())


def copied(value: Any) -> Any:
    """Return a copy of a tensor, or of the tensors in a record, list or tuple; other values are returned as they are.

    A function that writes into its arguments must not change what our side reads.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def as_vector(value: Any, layers: Layers, like: Tensor, name: str) -> tuple[Tensor, torch.dtype]:
    """Return a vector, an array, a module or tensors by layer as one tensor like `like`, and the type they had.

    Tensors by layer are a dict by parameter's name, or a list in the order of the parameters.
    """
    if isinstance(value, nn.Module):
        value = dict(value.named_parameters())
    try:
        if isinstance(value, list | tuple) and [tuple(np.shape(part)) for part in value] == [*layers.shapes.values()]:
            value = dict(zip(layers.names, value, strict=True))
        if isinstance(value, Mapping):
            tensors = _by_layer(value, layers, name)
            return layers.flatten(tensors).to(like), next(iter(tensors.values())).dtype
        tensor = _tensor(value)
        if tensor.is_complex():
            raise BadInput(f"{name} has complex numbers: return real ones")
        return tensor.to(like), tensor.dtype
    except BadInput:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        advice = "return a tensor or array, or one for each layer in a dict or list"
        raise BadInput(f"{name} is {_described(value)}: {advice}") from error


def check_model_vector(vector: Tensor, kind: torch.dtype, layers: Layers, name: str, advice: str) -> Tensor:
    """Return a model as a flat vector; refuse one of another size, and one of whole numbers."""
    if vector.numel() != layers.size:
        shape = tuple(vector.shape)
        raise BadInput(f"{name} has the shape {shape}, and the model is a vector of {layers.size} numbers{advice}")
    if not kind.is_floating_point:
        raise BadInput(f"{name} is of type {str(kind).removeprefix('torch.')}: return floating-point numbers")
    return vector.flatten()


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor, or an array of another package."""
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and hasattr(value, "shape"))


def _by_layer(values: Mapping[Any, Any], layers: Layers, name: str) -> dict[str, Tensor]:
    """Return the tensors of all layers; refuse missing ones, and ones of another size."""
    tensors = {}
    for layer, size in zip(layers.names, layers.sizes, strict=True):
        if layer not in values:
            raise BadInput(f"{name} is a dict without '{layer}': return all of {', '.join(layers.names)}")
        tensors[layer] = _tensor(values[layer])
        if tensors[layer].numel() != size:
            shapes = f"{tuple(tensors[layer].shape)}, and ours {layers.shapes[layer]}"
            raise BadInput(f"{name}: '{layer}' has the shape {shapes}")
        tensors[layer] = tensors[layer].reshape(layers.shapes[layer])
    return tensors


def _tensor(value: Any) -> Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _described(value: Any) -> str:
    """Return a value as a message shows it: in one line, and collections by their type."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        kinds = ", ".join(type(part).__name__ for part in value[:4])
        return f"a {type(value).__name__} of {kinds}{', …' if len(value) > 4 else ''}"
    return " ".join(short_repr(value).split())
