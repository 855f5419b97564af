"""How many rows (clients) are trained at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lamina.engines.stacked.engine import Member, Stacked

CACHE_BYTES = 16 << 20  # of models at a time on a CPU: more rows save dispatch, fewer stay in its caches
USABLE = 0.6  # of a GPU's free memory; the rest is for cuDNN's workspaces and fragmentation
VECTORS = 16  # of the model's size per row: local state twice, broadcast, upload, client state, gradient, casts


def rows_that_fit(engine: Stacked, member: Member) -> int:
    """As many rows as suit the device's memory (on a CPU, its caches), at least one."""
    objective = engine.objective
    if objective.device.type != "cuda":
        model_bytes = objective.start.numel() * objective.start.element_size()
        return max(1, CACHE_BYTES // model_bytes)
    batch = member.plan.index.shape[2]
    if batch not in engine.row_bytes:  # measured once per batch size; later rounds need no more than the first
        free, _ = torch.cuda.mem_get_info(objective.device)
        engine.row_bytes[batch] = row_bytes(engine, batch), int(free * USABLE)
    needed, usable = engine.row_bytes[batch]
    return max(1, usable // needed)


def row_bytes(engine: Stacked, batch: int) -> int:
    """The memory one row needs: its vectors, and twice what its forward pass saves for the backward pass."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    objective = engine.objective
    index = torch.zeros(1, batch, dtype=torch.long, device=objective.device)
    keys = index if engine.augmentation is not None else None
    flat = objective.start.unsqueeze(0).clone().requires_grad_()
    buffers: dict[str, Any] = {n: b.unsqueeze(0).clone() for n, b in objective.buffers.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.mean_losses(flat, buffers, *engine.batch(index, keys), None, train=engine.forward.name == "stacked")
    vector = objective.start.numel() * objective.start.element_size()
    return VECTORS * vector + 2 * sum(saved.values())
