"""Local steps on a GPU without host work: compiled, and replayed as a CUDA graph.

A `GraphedSteps` owns fixed buffers for the local state, the broadcast and the plan's indices of one shape of chunk. One
step (gather, augment, normalise, forward, backward, algorithm step) is captured once; a round copies its inputs in
and replays the step K times. The step number is a tensor on the device, so nothing is sent from the host in between.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import options
from lamina.engines.stacked.steps import Steps, split
from lamina.objective import Buffers

WARM_UP_RUNS = 3  # torch asks for a few runs on a side stream before a capture


class GraphedSteps:
    """The local steps of up to `rows` rows, as a graph."""

    def __init__(
        self,
        steps: Steps,
        local: Any,
        down: Any,
        buffers: Buffers,
        samples: Tensor,
        counts: Tensor | None,
        keys: Tensor | None,
        streams: Tensor | None,
        *,
        compiled: bool,
        pool: Any = None,
    ) -> None:
        """The graphs of one `pool` share the memory of their activations: only one of them runs at a time."""
        self.rows = samples.shape[0]
        self._algorithm = _with_own_numbers(steps.algorithm)
        self._steps = Steps(
            steps.objective,
            steps.data,
            steps.forward,
            self._algorithm,
            steps.parts,
            control=steps.control,
            clip=steps.clip.clone() if isinstance(steps.clip, Tensor) else steps.clip,
            augmentation=steps.augmentation,
            whole=steps.whole,
        )
        self._local = type(local)(
            *(None if v is None else v.clone(memory_format=torch.contiguous_format) for v in local)
        )
        self._down = _copy_record(down)
        # views of those buffers: what is written into a part is in the whole
        self._local_parts, self._down_parts = split(self._local, steps.parts), split(self._down, steps.parts)
        self._buffers = {n: b.clone() for n, b in buffers.items()}
        self._samples = _with_room(samples)
        self._counts = None if counts is None else _with_room(counts)
        self._keys = None if keys is None else _with_room(keys)
        self._streams = None if streams is None else _with_room(streams)
        self._lr = torch.zeros(self.rows, 1, dtype=local.y.dtype, device=local.y.device)
        self._losses = torch.zeros(self.rows, dtype=local.y.dtype, device=local.y.device)
        self._k = torch.zeros(1, dtype=torch.long, device=local.y.device)
        # parts whose parameters the forward pass wants in another type: written together with the state, so that
        # the state is not read again for it
        self._rounded: list[Tensor | None] = [None] * len(steps.parts)
        if len(steps.parts) > 1:
            named = self._steps.named([part.y for part in self._local_parts])
            wanted = [self._steps.forward.rounded({n: named[n]})[n].dtype for part in steps.parts for n in part.names]
            self._rounded = [
                None if dtype == part.y.dtype else part.y.to(dtype, memory_format=torch.contiguous_format)
                for part, dtype in zip(self._local_parts, wanted, strict=True)
            ]
        own = self._steps
        compute, write, self._round = own.apply, _write_parts, _round_parts
        if compiled:
            from torch import _dynamo  # here, because it takes seconds

            # Every shape of chunk is compiled for itself; beyond this many torch would silently stop compiling.
            _dynamo.config.recompile_limit = max(64, _dynamo.config.recompile_limit)
            own.mean_losses = torch.compile(own.mean_losses, dynamic=False)  # type: ignore[method-assign]
            write = torch.compile(_write_parts, dynamic=False)
            self._round = torch.compile(_round_parts, dynamic=False)

        def apply(local: list[Any], *arguments: Any) -> list[Any]:
            write(compute, self._rounded, local, *arguments)
            return local

        own.apply = apply  # type: ignore[method-assign,assignment]
        self._first, self._next = self._start, self._one_step
        if local.y.is_cuda:
            self._first = _captured(self._start, pool)
            self._next = _captured(self._one_step, pool, before=self._start)

    def run(
        self,
        steps: Steps,
        local: Any,
        down: Any,
        buffers: Buffers,
        samples: Tensor,
        counts: Tensor | None,
        keys: Tensor | None,
        streams: Tensor | None,
        lr: Any,
    ) -> tuple[Any, Tensor]:
        """All steps of a round from these inputs; the returned tensors are valid until the next call.

        Fewer rows than there is room for are fine: the rest goes on with what it had, and nobody looks.
        """
        rows, count = samples.shape[:2]
        for name in options(type(steps.algorithm)):
            value = getattr(steps.algorithm, name)
            if isinstance(value, Tensor):
                getattr(self._algorithm, name)[:rows].copy_(value)
        if isinstance(self._steps.clip, Tensor) and isinstance(steps.clip, Tensor):
            self._steps.clip[:rows].copy_(steps.clip)
        _write_record(self._local, local, rows)
        _write_record(self._down, down, rows)
        for name, buffer in buffers.items():
            self._buffers[name][:rows].copy_(buffer)
        self._samples[:rows, :count].copy_(samples)
        if self._counts is not None and counts is not None:
            self._counts[:rows, :count].copy_(counts)
        if self._keys is not None and keys is not None:
            self._keys[:rows, :count].copy_(keys)
        if self._streams is not None and streams is not None:
            self._streams[:rows, :count].copy_(streams)
        if isinstance(lr, Tensor):
            self._lr[:rows].copy_(lr)
        else:
            self._lr.fill_(lr)
        self._first()
        for _ in range(count):
            self._next()
        for name, buffer in buffers.items():
            buffer.copy_(self._buffers[name][:rows])
        made = type(local)(*(None if value is None else value[:rows] for value in self._local))
        return made, self._losses[:rows]

    def _start(self) -> None:
        """What precedes the first step, once the inputs are in."""
        self._losses.zero_()
        self._k.zero_()
        self._round(self._rounded, [part.y for part in self._local_parts])

    def _one_step(self) -> None:
        index = self._samples.index_select(1, self._k).squeeze(1)
        filled = None if self._counts is None else self._counts.index_select(1, self._k).squeeze(1)
        keys = None if self._keys is None else self._keys.index_select(1, self._k).squeeze(1)
        streams = None if self._streams is None else self._streams.index_select(1, self._k).squeeze(1)
        _, losses = self._steps.step(
            self._local_parts, self._down_parts, self._buffers, index, filled, keys, streams, self._lr
        )
        self._losses += losses
        self._k += 1


def _captured(work: Callable[[], None], pool: Any, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """The same work as a CUDA graph; `before` each of the runs that come first, not part of it.

    The work leaves nothing behind but what it writes into buffers from elsewhere, so that graphs may share a pool.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            before()
            work()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    collecting, stream, too_large = gc.isenabled(), torch.cuda.current_stream(), None
    gc.disable()  # a graph destroyed by the collector while another is captured would break that one
    try:
        with torch.cuda.graph(graph, pool=pool):
            try:
                work()
            except torch.cuda.OutOfMemoryError as error:  # once the capture has ended; its end may fail then, too
                too_large = error
    except RuntimeError:
        if too_large is None:
            raise
    finally:
        torch.cuda.set_stream(stream)  # a capture whose end fails leaves its own
        if collecting:
            gc.enable()
    if too_large is not None:
        raise too_large
    return graph.replay


def _round_parts(rounded: list[Tensor | None], parts: list[Tensor]) -> None:
    for copy, part in zip(rounded, parts, strict=True):
        if copy is not None:
            copy.copy_(part)


def _write_parts(compute: Any, rounded: list[Tensor | None], local: list[Any], *arguments: Any) -> None:
    """The algorithm's step, written over the old state and its rounded copy: compiled, in the same kernels."""
    after = compute(local, *arguments)
    for old_record, new_record, copy in zip(local, after, rounded, strict=True):
        for old, new in zip(old_record, new_record, strict=True):
            if old is not None and new is not old:
                old.copy_(new)
        if copy is not None:
            copy.copy_(new_record.y)


def _with_own_numbers(algorithm: Any) -> Any:
    """The algorithm with copies of the numbers that differ between rows, which later rounds write into."""
    own = {n: getattr(algorithm, n) for n in options(type(algorithm))}
    changed = {n: value.clone() for n, value in own.items() if isinstance(value, Tensor)}
    return dataclasses.replace(algorithm, **changed) if changed else algorithm


def room_for(steps: int) -> int:
    """Steps to make room for: the next power of two, so that a few more steps in a later round need no new graph.

    >>> [room_for(k) for k in (1, 3, 4, 5)]
    [1, 4, 4, 8]
    """
    return 1 << (steps - 1).bit_length()


def _with_room(values: Tensor) -> Tensor:
    """A copy of [rows, K, ...] with room for more steps."""
    made = values.new_zeros(values.shape[0], room_for(values.shape[1]), *values.shape[2:])
    made[:, : values.shape[1]] = values
    return made


def _copy_record(record: Any) -> Any:
    """A copy with memory of its own; a field that is one vector expanded over the rows stays one vector."""

    def copy(value: Tensor) -> Tensor:
        if value.stride(0) == 0:
            return value[0].clone().expand_as(value)
        return value.clone(memory_format=torch.contiguous_format)

    return type(record)(*(None if value is None else copy(value) for value in record))


def _write_record(target: Any, source: Any, rows: int) -> None:
    for old, new in zip(target, source, strict=True):
        if old is None:
            continue
        if old.stride(0) == 0:
            old[0].copy_(new[0])
        else:
            old[:rows].copy_(new)
