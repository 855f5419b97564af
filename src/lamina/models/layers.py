"""Modules made of torch's own layers as JSON, and back: a run's folder then holds the whole model without pickle."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lamina.objective.fingerprint import alike

OF_EVERY_LAYER = ("self", "device", "dtype")  # arguments that a description leaves out


def describe(module: nn.Module) -> dict[str, Any] | None:
    """Return a description of a module for `build`; None if it is more than `nn.Sequential`s of torch's own layers.

    >>> describe(nn.Sequential(nn.Linear(4, 2, bias=False)))
    {'layer': 'Sequential', 'layers': {'0': {'layer': 'Linear', 'options': {'in_features': 4, 'out_features': 2, \
'bias': False}}}}
    """
    described = _describe(module)
    if described is None:
        return None
    try:
        described = json.loads(json.dumps(described))
        return described if alike(build(described), module, weights=False) else None
    except (TypeError, ValueError, RuntimeError):  # an option that JSON cannot hold, or that the layer keeps otherwise
        return None


def build(description: Mapping[str, Any]) -> nn.Module:
    """Return a new module of a description, with new weights."""
    kind = getattr(nn, str(description["layer"]))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"torch.nn has no layer '{description['layer']}'")
    if "layers" in description:
        module: nn.Module = kind()
        for name, inner in description["layers"].items():
            module.add_module(name, build(inner))
        return module
    return kind(**{name: _as_tuple(value) for name, value in description["options"].items()})


def _describe(module: nn.Module) -> dict[str, Any] | None:
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        return None
    if kind is nn.Sequential:
        layers = {name: _describe(inner) for name, inner in module.named_children()}
        return None if None in layers.values() else {"layer": kind.__name__, "layers": layers}
    if next(module.children(), None) is not None:
        return None
    options = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in OF_EVERY_LAYER or not hasattr(module, name):
            continue
        value = getattr(module, name)
        is_flag = isinstance(parameter.default, bool) and (value is None or isinstance(value, Tensor))  # bias
        options[name] = value is not None if is_flag else value
    return {"layer": kind.__name__, "options": options}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
