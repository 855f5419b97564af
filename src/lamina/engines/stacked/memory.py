"""How many rows are trained at once, and where the clients' state is kept."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.base.errors import BadInput
from lamina.channel.channel import Channel
from lamina.engines.personal import first_record
from lamina.engines.stacked.forward import CapturedForward, rounded
from lamina.engines.stacked.gpu.launch import recording
from lamina.engines.stacked.steps import Batches, StackedObjective
from lamina.objective.objective import Objective
from lamina.rounds.ledger import upload_bytes

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 16 << 20  # of models at a time: more rows save dispatch, fewer stay in the caches
ALONE_FROM_PARAMETERS = 300_000  # on a CPU such a model gains nothing from company
USABLE_FRACTION = 0.6  # of a GPU's free memory; the rest is for libraries' workspaces and fragmentation
CLIENT_STATE_FRACTION = 0.3  # of a GPU's free memory may hold the clients' state; more is kept on the host
VECTORS_PER_ROW = 16  # of the model's size: local state, broadcast, upload, client state, gradient, copies

R = TypeVar("R")


@dataclass
class Memory:
    """The memory of one device, as one engine uses it."""

    device: torch.device
    client_home: torch.device | None = None  # where clients' state is kept; None: decided in the first round
    _row_limit: int | None = field(default=None, repr=False)  # once more rows were seen not to fit
    _fitting_rows: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)  # by batch size and graphs
    _row_bytes: dict[int, int] = field(default_factory=dict, repr=False)  # by batch size

    def undecided(self) -> Memory:
        """Return another memory with the sizes of rows measured so far, which decides anew how many rows fit."""
        return Memory(self.device, _row_bytes=self._row_bytes)

    def cut(self, rows: list[R], problem: StackedObjective, batch: int, graphs: int) -> list[list[R]]:
        """Cut rows into chunks that fit. On a GPU they are about equally long, so that one captured step serves all.

        Args:
            rows: all rows of the round.
            problem: what the rows differentiate.
            batch: samples of a row in one step.
            graphs: how many captured steps share the memory.
        """
        size = self.rows_that_fit(problem, batch, graphs)
        size = min(size, self._row_limit or size)
        if self.device.type == "cuda" and rows:
            size = -(-len(rows) // -(-len(rows) // size))
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def run(
        self, chunks: Sequence[list[R]], work: Callable[[list[R]], None], release: Callable[[], bool]
    ) -> None:  # fmt: skip
        """Do the work chunk by chunk; one that does not fit is halved, and no later one is larger.

        Args:
            chunks: what to work on.
            work: must change nothing before it has all the memory it needs.
            release: gives back memory that can be made again; returns whether there was any.
        """
        waiting = self._within_limit(chunks)
        while waiting:
            chunk = waiting.pop(0)
            try:
                work(chunk)
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).split(" If reserved", maxsplit=1)[0].splitlines()[0]
            # out of the except clause: the error's traceback would keep alive what is to be freed
            has_released = release()
            if len(chunk) > 1:
                self._row_limit = -(-len(chunk) // 2)
                log.warning(
                    "%d clients at a time do not fit the GPU's memory: from here on at most %d",
                    len(chunk),
                    self._row_limit,
                )
            elif not has_released:
                raise BadInput(
                    f"the GPU's memory is too small for one client: take smaller batches, or a CPU ({reason})"
                )
            waiting = self._within_limit([chunk, *waiting])

    def choose_client_home(
        self, algorithm: Algorithm, x: Tensor, objective: Objective, clients: int, channel: Channel
    ) -> torch.device:
        """Return where clients' state is kept between rounds: with the model, or on the host if it may grow large."""
        if self.client_home is None:
            self.client_home = self.device
            if self.device.type == "cuda":
                size = upload_bytes(first_record(algorithm, objective, x, channel=channel))
                if size * clients > CLIENT_STATE_FRACTION * free_bytes(self.device):
                    self.client_home = torch.device("cpu")
                    log.info("keeping the clients' state on the host: all of it would fill the GPU")
        return self.client_home

    def _within_limit(self, chunks: Sequence[list[R]]) -> list[list[R]]:
        most = self._row_limit or max(map(len, chunks), default=1)
        return [chunk[i : i + most] for chunk in chunks for i in range(0, len(chunk), most)]

    def rows_that_fit(self, problem: StackedObjective, batch: int, graphs: int) -> int:
        """Return how many rows train at a time: as many as fit a GPU's free memory, or a CPU's caches."""
        start = problem.objective.start
        if self.device.type != "cuda":
            alone = start.numel() >= ALONE_FROM_PARAMETERS
            return 1 if alone else max(1, CPU_CACHE_BYTES // (start.numel() * start.element_size()))
        if (batch, graphs) not in self._fitting_rows:  # later rounds need no more than the first
            usable = free_bytes(self.device) * USABLE_FRACTION / graphs
            if batch not in self._row_bytes:
                self._row_bytes[batch] = row_bytes(problem, batch)
            self._fitting_rows[batch, graphs] = max(1, int(usable / self._row_bytes[batch]))
        return self._fitting_rows[batch, graphs]


def row_bytes(problem: StackedObjective, batch: int) -> int:
    """Return the memory that one row needs: its vectors, and twice what its forward pass saves for the backward one."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    objective = problem.objective
    index = torch.zeros(1, batch, dtype=torch.long, device=objective.device)
    keys = index if problem.augmentation is not None else None
    parameters = rounded(problem.forward, objective.layers.unflatten(objective.start.unsqueeze(0)))
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
    buffers: dict[str, Any] = {name: buffer.unsqueeze(0).clone() for name, buffer in objective.buffers.items()}
    differentiate = problem.gradients if isinstance(problem.forward, CapturedForward) else problem.mean_losses
    with recording(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):  # sizes need no results
        differentiate(leaves, buffers, Batches(index, None, keys, None))
    vector = objective.start.numel() * objective.start.element_size()
    return VECTORS_PER_ROW * vector + 2 * sum(saved.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy, torch, CUDA or one of its libraries means that memory ran out."""
    text = str(error).lower()
    phrases = ("out of memory", "alloc_failed", "not enough memory", "can't allocate")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(p in text for p in phrases))


def free_bytes(device: torch.device) -> int:
    """Return what this process may take of a GPU, which is less than is free if torch was told to leave some."""
    gc.collect()  # earlier engines may be in reference cycles
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):  # an older torch
        return free
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory: otherwise every step's large tensors are paged in again, page by page.

    Process-wide, as such settings are. Only glibc has it; elsewhere nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(mmap_threshold, 32 << 20)  # the largest value it takes
            libc.mallopt(trim_threshold, 1 << 30)
