"""Compute the weights' gradients on a second stream of the GPU.

Nothing in a backward pass waits for them, so they fill the processors that the chain of input gradients leaves idle.
Autograd does not see them: it would add up the gradients of a shared weight before they are complete.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_PENDING = 2  # layers whose gradients are being computed: their inputs stay in memory

Work = Callable[[], Sequence[Tensor]]


class SideStream:
    """The weights' gradients of one backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device)
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
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Claim(NamedTuple):
    """Weights whose gradients a side stream computes."""

    stream: SideStream
    weights: Sequence[int]  # their ids


_current: ContextVar[SideStream | None] = ContextVar("side_stream", default=None)


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


def differentiate(losses: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return losses and the gradients of their sum; zeros at a leaf that they do not depend on."""
    with _side_stream(leaves[0].device) as stream:
        values = losses()
        gradients = torch.autograd.grad(values.sum(), list(leaves), allow_unused=True)
    return values.detach(), [_total(leaf, g, stream) for leaf, g in zip(leaves, gradients, strict=True)]


def _total(leaf: Tensor, gradient: Tensor | None, stream: SideStream | None) -> Tensor:
    """Return the sum of what autograd found and what the side stream computed."""
    part = None if stream is None else stream.gradient(leaf)
    if gradient is None:
        return torch.zeros_like(leaf) if part is None else part
    return gradient if part is None else gradient + part


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[SideStream | None]:
    if device.type != "cuda":
        yield None
        return
    stream = SideStream(device)
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
