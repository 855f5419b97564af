"""Hash models, losses and other values by what they hold, to tell whether two of them compute the same.

Functions and classes count by their names and by the values that they hold; lamina.objective.source hashes their code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lamina.base.text import hash_parts
from lamina.objective.batch import Inputs, named_tensors
from lamina.objective.source import source_digests, source_of, users_module

HOOKS = {
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
# Attributes of every module: compared elsewhere, or without influence on a forward pass. torch may add to them.
OF_EVERY_MODULE = set(vars(nn.Module())) - HOOKS
RNN_ALIASES = {"_flat_weights", "_flat_weight_refs"}  # an RNN's parameters under another name
PLAIN = (bool, int, float, str, bytes, complex, type(None), type(...), torch.dtype, torch.layout)
COLLECTIONS = (tuple, list, dict, set, frozenset)
CODE = (types.FunctionType, types.ModuleType, type)


def value_digest(value: Any) -> str:
    """Return a digest of the values that an object or a function holds, the same in every process.

    Of a value that cannot be pickled, only the type counts.
    """
    return _Digest().of(value)


def attributes_digest(module: nn.Module) -> str:
    """Return a digest of a module's plain attributes; the values of its parameters and buffers do not count."""
    return _Digest(module).of(module)


def code_digests(values: Iterable[Any]) -> dict[str, str]:
    """Return digests of the user's files whose functions and classes some values use, by file name."""
    code: list[Any] = []
    for value in values:
        digest = _Digest(value)
        digest.of(value)
        code += digest.code
    return source_digests(code)


def alike(one: Any, other: Any, *, weights: bool = True) -> bool:
    """Return whether two values of this process (numbers, tensors, functions, modules, ...) have the same contents.

    Functions are alike if they run the same code, and values that cannot be pickled if they are the same object. Unless
    `weights`, the parameters and buffers of two modules may have other values.
    """
    digest, other_digest = (_Digest(None if weights else value) for value in (one, other))
    is_same = digest.of(one) == other_digest.of(other) and digest.identities == other_digest.identities
    return one is other or is_same


def is_laminas(value: Any) -> bool:
    """Return whether a function, class or object is lamina's own."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == "lamina"


def same_tensors(one: Inputs, other: Inputs) -> bool:
    """Return whether two batches, or sets of named tensors, have the same names, types, devices, shapes and numbers."""
    tensors, others = named_tensors(one), named_tensors(other)
    if type(one) is not type(other) or tensors.keys() != others.keys():
        return False
    pairs = [(tensor, others[name]) for name, tensor in tensors.items()]
    return all(a is b or (_are_tensors(a, b) and torch.equal(a, b)) for a, b in pairs)


def _are_tensors(one: Any, other: Any) -> bool:
    """Return whether two values of batches are tensors of one type on one device, and no data on disk."""
    is_same = (one.dtype, one.device) == (other.dtype, other.device)
    return is_same and isinstance(one, Tensor) and isinstance(other, Tensor)


class _Digest:
    """One digest; it remembers the values already visited, so that they may refer to each other in cycles.

    Args:
        value: if this is a module, its parameters and buffers count by their names, not by their values.
    """

    def __init__(self, value: Any = None) -> None:
        self.code: list[Any] = []  # the functions, classes and modules visited
        self.identities: list[int] = []  # of functions' code and of values that cannot be pickled, in this process
        self.seen: dict[int, str] = {}
        self.held: list[Any] = []  # keeps visited objects alive, so that no other gets their id
        if isinstance(value, nn.Module):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._remember(tensor, f"tensor {name}")

    def of(self, value: Any) -> str:
        """Return the digest of any value."""
        if isinstance(value, torch.device):  # a run may be resumed on another one
            return "device"
        if isinstance(value, PLAIN):
            return hash_parts([type(value).__name__, repr(value)])
        if id(value) in self.seen:
            return self.seen[id(value)]
        self._remember(value, f"value {len(self.held)}")
        kind = type(value).__qualname__
        try:
            digest = hash_parts([kind, *self._parts(value)])
        except Exception:  # a user's object may raise anything
            self.of(type(value))
            self.identities.append(id(value))
            digest = hash_parts([kind])
        if not isinstance(value, nn.Module):  # a module that is used twice is not two modules
            self.seen[id(value)] = digest
        return digest

    def _remember(self, value: Any, digest: str) -> None:
        self.seen[id(value)] = digest
        self.held.append(value)

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            contents = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            return [str(value.dtype), str(list(value.shape)), hashlib.sha256(contents).hexdigest()]
        if type(value) in (list, tuple):
            return map(self.of, value)
        if type(value) is dict:
            # a hash of a text, in transformers' GenerationConfig, is another one in every process
            return [self.of(part) for item in value.items() if item[0] != "_original_object_hash" for part in item]
        if type(value) in (set, frozenset):
            return sorted(map(self.of, value))
        if isinstance(value, types.CodeType):
            return [value.co_code.hex(), *map(self.of, (value.co_names, value.co_consts))]
        if isinstance(value, CODE):
            return self._code(value)
        if isinstance(value, types.BuiltinFunctionType):
            return [value.__qualname__]
        return self._stored(value)

    def _code(self, value: Any) -> Iterator[str]:
        """Yield the name of a function, class or module and digests of the values that it holds."""
        self.code.append(value)
        yield getattr(value, "__qualname__", "")
        module = users_module(value)
        if isinstance(value, types.FunctionType):
            self.identities.append(id(value.__code__))
            closure = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from map(self.of, (closure, value.__defaults__, value.__kwdefaults__, vars(value)))
            if module == "":
                source = source_of(value.__code__)
                yield self.of(value.__code__ if source is None else _constants(source, value.__globals__))
        elif isinstance(value, type) and module is not None:
            yield from map(self.of, value.__bases__)
            for name, member in sorted(vars(value).items()):
                if name == "__call__" or not name.startswith("__"):  # what __init__ does shows in the object
                    member = getattr(member, "fget", getattr(member, "__func__", member))  # of a property, a method
                    if isinstance(member, (types.FunctionType, functools.cached_property, *PLAIN, *COLLECTIONS)):
                        yield from (name, self.of(getattr(member, "func", member)))

    def _module(self, module: nn.Module) -> Iterator[str]:
        skipped = OF_EVERY_MODULE | (RNN_ALIASES if isinstance(module, nn.RNNBase) else set())
        yield from ("class", self.of(type(module)))
        for name, value in sorted(vars(module).items()):
            if name in HOOKS:  # keyed by a running number: only the functions matter
                yield from (name, self.of(list(value.values())))
            elif name not in skipped:
                yield from (name, self.of(value))
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


def _constants(source: ast.AST, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the global values that a function reads: code, and those that it does not change, as it does a counter."""
    nodes = list(ast.walk(source))
    assigned = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - assigned
    items = {node.value for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)}
    owners = items | {node.value for node in nodes if isinstance(node, ast.Attribute)}  # as in seen.append(x)
    changed = {node.id for node in owners if isinstance(node, ast.Name)}
    read = {name: values[name] for name in sorted(names) if name in values}
    return {
        name: value
        for name, value in read.items()
        if isinstance(value, (*CODE, *PLAIN, tuple, frozenset, Tensor, np.ndarray, np.generic, functools.partial))
        or (isinstance(value, list | dict | set) and name not in changed)
        or (isinstance(value, nn.Module) and next(value.parameters(), None) is None)  # a loss with class weights
    }
