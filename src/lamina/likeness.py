"""Compare two models, losses or other values by their contents, to tell whether they compute the same."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# Compared elsewhere, or without an influence on what a forward pass computes. `training` is set by the engines.
NOT_COMPARED = {
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
HOOK_OPTIONS = {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
RNN_ALIASES = {"_flat_weights", "_flat_weight_refs"}  # an RNN's parameters under another name
PLAIN = (bool, int, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.layout)


def module_difference(one: nn.Module, other: nn.Module) -> str:
    """Name the first plain attribute or submodule in which two modules differ; an empty string if there is none.

    Parameters and buffers may differ. Values that cannot be compared count as different.
    """
    names, other_names = ([name for name, _ in module.named_modules()] for module in (one, other))
    if names != other_names:  # one may use a layer twice where the other has two
        return "their submodules"
    return _Comparison().modules(one, other, "", weights=False)


def alike(one: Any, other: Any) -> bool:
    """Return whether two values (numbers, tensors, functions, objects, modules) have the same type and contents."""
    return _Comparison().alike(one, other)


class _Comparison:
    """One comparison; it remembers the pairs already visited, so that values may refer to each other in cycles."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # held, so that no other object gets their ids

    def modules(self, one: nn.Module, other: nn.Module, path: str, *, weights: bool) -> str:
        """Name the first difference of two modules; with `weights` also of their parameters and buffers."""
        here = path or "the model"
        if self._is_seen(one, other):
            return ""
        if _kind(one) != _kind(other):
            return f"'{here}' ({type(one).__name__} and {type(other).__name__})"
        if list(one._modules) != list(other._modules):
            return f"the submodules of '{here}'"
        skipped = NOT_COMPARED | (RNN_ALIASES if isinstance(one, nn.RNNBase) else set())
        own, theirs = ({k: v for k, v in vars(m).items() if k not in skipped} for m in (one, other))
        for name in {**own, **theirs}:
            values = own.get(name), theirs.get(name)
            if (name in own) != (name in theirs) or not self._attribute(name, *values):
                return _named(f"{path}.{name}" if path else name, *values)
        for name in ("_parameters", "_buffers") if weights else ():
            if not self.alike(getattr(one, name), getattr(other, name)):
                return f"the tensors of '{here}'"
        for name, child in one._modules.items():
            sibling = other._modules[name]
            if child is None or sibling is None:
                if child is not sibling:
                    return f"'{name}'"
                continue
            found = self.modules(child, sibling, f"{path}.{name}" if path else name, weights=weights)
            if found:
                return found
        return ""

    def _attribute(self, name: str, one: Any, other: Any) -> bool:
        if name in HOOKS:  # keyed by a running number: only the functions matter
            return self.alike(list(one.values()), list(other.values()))
        if name in HOOK_OPTIONS:
            return len(one) == len(other)
        return self.alike(one, other)

    def alike(self, one: Any, other: Any) -> bool:
        """See the function `alike`."""
        if one is other:
            return True
        if isinstance(one, nn.Module) and isinstance(other, nn.Module):
            return not self.modules(one, other, "", weights=True)
        if type(one) is not type(other):
            return False
        if isinstance(one, (*PLAIN, type)):
            return bool(type(one) in PLAIN and one == other)
        if isinstance(one, float):
            return type(one) is float and (one == other or (one != one and other != other))
        if self._is_seen(one, other):
            return True
        try:
            return self._contents_alike(one, other)
        except Exception:  # a user's object may raise anything: then they differ
            return False

    def _contents_alike(self, one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return same_tensor(one, other)
        if isinstance(one, np.ndarray):
            return one.dtype == other.dtype and not one.dtype.hasobject and np.array_equal(one, other)
        if type(one) in (list, tuple):
            return len(one) == len(other) and all(map(self.alike, one, other))
        if type(one) is dict:
            return list(one) == list(other) and all(self.alike(one[name], other[name]) for name in one)
        if type(one) in (set, frozenset):
            return bool(one == other)
        if isinstance(one, types.FunctionType):
            return self._functions_alike(one, other)
        if isinstance(one, types.MethodType):
            return one.__func__ is other.__func__ and self.alike(one.__self__, other.__self__)
        if isinstance(one, functools.partial):
            return all(self.alike(getattr(one, a), getattr(other, a)) for a in ("func", "args", "keywords"))
        if isinstance(one, weakref.ref):
            return one() is not None and self.alike(one(), other())
        return self._stored_alike(one, other)

    def _functions_alike(self, one: types.FunctionType, other: types.FunctionType) -> bool:
        """Compare functions created by the same code, by the values they hold."""
        if one.__code__ != other.__code__ or one.__globals__ is not other.__globals__:
            return False
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        parts = ("__defaults__", "__kwdefaults__", "__dict__")
        return self.alike(*cells) and all(self.alike(getattr(one, a), getattr(other, a)) for a in parts)

    def _stored_alike(self, one: Any, other: Any) -> bool:
        """Compare other objects by what pickle would store; one that cannot be pickled is like no other."""
        stored = [thing.__reduce_ex__(2) for thing in (one, other)]
        if any(isinstance(parts, str) for parts in stored):  # the name of a global: not the same object
            return False
        unrolled = [[*parts[:3], *(None if it is None else list(it) for it in parts[3:5])] for parts in stored]
        return self.alike(*unrolled)

    def _is_seen(self, one: Any, other: Any) -> bool:
        pair = id(one), id(other)
        known = pair in self.seen
        self.seen[pair] = one, other
        return known


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, device, shape and numbers."""
    return one is other or (
        one.dtype == other.dtype and one.device == other.device and one.shape == other.shape and torch.equal(one, other)
    )


def _kind(module: nn.Module) -> Any:
    """Return the class of a module; a parametrised one has a generated class, derived from it."""
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def _named(name: str, one: Any, other: Any) -> str:
    shown = [repr(value) if isinstance(value, bool | int | float | str | None) else "" for value in (one, other)]
    if all(shown) and max(map(len, shown)) <= 40:
        return f"'{name}' ({shown[0]} and {shown[1]})"
    return f"'{name}'"
