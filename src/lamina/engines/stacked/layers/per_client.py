"""Parameters that a forward pass uses directly (positions, class tokens, scales), with one row per client.

The forward pass of many clients has two kinds of values. Activations hold the samples of all clients on one axis,
[C * B, ...]. Values that are computed from parameters alone have no samples: they are `PerClient`, look like one
client's value to the module, and hold those of all. An operation that gets one is computed client by client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten, tree_unflatten

from lamina.engines.stacked.folding import CannotStack


class Samples:
    """Finds the axis of the samples in the tensors of a forward pass.

    In the first pass of a mode, no other axis has as many entries as there are samples, so the sizes show the axis.
    Later passes, in which sizes may coincide, get the same answers in the same order.
    """

    def __init__(self) -> None:
        self.clients, self.batch, self.dtype = 1, 1, torch.float32  # of this pass: its size, and its activations' type
        self.in_module = False  # whether the module's own code runs: not a stacked layer's, and not the engine's
        self._answers: dict[bool, list[int | None]] = {}  # by mode
        self._first: list[int | None] | None = None  # the answers of this pass if it is the first
        self._next: Iterator[int | None] = iter(())  # the answers of this pass if it is not

    @contextlib.contextmanager
    def of_pass(self, clients: int, batch: int, dtype: torch.dtype, train: bool) -> Iterator[None]:
        """Run a forward pass of so many clients with so many samples each, whose activations have this type."""
        self.clients, self.batch, self.dtype, self.in_module = clients, batch, dtype, True
        self._first = None if train in self._answers else []
        self._next = iter(self._answers.get(train, ()))
        try:
            yield
        finally:
            self.in_module = False
        if self._first is not None:
            self._answers[train] = self._first

    def learn_from(self, other: Samples) -> None:
        """Take over the answers of a like module."""
        self._answers = dict(other._answers)

    def axis(self, shape: Sequence[int], clients: int) -> int | None:
        """Return the axis with the samples of so many clients, perhaps merged with later axes; None: no such axis."""
        number = clients * self.batch
        if self._first is not None:
            axis = next((i for i, size in enumerate(shape) if size > 0 and size % number == 0), None)
            self._first.append(axis)
            return axis
        axis = next(self._next, -1)
        if axis is not None and (axis == -1 or axis >= len(shape) or shape[axis] % number):
            raise CannotStack("the module treats another number of samples in another way")
        return axis


class PerClient(Tensor):
    """A value without samples. It looks like one client's to the module; `rows` [C, ...] are those of all clients."""

    rows: Tensor
    samples: Samples

    @classmethod
    def of(cls, rows: Tensor, samples: Samples) -> PerClient:
        """Return the value that has these rows."""
        value = rows.detach()[0].as_subclass(cls)
        value.rows, value.samples = rows, samples
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_SHAPES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is F.scaled_dot_product_attention and not isinstance(args[0], PerClient):
            return _attend(*args, **kwargs or {})
        return _by_client(func, args, kwargs or {})


_ABOUT_SHAPES = {Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device"))}
_RESIZING = ("expand", "repeat", "broadcast_to", "tile")  # to sizes, one of which may be the number of samples
# computed without vmap, which takes many times as long for a small tensor
_ELEMENTWISE = (
    *("add", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__rsub__", "rsub"),
    *("mul", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "__rtruediv__", "exp", "sigmoid", "tanh"),
)


def _by_client(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function gives for every client on its own samples."""
    leaves, structure = tree_flatten((args, kwargs))
    samples = next(leaf.samples for leaf in leaves if isinstance(leaf, PerClient))
    name = getattr(func, "__name__", "")
    has_samples = name in _RESIZING and _resize(leaves, samples)
    dtype = samples.dtype if has_samples else None
    tensors, axes = [leaf for leaf in leaves if isinstance(leaf, Tensor)], []
    for i, tensor in enumerate(tensors):
        axis = 0 if isinstance(tensor, PerClient) else samples.axis(tensor.shape, samples.clients)
        if axis is not None and not isinstance(tensor, PerClient):
            has_samples = True
            tensors[i] = tensor.unflatten(axis, (samples.clients, -1))  # type: ignore[no-untyped-call]
            dtype = tensor.dtype if dtype is None and tensor.is_floating_point() else dtype
        axes.append(axis)
    tensors = [_rows(tensor, dtype) if isinstance(tensor, PerClient) else tensor for tensor in tensors]
    outputs: list[Any] = []
    output_structure: Any = None

    def call(*values: Tensor) -> list[Tensor]:
        nonlocal outputs, output_structure
        given = iter(values)
        arguments = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        positional, named = tree_unflatten(arguments, structure)
        outputs, output_structure = tree_flatten(func(*positional, **named))
        return [output for output in outputs if isinstance(output, Tensor)]

    if name in _ELEMENTWISE:
        results = call(*_broadcast(tensors, axes))
    else:
        results = torch.func.vmap(call, in_dims=tuple(axes))(*tensors)
    folded = (_fold(rows, samples) if has_samples else PerClient.of(rows, samples) for rows in results)
    return tree_unflatten([next(folded) if isinstance(o, Tensor) else o for o in outputs], output_structure)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Attend with a mask for every sample: torch's kernels have no gradient of a mask under vmap."""
    if isinstance(attn_mask, PerClient):
        mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
        attn_mask = mask.expand(query.shape[0], *mask.shape[1:])
    return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)


def _resize(sizes: list[Any], samples: Samples) -> bool:
    """Replace the number of all samples, if it is one of the sizes, by one client's; return whether it is."""
    places = [place for place, size in enumerate(sizes) if isinstance(size, int)]
    axis = samples.axis([sizes[place] for place in places], samples.clients)
    if axis is not None:
        sizes[places[axis]] //= samples.clients
    return axis is not None


def _rows(value: PerClient, dtype: torch.dtype | None) -> Tensor:
    """Return the rows in the type of the activations that they meet: in bf16, short parameters are float32."""
    return value.rows if dtype is None or not value.rows.is_floating_point() else value.rows.to(dtype)


def _broadcast(tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
    """Return the tensors with the clients on the first axis and equally many others."""
    tensors = [t.unsqueeze(0) if axis is None else t.movedim(axis, 0) for t, axis in zip(tensors, axes, strict=True)]
    most = max(tensor.dim() for tensor in tensors)
    return [tensor[(slice(None), *[None] * (most - tensor.dim()))] for tensor in tensors]


def _fold(rows: Tensor, samples: Samples) -> Tensor:
    """Return results [C, ...] with the clients folded into the samples."""
    axis = samples.axis(rows.shape[1:], 1)
    return PerClient.of(rows, samples) if axis is None else rows.movedim(0, axis).flatten(axis, axis + 1)


class StackedLayer(nn.Module):
    """Base of the stacked layers, whose own parameters are [C, ...] to themselves and `PerClient` to others."""

    samples = Samples()  # of no pass; the engine sets another one

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the layer with the samples on the first axis, whatever the axis of the input has them."""
        if not self.samples.in_module:
            return super().__call__(*inputs, **options)
        self.samples.in_module = False
        try:
            return self.call_folded(*inputs, **options)
        finally:
            self.samples.in_module = True

    def call_folded(self, *inputs: Any, **options: Any) -> Any:
        """Call the layer on its first input [C * B, ...]; one without samples gives a `PerClient`."""
        x, *others = inputs
        samples = self.samples
        axis = None if isinstance(x, PerClient) else samples.axis(x.shape, samples.clients)
        if axis == 0:
            return super().__call__(x, *others, **options)
        if axis is not None:
            return super().__call__(x.movedim(axis, 0), *others, **options).movedim(0, axis)
        rows = x.rows if isinstance(x, PerClient) else x.expand(samples.clients, *x.shape)
        is_merged = rows.dim() > 2
        result = super().__call__(rows.flatten(0, 1) if is_merged else rows, *others, **options)
        return PerClient.of(result.unflatten(0, (samples.clients, -1)) if is_merged else result, samples)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter that the module uses directly as `PerClient`."""
        value: Any = super().__getattr__(name)
        is_used_directly = isinstance(value, Tensor) and self.samples.in_module and name in self._parameters
        return PerClient.of(value, self.samples) if is_used_directly else value
