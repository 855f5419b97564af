"""Local steps on a GPU without host work: compiled, and replayed as a CUDA graph.

A `GraphedSteps` owns fixed buffers for the local state, the broadcast and the plan's indices of one chunk. One step
(gather, augment, normalise, forward, backward, algorithm step) is captured once; a round copies its inputs in and
replays the step K times. The step number is a tensor on the device, so nothing is sent from the host in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.primitives import clip_by_norm
from lamina.objective import Buffers

if TYPE_CHECKING:
    from lamina.engines.stacked.engine import Stacked

# Every shape of chunk is compiled for itself; beyond this many torch would silently stop compiling.
torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)

COMPILED_FROM = 500_000  # parameters; a smaller model is done before its compilation would pay
WARM_UP_STEPS = 3  # torch asks for a few runs on a side stream before a capture


class GraphedSteps:
    """The local steps of one chunk shape, as a graph."""

    def __init__(
        self,
        engine: Stacked,
        algorithm: Algorithm,
        local: Any,
        down: Any,
        buffers: Buffers,
        samples: Tensor,
        counts: Tensor | None,
        keys: Tensor | None,
        control: bool,
    ) -> None:
        self.engine, self.algorithm, self.control = engine, algorithm, control
        self.local = type(local)(
            *(None if v is None else v.clone(memory_format=torch.contiguous_format) for v in local)
        )
        self.down = _copy_record(down)
        self.buffers = {n: b.clone() for n, b in buffers.items()}
        self.samples = _with_room(samples)
        self.counts = None if counts is None else _with_room(counts)
        self.keys = None if keys is None else _with_room(keys)
        rows = samples.shape[0]
        self.lr = torch.zeros(rows, 1, dtype=local.y.dtype, device=local.y.device)
        self.losses = torch.zeros(rows, dtype=local.y.dtype, device=local.y.device)
        self.k = torch.zeros(1, dtype=torch.long, device=local.y.device)
        compiled = engine.compiled
        if compiled is None:
            # In float32 torch 2.11 mistakes the layout of a grouped convolution's weight gradient when compiled.
            compiled = engine.objective.start.numel() >= COMPILED_FROM and engine.forward.precision == "bf16"
        self._means = torch.compile(self._mean_losses, dynamic=False) if compiled else self._mean_losses
        self._apply = torch.compile(self._apply_step, dynamic=False) if compiled else self._apply_step
        self._replay = self._capture().replay if local.y.is_cuda else self._one_step

    def run(
        self,
        local: Any,
        down: Any,
        buffers: Buffers,
        samples: Tensor,
        counts: Tensor | None,
        keys: Tensor | None,
        lr: Any,
    ) -> tuple[Any, Tensor]:
        """All steps of a round from these inputs; the returned tensors are valid until the next call."""
        _write_record(self.local, local)
        _write_record(self.down, down)
        for name, buffer in buffers.items():
            self.buffers[name].copy_(buffer)
        steps = samples.shape[1]
        self.samples[:, :steps].copy_(samples)
        if self.counts is not None and counts is not None:
            self.counts[:, :steps].copy_(counts)
        if self.keys is not None and keys is not None:
            self.keys[:, :steps].copy_(keys)
        self.lr.copy_(torch.as_tensor(lr, dtype=self.lr.dtype).expand_as(self.lr))
        self.losses.zero_()
        self.k.zero_()
        for _ in range(steps):
            self._replay()
        for name, buffer in buffers.items():
            buffer.copy_(self.buffers[name])
        return self.local, self.losses

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.k.zero_()
                self._one_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.k.zero_()
        with torch.cuda.graph(graph):
            self._one_step()
        return graph

    def _one_step(self) -> None:
        index = self.samples.index_select(1, self.k).squeeze(1)
        filled = None if self.counts is None else self.counts.index_select(1, self.k).squeeze(1)
        keys = None if self.keys is None else self.keys.index_select(1, self.k).squeeze(1)
        kept = None if filled is None else {n: b.clone() for n, b in self.buffers.items()}
        leaf = self.local.y.detach().requires_grad_()
        means = self._means(leaf, self.buffers, index, filled, keys)
        (grad,) = torch.autograd.grad(means.sum(), leaf)
        if self.control:
            anchor = self.down.x.detach().requires_grad_()
            scratch = {n: b.clone() for n, b in self.buffers.items()}
            (at_x,) = torch.autograd.grad(self._means(anchor, scratch, index, filled, keys).sum(), anchor)
            grad = grad - at_x
        self._apply(self.local, self.down, grad, self.lr, filled)
        means = means.detach()
        if filled is not None and kept is not None:
            active = filled > 0
            means = torch.where(active, means, 0.0)
            for name, buffer in self.buffers.items():
                buffer.copy_(torch.where(active.reshape(-1, *[1] * (buffer.dim() - 1)), buffer, kept[name]))
        self.losses += means
        self.k += 1

    def _mean_losses(
        self, flat: Tensor, buffers: Buffers, index: Tensor, filled: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        x, y = self.engine.batch(index, keys)
        return self.engine.mean_losses(flat, buffers, x, y, filled, train=True)

    def _apply_step(self, local: Any, down: Any, grad: Tensor, lr: Tensor, filled: Tensor | None) -> None:
        """The algorithm's step, written over the old state inside the same kernels."""
        engine = self.engine
        if engine.clip is not None:
            grad = clip_by_norm(grad, engine.clip)
        after = self.algorithm.step(local, down, grad, lr, engine.objective.layers)
        active = None if filled is None else (filled > 0).unsqueeze(1)
        for old, new in zip(local, after, strict=True):
            if old is not None and new is not old:
                old.copy_(new if active is None else torch.where(active, new, old))


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


def _write_record(target: Any, source: Any) -> None:
    for old, new in zip(target, source, strict=True):
        if old is None:
            continue
        if old.stride(0) == 0:
            old[0].copy_(new[0])
        else:
            old.copy_(new)
