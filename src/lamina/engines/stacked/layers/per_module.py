"""The stacked form of a module with parameters of its own: `torch.func.vmap` over the clients, for this module only.

The rest of the network stays stacked. The module's inputs have the samples of all clients on their first axis, or one
entry there that is meant for all samples (positions, masks). Whether that is true is checked by the engine's probe.
In bfloat16 the module computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lamina.engines.stacked.folding import CannotStack, SharedInput, at_least_float32, unfold_clients
from lamina.objective.dropout import FromStreams, stream_layers


class PerModule(SharedInput):
    """Base of the classes that `per_module` makes."""

    plain: type[nn.Module]  # the module's own class
    varying: tuple[str, ...]  # names of the parameters that every client has its own of
    functional_dropout: FromStreams | None = None  # what draws the masks of `F.dropout`; set by the engine

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        """Call the module of every client on its own samples."""
        state = {name: _wide(p) for name, p in self.named_parameters(remove_duplicate=False)}
        parameters = {name: state.pop(name) for name in self.varying}  # the others are the same for all clients
        clients = next(iter(parameters.values())).shape[0]
        leaves, structure = tree_flatten((inputs, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        axes = [0 if _has_samples(t, clients) else None for t in tensors]
        by_client = [
            _wide(t if axis is None else unfold_clients(t, clients)) for t, axis in zip(tensors, axes, strict=True)
        ]
        if not tensors:
            raise CannotStack(f"{self.plain.__name__} uses its parameters without an input: it has no stacked form")
        is_shared = all(axis is None for axis in axes)
        dropouts = stream_layers(self) + ([] if self.functional_dropout is None else [self.functional_dropout])
        streams = dropouts[0].streams if dropouts else None

        def call(own: Mapping[str, Tensor], stream: Tensor | None, values: list[Tensor]) -> Any:
            given = iter(values)
            arguments = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            positional, named = tree_unflatten(arguments, structure)
            for layer in dropouts:
                layer.streams = stream
            named_state = {f"module.{name}": value for name, value in (*state.items(), *own.items())}
            return functional_call(_Plain(self, self.plain), named_state, positional, named, tie_weights=False)

        mapped = over_clients(call, in_dims=(0, None if streams is None else 0, axes))
        try:
            results = mapped(parameters, streams, by_client)
        finally:
            for layer in dropouts:
                layer.streams = streams
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)

        def fold(result: Tensor) -> Tensor:
            if dtype is not None and result.is_floating_point():
                result = result.to(dtype)
            return self.repeat_samples(result) if is_shared else result.flatten(0, 1)

        return tree_map(fold, results)


def over_clients(function: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
    """Return `torch.func.vmap` of a function that calls modules.

    Within vmap, torch's transformer layers would take a fast path for inference, which has no gradient.
    """

    def mapped(*values: Any) -> Any:
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return torch.func.vmap(function, in_dims=in_dims)(*values)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)

    return mapped


class _Plain(nn.Module):
    """Calls a module as its own class does."""

    def __init__(self, module: nn.Module, plain: type[nn.Module]) -> None:
        super().__init__()
        self.module, self.plain = module, plain

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.plain.forward(self.module, *inputs, **options)


def per_module(layer: nn.Module) -> None:
    """Give a module the class that runs it client by client; its trainable parameters get a leading axis C."""
    plain = type(layer)
    varying = tuple(name for name, p in layer.named_parameters(remove_duplicate=False) if p.requires_grad)
    layer.__class__ = type(f"PerModule{plain.__name__}", (PerModule, plain), {"plain": plain, "varying": varying})


def _has_samples(x: Tensor, clients: int) -> bool:
    """Whether the first axis holds the samples of all clients, and not one entry for all of them."""
    if x.dim() == 0 or x.shape[0] == 1:
        return False
    if x.shape[0] % clients:
        raise CannotStack("a module with parameters of its own has an input whose first axis does not hold the samples")
    return True


def _wide(x: Tensor) -> Tensor:
    """Return x in float32 at least: what a module mixes with bfloat16 parameters is not known."""
    return x.to(at_least_float32(x)) if x.is_floating_point() else x
