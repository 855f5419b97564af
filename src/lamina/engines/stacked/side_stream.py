"""Compute the weights' gradients on a second stream of the GPU.

Nothing in a backward pass waits for them, so they fill the processors that the chain of input gradients leaves idle.
Autograd does not see them: it would add up the gradients of a shared weight before they are complete.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MOST_PENDING = 2  # layers whose gradients are being computed: their inputs stay in memory
URGENT = -1  # the priority of streams with kernels that others wait for

Work = Callable[[], Sequence[Tensor]]


class Observer(Protocol):
    """Sees the gradients that a side stream computes."""

    def arrived(self, name: str, gradient: Tensor, stream: Any) -> None:
        """Take note of a parameter's gradient so far, once the kernels queued on the stream have run."""


class SideStream:
    """The weights' gradients of one backward pass."""

    def __init__(self, device: torch.device, leaves: Mapping[str, Tensor]) -> None:
        self._stream, self._observer = _stream_of(device), _observer.get()
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._gradients: dict[int, Tensor] = {}  # by id of the weight
        self._pending: deque[tuple[Any, Sequence[Tensor]]] = deque()
        self._has_work = False

    def add(self, weights: Sequence[int], work: Work, inputs: Sequence[Tensor]) -> None:
        """Start to compute the gradients of these weights from inputs that the main stream computes."""
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        self._has_work = True
        with torch.cuda.stream(self._stream):
            for weight, gradient in zip(weights, work(), strict=True):
                total = self._gradients.get(weight)
                self._gradients[weight] = gradient if total is None else total + gradient
        if self._observer is not None:
            for weight in weights:
                if weight in self._names:  # else it is not a parameter of the model
                    self._observer.arrived(self._names[weight], self._gradients[weight], self._stream)
        self._pending.append((self._stream.record_event(), inputs))
        if len(self._pending) > MOST_PENDING:
            done, _ = self._pending.popleft()
            main.wait_event(done)

    def finish(self) -> None:
        """Let the main stream wait for all gradients."""
        if self._has_work:  # a stream without work is not part of a capture
            torch.cuda.current_stream().wait_stream(self._stream)
        self._pending.clear()

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the part of a weight's gradient that this stream computed, or None."""
        return self._gradients.get(id(weight))


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Return the same stream at every call: memory that one graph has used can serve the next."""
    return torch.cuda.Stream(device, priority=URGENT)  # type: ignore[no-untyped-call]


class Claim(NamedTuple):
    """Weights whose gradients a side stream computes."""

    stream: SideStream
    weights: Sequence[int]  # their ids


_current: ContextVar[SideStream | None] = ContextVar("side_stream", default=None)
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Let an observer see the gradients that side streams compute within the context."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def claim(*weights: Tensor | None) -> Claim | None:
    """Return a claim on these parameters; None if one is computed from others, or if there is no side stream."""
    stream, given = _current.get(), [weight for weight in weights if weight is not None]
    if stream is None or not all(weight.is_leaf and weight.requires_grad for weight in given):
        return None
    return Claim(stream, [id(weight) for weight in given])


def weight_gradients(claim: Claim | None, work: Work, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of weights for autograd; None for each if a side stream computes them.

    Args:
        claim: what `claim` returned in the forward pass.
        work: computes the gradients, in the same order.
        inputs: what it reads.
    """
    if claim is None:
        return work()
    claim.stream.add(claim.weights, work, inputs)
    return [None] * len(claim.weights)


def differentiate(losses: Callable[[], Tensor], leaves: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses and the gradients of their sum by name; zeros at a leaf that they do not depend on."""
    device = next(iter(leaves.values())).device
    with _side_stream(device, leaves) as stream:
        values = losses()
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return values.detach(), {name: _total(leaf, gradient, stream) for (name, leaf), gradient in pairs}


def _total(leaf: Tensor, gradient: Tensor | None, stream: SideStream | None) -> Tensor:
    """Return the sum of what autograd found and what the side stream computed."""
    part = None if stream is None else stream.gradient(leaf)
    if gradient is None:
        return torch.zeros_like(leaf) if part is None else part
    return gradient if part is None else gradient + part


@contextlib.contextmanager
def _side_stream(device: torch.device, leaves: Mapping[str, Tensor]) -> Iterator[SideStream | None]:
    if device.type != "cuda":
        yield None
        return
    stream = SideStream(device, leaves)
    token = _current.set(stream)
    try:
        yield stream
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a capture that ends early must not leave a stream behind
            stream.finish()
        raise
    else:
        stream.finish()
    finally:
        _current.reset(token)
