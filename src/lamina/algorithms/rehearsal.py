"""One round of a tiny model, before the real ones: a function that breaks the contract is named in one line.

It is meant for authors: without it, a missing field or a write into an argument shows as an error far from its cause,
or as wrong numbers in one engine only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Info, Needs
from lamina.errors import BadInput, LaminaError
from lamina.layers import Layers

TINY = Layers({"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)})


def rehearse(algorithm: Algorithm) -> None:
    """Play a round with one client, and refuse an algorithm that breaks the contract."""
    x = torch.linspace(-1.0, 1.0, TINY.size, dtype=torch.float64)
    gradient = torch.linspace(0.5, -0.5, TINY.size, dtype=torch.float64)

    def broken(name: str, what: str) -> BadInput:
        return BadInput(f"the algorithm '{algorithm.card.name}' breaks the contract: {name} {what}")

    needs = algorithm.needs(1)
    if not isinstance(needs, Needs):
        raise broken("needs", f"must return a Needs, found {_shown(needs)}")
    info = Info(1, 0.1, full_gradient=gradient if needs.full_gradient or needs.control_variate else None)

    def played(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        before = [value.clone() for value in _tensors(arguments)]
        try:
            made = function(*arguments)
        except LaminaError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split())
            where = f"{Path(last.filename).name}:{last.lineno}"
            raise broken(name, f"fails on a small model: {type(error).__name__}: {reason} ({where})") from error
        if not all(map(_same, before, _tensors(arguments))):
            raise broken(name, "writes into its arguments: return new tensors, y - lr * grad and not y.sub_(lr * grad)")
        return made

    def state(name: str, function: Callable[..., Any], *arguments: Any, field: str = "", like: Any = None) -> Any:
        return checked(name, played(name, function, *arguments), field, like)

    def checked(name: str, made: Any, field: str, like: Any = None) -> Any:
        if not isinstance(made, tuple) or not hasattr(made, "_fields"):
            raise broken(name, f"must return a NamedTuple of tensors, found {type(made).__name__}")
        if field and getattr(made, field, None) is None:
            raise broken(name, f"must return a state with the field '{field}', found {_named(made)}")
        if like is not None and made._fields != like._fields:
            raise broken(name, f"must return the state it was given, {_named(like)}, found {_named(made)}")
        for key, value in zip(made._fields, made, strict=True):
            if value is not None and not (isinstance(value, Tensor) and value.shape[-1:] in ((TINY.size,), (1,))):
                found = f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else _shown(value)
                raise broken(name, f"field '{key}' must be a tensor [..., p] or [..., 1], or None, found {found}")
        return made

    server = state("init", algorithm.init, x, field="x")
    client = state("client_init", algorithm.client_init, x)
    down = state("broadcast", algorithm.broadcast, server, info, field="x")
    local = state("begin", algorithm.begin, down, client, info, field="y")
    local = state("step", algorithm.step, local, down, gradient, 0.1, TINY, field="y", like=local)
    ratios = played("trust_ratios", algorithm.trust_ratios, local, down, TINY)
    if ratios is not None and not isinstance(ratios, Tensor):
        raise broken("trust_ratios", f"must return a tensor, one ratio per layer, or None, found {_shown(ratios)}")
    pair = played("finish", algorithm.finish, local, down, client, info)
    if not isinstance(pair, tuple) or hasattr(pair, "_fields") or len(pair) != 2:
        raise broken("finish", "must return two things: what is sent up, and the client's new state")
    up = checked("finish", pair[0], "delta")
    for field in algorithm.state_changes:
        if field not in up._fields:
            raise broken("state_changes", f"names '{field}', which is not a field of {_named(up)}")
    checked("finish", pair[1], "", like=client)
    state("update", algorithm.update, server, up, info, field="x", like=server)


def _tensors(values: Any) -> list[Tensor]:
    """All tensors of nested tuples."""
    if isinstance(values, Tensor):
        return [values]
    return [found for value in values for found in _tensors(value)] if isinstance(values, tuple) else []


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether nothing was written: a NaN that was there before is no sign of it."""
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _shown(value: Any) -> str:
    """Name a value that is no tensor; an array could fill several lines."""
    if isinstance(value, np.ndarray | np.generic):
        return "a numpy array: compute with torch, or return torch.from_numpy(...)"
    return " ".join(repr(value).split())


def _named(state: Any) -> str:
    return f"{type(state).__name__}({', '.join(state._fields)})"
