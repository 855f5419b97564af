"""Local steps on a GPU without host work: one step is captured as a CUDA graph, then replayed K times in every round.

`CapturedSteps` owns fixed buffers for the local state, the broadcast, the batches and all numbers of a chunk. A round
copies its inputs in, replays the step, and reads the state out. Learning rates, options and the step number are tensors
in these buffers, so one captured step serves every value. Capturing takes a fraction of a second; only the first step
of a process compiles kernels, all at the same time.

Without a GPU the same steps run uncaptured, which is how the tests compare them with the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import options
from lamina.data.parts import Indices
from lamina.engines.stacked.forward import StackedForward
from lamina.engines.stacked.gpu.launch import Launch, compile_ahead, recording
from lamina.engines.stacked.independence import number_options
from lamina.engines.stacked.layers.convolution import kernels_for, wait_for_kernels
from lamina.engines.stacked.overlap import Overlap, Watched
from lamina.engines.stacked.rows import map_record
from lamina.engines.stacked.side_stream import URGENT
from lamina.engines.stacked.steps import Batches, LocalWork, StackedObjective, algorithm_step
from lamina.objective.batch import map_batch, tensors
from lamina.objective.objective import Buffers

log = logging.getLogger(__name__)

MAX_CAPTURED = 2  # kept at a time for each problem: rounds with and without short batches, say
MAX_SIZES = 32  # of batches that are captured; others run one operation at a time
STEPS_AHEAD = 2  # of the GPU, for which the host takes samples: more would fill its memory
ALIGNMENT = 16  # elements between the starts of rows: wide loads


@dataclass
class Graphs:
    """The captured steps of one engine."""

    _captured: dict[Any, CapturedSteps] = field(default_factory=dict, repr=False)
    _pool: Any = field(default=None, repr=False)  # the memory that their activations share: one runs at a time

    def train(self, problem: StackedObjective, work: LocalWork, filled: Indices) -> tuple[Any, Tensor]:
        """Take all local steps; return the local state and the sum of losses, both valid until the next call.

        Args:
            problem: what the rows differentiate.
            work: what they start from.
            filled: how many samples the batches have [rows, K]; BatchNorm refuses one sample while a step is captured.
        """
        lone_sample = not problem.summed and bool((filled == 1).any())
        assert isinstance(problem.forward, StackedForward)
        problem.forward.announce(lone_sample)
        kind = (problem.summed, lone_sample, structure(work))
        steps = self._captured.get(kind)
        if steps is None or work.rows > steps.capacity:
            self._captured.pop(kind, None)
            same_problem = [key for key in self._captured if key[0] == problem.summed]
            if len(same_problem) >= MAX_CAPTURED:
                del self._captured[same_problem[0]]
            steps = None
            gc.collect()  # graphs may be in reference cycles
            if not self._captured:  # a pool ends with the last graph that uses it
                self._pool = torch.cuda.graph_pool_handle() if work.local.y.is_cuda else None
            steps = CapturedSteps(problem, work, self._pool)
        trained = steps.train(work)
        self._captured[kind] = steps  # not before it is known to fit the memory
        return trained

    def release(self) -> bool:
        """Give back the memory of all captured steps; return whether there were any."""
        had_any = bool(self._captured)
        self._captured.clear()
        self._pool = None
        free_graphs()
        return had_any


def free_graphs() -> None:
    """Give back the memory of graphs that nothing refers to any more."""
    gc.collect()  # they may be in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def structure(work: LocalWork) -> Any:
    """Return what a captured step depends on, apart from the number of rows: shapes and options, but no numbers."""
    samples, numbers = work.batches.samples, _numbers(work)
    return (
        _with_room(samples.shape[1]),
        samples.shape[2],
        work.batches.counts is None,
        work.control,
        work.second,
        work.loss,
        work.clip is None,
        tuple(value is None for value in work.local),
        tuple(None if value is None else _is_shared(value) for value in work.down),
        type(work.algorithm),
        tuple((name, None if name in numbers else value) for name, value in _options(work).items()),
    )


def _options(work: LocalWork) -> dict[str, Any]:
    return {name: getattr(work.algorithm, name) for name in options(type(work.algorithm))}


def _numbers(work: LocalWork) -> dict[str, Number]:
    """Return the options that are inputs of a captured step: numbers in formulas, except infinite ones ("no limit")."""
    declared = number_options(work.algorithm)
    return {name: value for name, value in _options(work).items() if isinstance(value, Tensor) or name in declared}


def _with_room(steps: int) -> int:
    """Return the next power of two, so that a few more steps in a later round need no new capture.

    >>> [_with_room(k) for k in (1, 3, 4, 5)]
    [1, 4, 4, 8]
    """
    return 1 << (steps - 1).bit_length()


def size_class(rows: int) -> int:
    """Return the number of rows that a step is captured for: rounded up, so that cohorts of similar size share it.

    >>> [size_class(rows) for rows in (3, 8, 9, 15, 17, 100)]
    [3, 8, 9, 15, 18, 104]
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _is_shared(value: Tensor) -> bool:
    """Return whether all rows are the same vector, expanded: only one row is in memory."""
    return value.stride(0) == 0


def _aligned(like: Tensor, rows: int) -> Tensor:
    pitch = -(-like.shape[1] // ALIGNMENT) * ALIGNMENT
    return like.new_zeros(rows, pitch)[:, : like.shape[1]]


class CapturedSteps:
    """The local steps of up to `capacity` rows, in buffers of their own."""

    def __init__(self, problem: StackedObjective, work: LocalWork, pool: Any, stream: Any = None) -> None:
        self.capacity = work.rows
        self._stream = stream  # where steps are captured; None: on a stream for all
        self._kernels = kernels_for(work.local.y.device, work.local.y.dtype)
        self._problem, self._pool = problem, pool
        self._host_problem = problem if problem.needs_host else None  # takes the samples of a step before it begins
        self._local = map_record(self._rows_like, work.local)
        self._down = map_record(self._like_broadcast, work.down)
        self._buffers = {name: self._rows_like(buffer) for name, buffer in work.buffers.items()}
        self._batches = map_record(self._steps_like, work.batches)
        if self._host_problem is not None:
            self._problem = self._with_prepared_samples(work)
        y = work.local.y
        self._numbers = {name: y.new_zeros(self.capacity, 1) for name in _numbers(work)}
        self._lr, self._losses = y.new_zeros(self.capacity, 1), y.new_zeros(self.capacity)
        self._clip = None if work.clip is None else y.new_zeros(self.capacity, 1)
        self._loss = y.new_zeros(self.capacity, 1) if work.loss else None  # of a step, for the algorithm
        self._k = torch.zeros(1, dtype=torch.long, device=y.device)
        self._all_active = torch.ones(self.capacity, dtype=torch.long, device=y.device)
        algorithm = dataclasses.replace(work.algorithm, **self._numbers)
        self._work = dataclasses.replace(work, algorithm=algorithm, lr=self._lr, clip=self._clip)
        self._parameters, self._rounded = self._views_of_parameters()
        self._at_x = problem.layers.unflatten(self._down.x) if work.control else {}
        self._fused, self._why_not_fused = self._fuse()
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}  # by number of rows and size of the batch
        self._sent_addresses: list[Tensor] = []  # of the gradients, one table per graph
        self._overlaps: list[Overlap] = []  # whose tables of blocks graphs read
        self._uncaptured_addresses = self._new_addresses()
        self._sent_samples: deque[Any] = deque()  # events after the copies of samples that the host has taken

    def train(self, work: LocalWork, sizes: Sequence[int] = ()) -> tuple[Any, Tensor]:
        """Take all steps from these inputs; the returned tensors are valid until the next call.

        A step is captured for a few numbers of rows. Rows without a client compute on old values that nobody reads.
        `sizes` are those of the steps' batches, if they are not padded.
        """
        rows, count, batch = work.batches.samples.shape
        size = min(size_class(rows), self.capacity)
        steps = [(size, n) for n in sizes or [batch] * count]
        self._prepare(work, 0, steps[0][1])
        for step in dict.fromkeys(steps):
            if step not in self._graphs and not (sizes and len(self._graphs) == MAX_SIZES):
                self._graphs[step] = self._capture(*step, work)
        self._copy_in(work)  # after the capture: the runs before it change the state
        for k, step in enumerate(steps):
            if k:
                self._prepare(work, k, step[1])
            self._graphs[step]() if step in self._graphs else self._step(*step, self._uncaptured_addresses.copy_)
        for name, buffer in work.buffers.items():
            buffer.copy_(self._buffers[name][:rows])
        return map_record(lambda value: value[:rows], self._local), self._losses[:rows]

    # --- buffers ---------------------------------------------------------------------------------------------------

    def _rows_like(self, value: Tensor) -> Tensor:
        """Return a buffer for all rows. Vectors start at aligned addresses, and kernels may read up to the next one."""
        if value.dim() != 2:
            return value.new_zeros(self.capacity, *value.shape[1:])
        return _aligned(value, self.capacity)

    def _like_broadcast(self, value: Tensor) -> Tensor:
        """Return a buffer for all rows, or for a vector that all rows share."""
        return _aligned(value, 1).expand(self.capacity, -1) if _is_shared(value) else self._rows_like(value)

    def _steps_like(self, value: Tensor) -> Tensor:
        device = self._local.y.device
        return value.new_zeros(self.capacity, _with_room(value.shape[1]), *value.shape[2:], device=device)

    def _with_prepared_samples(self, work: LocalWork) -> StackedObjective:
        """Return the problem with buffers for the samples of a step, which the host prepares."""
        batch = map_record(lambda value: value[:, 0], work.batches)
        samples = dataclasses.replace(self._problem, augmentation=None).samples(batch)  # it changes no shapes or types
        x, y = (map_batch(self._samples_like, part) for part in samples)
        return dataclasses.replace(self._problem, prepared=(x, y))

    def _samples_like(self, value: Tensor) -> Tensor:
        return value.new_zeros(self.capacity, *value.shape[1:])

    def _prepare(self, work: LocalWork, k: int, size: int) -> None:
        """Take the samples of step k, if the host must, and copy them to where the captured step reads them."""
        if self._host_problem is None or self._problem.prepared is None:
            return
        batch = map_record(lambda value: value[:, k], work.batches).first(size)
        for buffers, samples in zip(self._problem.prepared, self._host_problem.samples(batch), strict=True):
            for target, source in zip(tensors(buffers), tensors(samples), strict=True):
                target[: work.rows, :size].copy_(source)
        if self._losses.is_cuda:  # pinned memory is free again when the GPU has read it
            self._sent_samples.append(torch.cuda.current_stream().record_event())
            if len(self._sent_samples) > STEPS_AHEAD:
                self._sent_samples.popleft().synchronize()

    def _views_of_parameters(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the parameters in the precision of the forward pass by name, and the buffer of the rounded ones."""
        layers, forward = self._problem.layers, self._problem.forward
        parameters = layers.unflatten(self._local.y)
        if not any(forward.rounds(name, parameter) for name, parameter in parameters.items()):
            return parameters, None
        rounded = self._rows_like(self._local.y.bfloat16())
        views = layers.unflatten(rounded)
        return {n: views[n] if forward.rounds(n, p) else p for n, p in parameters.items()}, rounded

    def _copy_in(self, work: LocalWork) -> None:
        rows, count = work.batches.samples.shape[:2]
        rounded = None if self._rounded is None else self._rounded[:rows]
        for target, source in zip((*self._local, *self._down), (*work.local, *work.down), strict=True):
            if target is None:
                continue
            if _is_shared(target):
                target[0].copy_(source[0])
            elif self._kernels is not None and source.dim() == 2 and _is_shared(source):
                self._kernels.fill_rows(target[:rows], source[0], rounded if target is self._local.y else None)
            else:
                target[:rows].copy_(source)
                if rounded is not None and target is self._local.y:
                    rounded.copy_(target[:rows])
        for name, buffer in work.buffers.items():
            self._buffers[name][:rows].copy_(buffer)
        takes_samples = self._host_problem is None  # else the host has taken them
        for name, target, source in zip(Batches._fields, self._batches, work.batches, strict=True):
            is_used = takes_samples or name in ("counts", "streams")
            if target is not None and source is not None and is_used:
                target[:rows, :count].copy_(source)
        for target, number in [
            (self._lr, work.lr),
            *((self._numbers[name], value) for name, value in _numbers(work).items()),
            *([] if self._clip is None or work.clip is None else [(self._clip, work.clip)]),
        ]:
            target[:rows].copy_(number) if isinstance(number, Tensor) else target.fill_(number)
        self._losses.zero_()
        self._k.zero_()

    # --- one step --------------------------------------------------------------------------------------------------

    def _fuse(self) -> tuple[Any, str]:
        """Return the algorithm's step as a kernel; None without Triton, or if the step has no such kernel, and why."""
        if self._kernels is None:
            return None, ""
        from lamina.engines.stacked.gpu.local_step import LocalStep
        from lamina.engines.stacked.gpu.trace import CannotFuse

        work, layers = self._work, self._problem.layers
        try:
            if work.second:
                raise CannotFuse("a second gradient")
            step = LocalStep(
                work.algorithm, self._local, self._down, self._lr, self._clip, layers, self._rounded, self._loss
            )  # fmt: skip
        except CannotFuse as reason:
            return None, f"{type(work.algorithm).__name__}.step uses {reason}"
        return step, ""

    def _step(
        self, rows: int, size: int, send_addresses: Callable[[Tensor], Tensor], early: Watched | Overlap | None = None
    ) -> None:
        """Take one local step of the first rows, in place, with batches of this size.

        `send_addresses` copies the table of the gradients' addresses to the device, where the kernels read it. `early`
        sees the gradients when they arrive.
        """
        batch = map_record(lambda value: value[:rows].index_select(1, self._k).squeeze(1), self._batches)
        batch = batch.first(size)
        y, x = ({n: view[:rows] for n, view in views.items()} for views in (self._parameters, self._at_x))
        buffers = {name: buffer[:rows] for name, buffer in self._buffers.items()}
        is_active = self._all_active if batch.counts is None else batch.counts
        with contextlib.nullcontext() if early is None else early.of_pass(is_active):
            gradients, losses = self._problem.step_gradients(self._work, y, x, buffers, batch)
        if self._fused is None:
            self._step_unfused(rows, gradients, losses, x, buffers, batch)
        else:
            layers = self._problem.layers
            pieces = [piece.contiguous() for piece in layers.pieces(gradients)]
            if self._loss is not None:
                self._loss[:rows].copy_(losses.unsqueeze(1))
            addresses = send_addresses(self._fused.addresses(pieces))
            late = None if early is None else early.finish(dict(zip(layers.names, pieces, strict=True)))
            self._fused.run(rows, is_active, addresses, late)
        self._losses[:rows] += losses
        self._k += 1

    def _step_unfused(
        self, rows: int, gradients: dict[str, Tensor], losses: Tensor, x: dict[str, Tensor], buffers: Buffers,
        batch: Batches,
    ) -> None:  # fmt: skip
        """Take the step with torch's operations, from the gradients at y by name and the losses."""
        local, down = (map_record(lambda value: value[:rows], record) for record in (self._local, self._down))
        numbers = {name: value[:rows] for name, value in self._numbers.items()}
        work = dataclasses.replace(
            self._work,
            algorithm=dataclasses.replace(self._work.algorithm, **numbers),
            lr=self._lr[:rows],
            clip=None if self._clip is None else self._clip[:rows],
        )
        whole = [self._problem.layers]
        (after,) = algorithm_step(self._problem, whole, work, [local], [down], gradients, losses, x, buffers, batch)
        for old, new in zip(local, after, strict=True):
            if old is not None and new is not old:
                old.copy_(new)
        if self._rounded is not None:
            self._rounded[:rows].copy_(local.y)

    # --- capture ---------------------------------------------------------------------------------------------------

    def launches(self, work: LocalWork, rows: int | None = None, size: int | None = None) -> list[Launch]:
        """Return what a step of the first rows launches, without running it; the default is all of them."""
        batch = work.batches.samples.shape[2]
        with recording() as launches:
            self._copy_in(work)
            self._step(rows or self.capacity, size or batch, self._new_addresses().copy_)
        return launches

    def _new_addresses(self) -> Tensor:
        """Return an empty table for the gradients' addresses."""
        return torch.zeros(len(self._problem.layers.names), 4, dtype=torch.long, device=self._local.y.device)

    def _capture(self, rows: int, size: int, work: LocalWork) -> Callable[[], None]:
        """Return a function that takes one step of the first rows: the replay of a CUDA graph, where there is CUDA.

        `work` is something to try the step on before it is captured.
        """
        device = self._local.y.device
        if device.type != "cuda":
            return lambda: self._step(rows, size, lambda addresses: addresses)
        sent_addresses = self._new_addresses()
        self._sent_addresses.append(sent_addresses)  # the graph reads them as long as it lives
        if not self._graphs:
            if self._why_not_fused:
                log.info("the local step is not fused into one kernel: %s", self._why_not_fused)
            wait_for_kernels()  # a process may not be forked while another thread imports Triton
            compile_ahead(self.launches(work, rows, size))
        self._copy_in(work)
        watched = self._watched()
        side = self._stream or _warm_up_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(rows, size, sent_addresses.copy_, watched)  # so that libraries have their workspaces
        torch.cuda.current_stream().wait_stream(side)
        unsent: list[Tensor] = []

        def send_later(addresses: Tensor) -> Tensor:
            """Keep the addresses: a copy to the device cannot be captured, and the graph's memory does not move."""
            unsent.append(addresses)
            return sent_addresses

        overlap = None
        if watched is not None and watched.early:
            overlap = Overlap(self._fused, rows, sent_addresses, watched.early)
        replay = captured(lambda: self._step(rows, size, send_later, overlap), self._pool, self._stream)
        if overlap is not None and overlap.is_right:
            self._overlaps.append(overlap)
        elif overlap is not None:  # the module does not do the same in every pass
            replay = captured(lambda: self._step(rows, size, send_later), self._pool, self._stream)
        if unsent:
            sent_addresses.copy_(unsent[-1])
        return replay

    def _watched(self) -> Watched | None:
        """Return what finds out which layers may take the step early; None if none may."""
        has_side_stream = isinstance(self._problem.forward, StackedForward) and not self._work.control
        if not has_side_stream or self._fused is None or not self._fused.is_one_kernel or self._loss is not None:
            return None
        vectors = [self._local.y] if self._rounded is None else [self._local.y, self._rounded]
        return Watched(self._problem.layers, vectors)


@functools.cache
def _warm_up_stream(device: torch.device) -> Any:
    """Return the same stream at every call: cuBLAS keeps a workspace of up to 64 MB for each stream it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """Return a stream whose kernels go before those of the layers that take the step early."""
    return torch.cuda.Stream(device, priority=URGENT)  # type: ignore[no-untyped-call]


def captured(work: Callable[[], None], pool: Any, stream: Any) -> Callable[[], None]:
    """Return the work as a CUDA graph, captured on a stream (None: on one for all).

    The work leaves nothing behind but what it writes into buffers from elsewhere, so that graphs may share a pool.
    """
    wait_for_kernels()
    graph = torch.cuda.CUDAGraph()
    is_collecting, current, too_large = gc.isenabled(), torch.cuda.current_stream(), None
    gc.disable()  # a graph destroyed by the collector while another is captured would break that one
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream or _capture_stream(current.device)):
            try:
                work()
            except torch.cuda.OutOfMemoryError as error:  # raised once the capture has ended, which may also fail
                too_large = error
    except RuntimeError:
        if too_large is None:
            raise
    finally:
        torch.cuda.set_stream(current)  # a capture whose end fails leaves its own
        if is_collecting:
            gc.enable()
    if too_large is not None:
        raise too_large
    return graph.replay
