"""Hash the contents of a module except its tensors, to recognise the same model in another process."""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lamina.likeness import HOOK_OPTIONS, HOOKS, NOT_COMPARED, PLAIN, RNN_ALIASES

# Attributes of every module, without influence on a forward pass; a new version of torch may add to them.
_OF_EVERY_MODULE = set(vars(nn.Module())) - HOOKS - HOOK_OPTIONS


def attributes_digest(module: nn.Module) -> str:
    """Return a digest of the plain attributes of a module and its submodules, the same in every process.

    Values of parameters and buffers do not count. Of a value that cannot be pickled, only the type counts.
    """
    return _Fingerprint(module).of(module)


def function_digest(function: Any) -> str:
    """Return a digest of the values a function or callable holds, without its code, the same in every process."""
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        function = [cells, function.__defaults__, function.__kwdefaults__]
    return _Fingerprint().of(function)


class _Fingerprint:
    """One digest; it remembers the values already visited, so that they may refer to each other in cycles."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """`module`: the module whose tensors do not count."""
        self.seen: dict[int, str] = {}
        self.held: list[Any] = []  # keeps visited objects alive, so that no other gets their id
        for name, tensor in () if module is None else (*module.named_parameters(), *module.named_buffers()):
            self._remember(tensor, f"tensor {name}")

    def of(self, value: Any) -> str:
        """Return the digest of any value."""
        if isinstance(value, torch.device):  # a run may be resumed on another one
            return "device"
        if isinstance(value, (float, *PLAIN)):
            return _hash([type(value).__name__, repr(value)])
        if id(value) in self.seen:
            return self.seen[id(value)]
        self._remember(value, f"value {len(self.held)}")
        try:
            digest = _hash([type(value).__qualname__, *self._parts(value)])
        except Exception:  # a user's object may raise anything
            digest = _hash([type(value).__qualname__])
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
            stored = value.detach().cpu().contiguous()
            return [str(value.dtype), str(list(value.shape)), _bytes(stored.reshape(-1).view(torch.uint8).numpy())]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [str(value.dtype), str(value.shape), _bytes(np.ascontiguousarray(value))]
        if type(value) in (list, tuple):
            return map(self.of, value)
        if type(value) is dict:
            return [self.of(part) for item in value.items() for part in item]
        if type(value) in (set, frozenset):
            return sorted(map(self.of, value))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return map(self.of, (value.__code__, cells, value.__defaults__, value.__kwdefaults__, vars(value)))
        if isinstance(value, types.CodeType):
            return [value.co_code.hex(), *map(self.of, (value.co_names, value.co_consts))]
        if isinstance(value, types.MethodType):
            return map(self.of, (value.__func__, value.__self__))
        if isinstance(value, functools.partial):
            return map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, weakref.ref):
            return [self.of(value())]
        if isinstance(value, type | types.BuiltinFunctionType):
            return [str(value.__module__), value.__qualname__]
        return self._stored(value)

    def _module(self, module: nn.Module) -> Iterable[str]:
        skipped = _OF_EVERY_MODULE | NOT_COMPARED | (RNN_ALIASES if isinstance(module, nn.RNNBase) else set())
        forward = type(module).forward  # a class created in a function may depend on its arguments
        yield self.of([cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()
                       if not isinstance(cell.cell_contents, type)])  # fmt: skip
        for name, value in sorted(vars(module).items()):
            if name in HOOKS:
                yield from (name, self.of(list(value.values())))
            elif name in HOOK_OPTIONS:
                yield from (name, str(len(value)))
            elif name not in skipped:
                yield from (name, self.of(value))
        yield self.of([dict(module._parameters), dict(module._buffers)])
        for name, child in module._modules.items():
            yield from (name, self.of(child))

    def _stored(self, value: Any) -> Iterable[str]:
        """Return digests of what pickle would store of an object."""
        stored = value.__reduce_ex__(2)
        if isinstance(stored, str):
            return [stored]
        maker, arguments, *rest = stored
        state = [None if part is None else part if i == 0 else list(part) for i, part in enumerate(rest[:3])]
        return [str(getattr(maker, "__qualname__", "")), self.of(list(arguments)), self.of(state)]


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _bytes(array: Any) -> str:
    return hashlib.sha256(array.data).hexdigest()
