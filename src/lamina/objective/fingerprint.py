"""Hash models, losses and other values by their contents, to tell whether two of them compute the same.

Of code that the user wrote, the functions, classes and constants count that it uses; other code counts by its name.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lamina.objective.batch import Inputs, named_tensors

HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
HOOK_OPTIONS = {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
# Attributes of every module: compared elsewhere, or without influence on a forward pass. torch may add to them.
OF_EVERY_MODULE = set(vars(nn.Module())) - HOOKS - HOOK_OPTIONS
RNN_ALIASES = {"_flat_weights", "_flat_weight_refs"}  # an RNN's parameters under another name
PLAIN = (bool, int, float, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.layout)
COLLECTIONS = (tuple, list, dict, set, frozenset)
CHANGEABLE = (list, dict, set, Tensor, np.ndarray)
CHANGING = {"append", "extend", "insert", "add", "update", "pop", "clear", "remove", "setdefault", "discard"}
LONGEST_SHOWN_VALUE = 40


def attributes_digest(module: nn.Module) -> str:
    """Return a digest of the plain attributes and the user's code of a module, the same in every process.

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


def module_difference(one: nn.Module, other: nn.Module, *, strict: bool = True) -> str:
    """Name the first plain attribute or submodule in which two modules differ; an empty string if there is none.

    Values of parameters and buffers may differ. Values that cannot be pickled are the same only if they are the same
    object; unless `strict`, they are the same if they have one type.
    """
    submodules, others = (dict(module.named_modules()) for module in (one, other))
    if list(submodules) != list(others):  # one may use a layer twice where the other has two
        return "their submodules"
    digest, other_digest = _Digest(one, strict=strict), _Digest(other, strict=strict)
    for path, layer in submodules.items():
        if _class(layer) != _class(others[path]):
            return f"'{path or 'the model'}' ({type(layer).__name__} and {type(others[path]).__name__})"
        attributes, other_attributes = digest.attributes(layer), other_digest.attributes(others[path])
        for name in {**attributes, **other_attributes}:
            if attributes.get(name) != other_attributes.get(name):
                return _shown(f"{path}.{name}" if path else name, vars(layer).get(name), vars(others[path]).get(name))
    return ""


def is_laminas(value: Any) -> bool:
    """Return whether a function, class or object is lamina's own."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == "lamina"


def is_users(value: Any) -> bool:
    """Return whether a function, class or module was written by the user: no part of lamina or an installed package."""
    name = str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    if name.partition(".")[0] in {"lamina", "builtins", *sys.stdlib_module_names}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""  # a notebook has none
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


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
        if not self.strict:
            digests["class"] = self.of(type(module))
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
            parts = (_without_docstring(value), _closure(value), value.__defaults__, value.__kwdefaults__, vars(value))
            return [*place, *map(self.of, parts), *self._globals(value)]
        if isinstance(value, types.CodeType):
            return [value.co_code.hex(), *map(self.of, (value.co_names, value.co_consts))]
        if isinstance(value, types.MethodType):
            return map(self.of, (value.__func__, value.__self__))
        if isinstance(value, functools.partial):
            return map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, weakref.ref):
            return [self.of(value())]
        if isinstance(value, type | types.BuiltinFunctionType):
            if self.strict:
                return [str(id(value))]
            if isinstance(value, type) and is_users(value):  # its module has another name when it runs as a script
                return [value.__qualname__, *self._members(value)]
            return [str(value.__module__), value.__qualname__]
        return self._stored(value)

    def _members(self, cls: type) -> Iterator[str]:
        """Yield the names and digests of the methods and constants of a user's class and of its bases."""
        for base in cls.__bases__:
            if is_users(base):
                yield self.of(base)
        for name, member in sorted(vars(cls).items()):
            if name == "__call__" or not name.startswith("__"):  # what __init__ does shows in the object
                member = getattr(member, "fget", getattr(member, "__func__", member))  # of a property, a class method
                if isinstance(member, (types.FunctionType, functools.cached_property, *PLAIN, *COLLECTIONS)):
                    yield from (name, self.of(getattr(member, "func", member)))

    def _globals(self, function: types.FunctionType) -> Iterator[str]:
        """Yield the names and digests of what a user's function uses from its module: functions, classes, constants.

        What the function itself changes, such as a counter, is no constant.
        """
        if self.strict or not is_users(function):
            return
        codes = list(_codes(function.__code__))
        steps = [(step.opname, str(step.argval)) for code in codes for step in dis.get_instructions(code)]
        attributes = {name for code in codes for name in code.co_names}
        stored = {name for action, name in steps if action == "STORE_GLOBAL"}
        changes_contents = bool(CHANGING & attributes) or any(action == "STORE_SUBSCR" for action, _ in steps)
        for name in sorted({name for action, name in steps if action == "LOAD_GLOBAL"} - stored):
            value = function.__globals__.get(name)
            inner = {name: value}
            if isinstance(value, types.ModuleType) and is_users(value):
                inner = {f"{name}.{key}": vars(value)[key] for key in sorted(attributes & vars(value).keys())}
            for place, one in inner.items():
                if _is_fixed(one) and not (changes_contents and isinstance(one, CHANGEABLE)):
                    yield from (place, self.of(one))

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


def _without_docstring(function: types.FunctionType) -> types.CodeType:
    code = function.__code__
    is_documented = function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,)
    return code.replace(co_consts=(None, *code.co_consts[1:])) if is_documented else code


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_fixed(value: Any) -> bool:
    """Return whether a global value is code of the user's or a constant; other objects may change as they are used."""
    if isinstance(value, types.FunctionType | type):
        return is_users(value)
    if isinstance(value, nn.Module):  # a loss with class weights, but no model
        return not any(True for _ in value.parameters())
    return isinstance(value, (*PLAIN, *COLLECTIONS, Tensor, np.ndarray, np.generic, functools.partial))


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
