"""Clients apart: the unchanged module trains one client after another, and on a GPU several at the same time.

This is for modules without a stacked form, and for those that are faster without. A slot holds the buffers of one
client and replays its captured step on a stream of its own. Batches are never padded, so that a module may mix the
samples of a batch; a step is captured for every size of a batch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lamina.data.parts import Indices
from lamina.engines.stacked.graphs import CapturedSteps, captured, free_graphs, structure
from lamina.engines.stacked.layers.attention_masks import unread_masks
from lamina.engines.stacked.probe import reads_values
from lamina.engines.stacked.rows import map_record
from lamina.engines.stacked.steps import LocalWork, StackedObjective
from lamina.engines.state import copy_buffers
from lamina.objective.batch import Inputs, Targets
from lamina.objective.objective import Objective

SLOTS = 4  # eight are hardly faster, and each needs memory for its activations


def why_not_captured(objective: Objective, sample: tuple[Inputs, Targets]) -> str:
    """Return why a step of the module cannot be captured, or an empty string; on a GPU one is captured as a trial."""
    inputs, targets = sample
    parameters = objective.layers.unflatten(objective.start)
    buffers = copy_buffers(objective.buffers)

    def step() -> None:
        with unread_masks():
            objective.gradient_at(parameters, buffers, inputs, targets, streams=objective.streams_or_zeros(None, 1))

    try:
        if reads_values(step):
            return "the model or the loss reads tensors' values, which a captured step cannot"
        if objective.device.type == "cuda":
            stream = _stream(objective.device, 0)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
                captured(step, None, stream)
            torch.cuda.current_stream().wait_stream(stream)
    except Exception as error:  # whatever a user's module raises while it is captured
        return f"captured: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


@dataclass
class Apart:
    """The slots of one engine."""

    _slots: dict[Any, list[CapturedSteps]] = field(default_factory=dict, repr=False)  # by kind of step

    def train(self, problem: StackedObjective, work: LocalWork, filled: Indices) -> tuple[Any, Tensor]:
        """Take all local steps; return the local state and the sum of losses. `filled` are the batches' sizes."""
        rows = [work.row(r) for r in range(work.rows)]
        kind = (problem.summed, structure(rows[0]))
        if kind not in self._slots:  # one kind at a time for each problem
            self._slots = {other: slots for other, slots in self._slots.items() if other[0] != problem.summed}
        slots = self._slots.pop(kind, [])
        state = map_record(lambda value: value.new_empty(value.shape), work.local)
        losses = work.local.y.new_empty(work.rows)
        device = losses.device
        streams = [_stream(device, s) for s in range(min(SLOTS, work.rows))] if device.type == "cuda" else []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for r, row in enumerate(rows):
            stream = streams[r % SLOTS] if streams else None
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                if r % SLOTS == len(slots):
                    pool = None if stream is None else torch.cuda.graph_pool_handle()
                    slots.append(CapturedSteps(problem, row, pool, stream))
                trained, loss = slots[r % SLOTS].train(row, [int(size) for size in filled[r] if size])
                losses[r].copy_(loss[0])
                for target, source in zip(state, trained, strict=True):
                    if target is not None:
                        target[r].copy_(source[0])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        self._slots[kind] = slots  # not before it is known to fit the memory
        return state, losses

    def release(self) -> bool:
        """Give back the memory of all slots; return whether there were any."""
        had_any = bool(self._slots)
        self._slots.clear()
        free_graphs()
        return had_any


_streams: dict[tuple[torch.device, int], Any] = {}


def _stream(device: torch.device, slot: int) -> Any:
    """Return the same stream at every call: cuBLAS keeps a workspace for each stream it has seen."""
    if (device, slot) not in _streams:
        _streams[device, slot] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device, slot]
