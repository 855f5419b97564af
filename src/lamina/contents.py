"""Hash models, losses and other values by their contents, to tell whether two of them compute the same."""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lamina.batch import Inputs, named_tensors

HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
HOOK_OPTIONS = {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
# Attributes of every module: compared elsewhere, or without influence on a forward pass. torch may add to them.
OF_EVERY_MODULE = set(vars(nn.Module())) - HOOKS - HOOK_OPTIONS
RNN_ALIASES = {"_flat_weights", "_flat_weight_refs"}  # an RNN's parameters under another name
PLAIN = (bool, int, float, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.layout)
LONGEST_SHOWN_VALUE = 40


def attributes_digest(module: nn.Module) -> str:
    """Return a digest of the plain attributes of a module and its submodules, the same in every process.

    Values of parameters and buffers do not count. Of a value that cannot be pickled, only the type counts.
    """
    return _Digest(module).of(module)


def code_digest(function: Any) -> str:
    """Return a digest of what a function or callable does and of the values it holds, the same in every process."""
    return _Digest().of(function)


def alike(one: Any, other: Any) -> bool:
    """Return whether two values of this process (numbers, tensors, functions, modules, ...) have the same contents.

    Values that cannot be pickled are alike only if they are the same object.
    """
    return one is other or _Digest(strict=True).of(one) == _Digest(strict=True).of(other)


def module_difference(one: nn.Module, other: nn.Module) -> str:
    """Name the first plain attribute or submodule in which two modules differ; an empty string if there is none.

    Values of parameters and buffers may differ.
    """
    submodules, others = (dict(module.named_modules()) for module in (one, other))
    if list(submodules) != list(others):  # one may use a layer twice where the other has two
        return "their submodules"
    digest, other_digest = _Digest(one, strict=True), _Digest(other, strict=True)
    for path, layer in submodules.items():
        if _class(layer) != _class(others[path]):
            return f"'{path or 'the model'}' ({type(layer).__name__} and {type(others[path]).__name__})"
        attributes, other_attributes = digest.attributes(layer), other_digest.attributes(others[path])
        for name in {**attributes, **other_attributes}:
            if attributes.get(name) != other_attributes.get(name):
                return _shown(f"{path}.{name}" if path else name, vars(layer).get(name), vars(others[path]).get(name))
    return ""


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, device, shape and numbers."""
    return one is other or ((one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other))


def same_inputs(one: Inputs, other: Inputs) -> bool:
    """Return whether two batches hold the same tensors."""
    return type(one) is type(other) and same_tensors(named_tensors(one), named_tensors(other))


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of named tensors are the same."""
    return one.keys() == other.keys() and all(same_tensor(one[name], other[name]) for name in one)


class _Digest:
    """One digest; it remembers the values already visited, so that they may refer to each other in cycles.

    Args:
        module: the module whose own parameters and buffers count by their names, not by their values.
        strict: whether devices, classes and values that cannot be pickled count as well, which ties the digest to
            this process.
    """

    def __init__(self, module: nn.Module | None = None, *, strict: bool = False) -> None:
        self.strict = strict
        self.seen: dict[int, str] = {}
        self.held: list[Any] = []  # keeps visited objects alive, so that no other gets their id
        for name, tensor in () if module is None else (*module.named_parameters(), *module.named_buffers()):
            self._remember(tensor, f"tensor {name}")

    def of(self, value: Any) -> str:
        """Return the digest of any value."""
        if isinstance(value, torch.device) and not self.strict:  # a run may be resumed on another one
            return "device"
        if isinstance(value, PLAIN):
            return _hash([type(value).__name__, repr(value)])
        if id(value) in self.seen:
            return self.seen[id(value)]
        self._remember(value, f"value {len(self.held)}")
        kind = type(value).__qualname__
        try:
            digest = _hash([kind, *self._parts(value)])
        except Exception:  # a user's object may raise anything
            digest = _hash([kind, str(id(value))] if self.strict else [kind])
        if not isinstance(value, nn.Module):  # a module that is used twice is not two modules
            self.seen[id(value)] = digest
        return digest

    def attributes(self, module: nn.Module) -> dict[str, str]:
        """Return the digests of a module's plain attributes, by name; those of its submodules are not among them."""
        skipped = OF_EVERY_MODULE | (RNN_ALIASES if isinstance(module, nn.RNNBase) else set())
        # a class created in a function may depend on its arguments; a class of torch.jit has no such function
        forward = getattr(type(module), "forward", None)
        digests = {"": self.of([value for value in _closure(forward) if not isinstance(value, type)])}
        for name, value in sorted(vars(module).items()):
            if name in HOOKS:  # keyed by a running number: only the functions matter
                digests[name] = self.of(list(value.values()))
            elif name in HOOK_OPTIONS:
                digests[name] = str(len(value))
            elif name not in skipped:
                digests[name] = self.of(value)
        return digests

    def _remember(self, value: Any, digest: str) -> None:
        self.seen[id(value)] = digest
        self.held.append(value)

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            stored = value.detach().cpu().contiguous()
            place = [str(value.device)] if self.strict else []
            contents = hashlib.sha256(stored.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            return [*place, str(value.dtype), str(list(value.shape)), contents]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            contents = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
            return [str(value.dtype), str(value.shape), contents]
        if type(value) in (list, tuple):
            return map(self.of, value)
        if type(value) is dict:
            return [self.of(part) for item in value.items() if not _is_hash(item[0]) for part in item]
        if type(value) in (set, frozenset):
            return sorted(map(self.of, value))
        if isinstance(value, types.FunctionType):
            place = [str(id(value.__globals__))] if self.strict else []
            parts = (value.__code__, _closure(value), value.__defaults__, value.__kwdefaults__, vars(value))
            return [*place, *map(self.of, parts)]
        if isinstance(value, types.CodeType):
            return [value.co_code.hex(), *map(self.of, (value.co_names, value.co_consts))]
        if isinstance(value, types.MethodType):
            return map(self.of, (value.__func__, value.__self__))
        if isinstance(value, functools.partial):
            return map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, weakref.ref):
            return [self.of(value())]
        if isinstance(value, type | types.BuiltinFunctionType):
            return [str(id(value))] if self.strict else [str(value.__module__), value.__qualname__]
        return self._stored(value)

    def _module(self, module: nn.Module) -> Iterator[str]:
        if self.strict:
            yield str(_class(module))
        for name, digest in self.attributes(module).items():
            yield from (name, digest)
        yield self.of([dict(module._parameters), dict(module._buffers)])
        for name, child in module._modules.items():
            yield from (name, self.of(child))

    def _stored(self, value: Any) -> Iterable[str]:
        """Return digests of what pickle would store of an object."""
        stored = value.__reduce_ex__(2)
        if isinstance(stored, str):  # the name of a global
            return [stored]
        maker, arguments, *rest = stored
        state = [None if part is None else part if i == 0 else list(part) for i, part in enumerate(rest[:3])]
        return [str(getattr(maker, "__qualname__", "")), self.of(list(arguments)), self.of(state)]


def _is_hash(key: Any) -> bool:
    """Return whether an attribute holds Python's hash of a text, which every process computes differently."""
    return isinstance(key, str) and key == "_original_object_hash"  # of transformers' GenerationConfig


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _class(module: nn.Module) -> list[int]:
    """Return the ids of a module's class; a parametrised one has a generated class, derived from it."""
    classes = type(module).__bases__ if parametrize.is_parametrized(module) else [type(module)]
    return list(map(id, classes))


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _shown(name: str, one: Any, other: Any) -> str:
    shown = [repr(value) if isinstance(value, bool | int | float | str | None) else "" for value in (one, other)]
    if all(shown) and max(map(len, shown)) <= LONGEST_SHOWN_VALUE:
        return f"'{name}' ({shown[0]} and {shown[1]})"
    return f"'{name}'"
