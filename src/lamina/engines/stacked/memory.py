"""Memory: how many rows (clients) are trained at once, and where what they keep is kept."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import BadInput
from lamina.ledger import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lamina.engines.stacked.engine import Member, Row, Stacked

log = logging.getLogger(__name__)

CACHE_BYTES = 16 << 20  # of models at a time on a CPU: more rows save dispatch, fewer stay in its caches
ALONE_FROM = 300_000  # parameters; on a CPU such a model gains nothing from company
USABLE = 0.6  # of a GPU's free memory; the rest is for cuDNN's workspaces and fragmentation
FOR_CLIENTS = 0.3  # of a GPU's free memory may hold what clients keep between rounds; more is kept on the host
VECTORS = 16  # of the model's size per row: local state twice, broadcast, upload, client state, gradient, casts


def rows_that_fit(engine: Stacked, member: Member) -> int:
    """As many rows as suit the device's memory (on a CPU, its caches), at least one."""
    objective = engine.objective
    if objective.device.type != "cuda":
        model_bytes = objective.start.numel() * objective.start.element_size()
        return 1 if objective.start.numel() >= ALONE_FROM else max(1, CACHE_BYTES // model_bytes)
    batch = member.plan.index.shape[2]
    if batch not in engine.row_bytes:  # measured once per batch size; later rounds need no more than the first
        free = free_bytes(objective.device)
        needs = member.algorithm.needs(member.plan.number)
        graphs = 2 if needs.full_gradient or needs.control_variate else 1  # the full gradient is a captured step, too
        engine.row_bytes[batch] = row_bytes(engine, batch), int(free * USABLE / graphs)
    needed, usable = engine.row_bytes[batch]
    return max(1, usable // needed)


def even_size(rows: int, most: int) -> int:
    """The size of chunks of at most so many rows, as few as can be and about equally large.

    >>> even_size(100, 64), even_size(100, 100), even_size(7, 3), even_size(0, 64)
    (50, 100, 3, 64)
    """
    return -(-rows // -(-rows // most)) if rows else most


def in_chunks_that_fit(engine: Stacked, chunks: Sequence[list[Row]], work: Callable[[list[Row]], None]) -> None:
    """Do the work chunk by chunk; one that turns out not to fit is halved, and no later one is larger.

    So `work` must change nothing before it has all the memory it needs.
    """

    def cut(chunks: Sequence[list[Row]]) -> list[list[Row]]:
        most = engine.most_rows or max(map(len, chunks), default=1)
        return [chunk[i : i + most] for chunk in chunks for i in range(0, len(chunk), most)]

    left = cut(chunks)  # the gradients before may have been too many
    while left:
        chunk = left.pop(0)
        try:
            work(chunk)
            continue
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).split(" If reserved", maxsplit=1)[0].splitlines()[0]
        # out of the except clause: the error's traceback would keep alive what is to be freed
        freed = engine.forget_graphs()
        if len(chunk) > 1:
            engine.most_rows = -(-len(chunk) // 2)
            log.warning(
                "%d clients at a time do not fit the GPU's memory: from here on at most %d",
                len(chunk),
                engine.most_rows,
            )
        elif not freed:
            raise BadInput(f"the GPU's memory is too small for one client: take smaller batches, or a CPU ({said})")
        left = cut([chunk, *left])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says so: Python, numpy, torch's own allocators, CUDA or one of its libraries."""
    words = str(error).lower()
    of_torch = any(said in words for said in ("out of memory", "alloc_failed", "not enough memory", "can't allocate"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch)


def free_bytes(device: torch.device) -> int:
    """What this process may take of a GPU (named with its index): less than is free if torch was told to leave some."""
    gc.collect()  # engines of before are in cycles
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):  # an older torch
        return free
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def row_bytes(engine: Stacked, batch: int) -> int:
    """The memory one row needs: its vectors, and twice what its forward pass saves for the backward pass."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    objective = engine.objective
    index = torch.zeros(1, batch, dtype=torch.long, device=objective.device)
    keys = index if engine.protocol.augmentation is not None else None
    steps = engine.steps(engine.algorithm)
    flat = objective.start.unsqueeze(0)
    leaves = {
        n: p.clone().requires_grad_() for n, p in engine.forward.rounded(objective.layers.unflatten(flat)).items()
    }
    buffers: dict[str, Any] = {n: b.unsqueeze(0).clone() for n, b in objective.buffers.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        steps.mean_losses(leaves, buffers, index, None, keys, train=engine.forward.name == "stacked")
    vector = objective.start.numel() * objective.start.element_size()
    return VECTORS * vector + 2 * sum(saved.values())


def client_home(engine: Stacked, members: Sequence[Member]) -> torch.device:
    """Where clients' state is kept between rounds: with the model, or on the host if it could grow too large."""
    if engine.client_home is None:
        device, first = engine.objective.device, members[0]
        engine.client_home = device
        if device.type == "cuda":
            client = first.algorithm.client_init(first.state.server.x, engine.objective.layers)
            kept = sum(payload_bytes(client).values())
            free = free_bytes(device)
            if kept * first.state.ledger.clients * len(members) > FOR_CLIENTS * free:
                engine.client_home = torch.device("cpu")
                log.info("keeping the clients' state on the host: all of it would fill the GPU")
    return engine.client_home


def keep_freed_memory() -> None:
    """Ask the C library to keep what is freed: else every step's large tensors are paged in anew, page by page.

    Process-wide, as such settings are. Only glibc has it; elsewhere nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(mmap_threshold, 32 << 20)  # the largest value it takes
            libc.mallopt(trim_threshold, 1 << 30)
