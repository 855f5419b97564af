"""Start to compile a run's kernels before its first round, while the host checks the model."""

from __future__ import annotations

import logging

import torch

from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.base import rng
from lamina.engines.devices import arithmetic
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.gpu.launch import start_compiling_ahead
from lamina.engines.stacked.graphs import CapturedSteps
from lamina.engines.stacked.layers.convolution import kernels_for, wait_for_kernels
from lamina.engines.stacked.rows import map_record, to_layout
from lamina.engines.stacked.steps import Batches, LocalWork

log = logging.getLogger(__name__)


def precompile(engine: Stacked, cohort: int, batch: int) -> None:
    """Start to compile, in other processes, what a step of a first round of `cohort` clients launches on a GPU.

    The engine need not compute the right numbers. If anything fails here, round 1 compiles its kernels itself.
    """
    kernels = kernels_for(engine.objective.device, engine.objective.dtype)
    if kernels is None or engine.problem.needs_host:
        return
    wait_for_kernels()  # a process may not be forked while another thread imports Triton
    try:
        # as in a round, no other thread may launch kernels while they are recorded, or compile while processes fork
        with arithmetic(engine.forward.precision, benchmark=False), rng.forked(engine.objective.device):
            work = first_work(engine, cohort, batch)
            launches = CapturedSteps(engine.problem, work, pool=None).launches(work)
            start_compiling_ahead([*kernels.launches_of_check(engine.objective.device), *launches])
    except Exception as error:  # whatever the user's module, loss or algorithm raises: round 1 says it better
        log.info("no kernel is compiled before round 1: %s", error)


def first_work(engine: Stacked, cohort: int, batch: int) -> LocalWork:
    """Return one step of as many rows as the first round trains at a time, on the first sample of the data."""
    algorithm, protocol, objective = engine.algorithm, engine.protocol, engine.objective
    layers, lr, needs = engine.problem.layers, protocol.lr, algorithm.needs(1)
    has_gradients = needs.full_gradient or needs.control_variate
    memory = engine.memory.undecided()  # the engine's own looks at the memory that is free in round 1
    rows = min(cohort, memory.rows_that_fit(engine.problem, batch, 2 if has_gradients else 1))
    x = to_layout(objective.start, engine.forward.layout)
    of_server = ServerInfo(1, lr, layers, protocol.participation, mean_gradient=x if needs.control_variate else None)
    one_down, one_client = algorithm.broadcast(algorithm.init(x, layers), of_server), algorithm.client_init(x, layers)
    down, client = (map_record(lambda v: v.expand(rows, *v.shape), record) for record in (one_down, one_client))
    full_gradient = x.expand(rows, -1) if needs.full_gradient else None
    local = algorithm.begin(down, client, ClientInfo(1, lr, layers, full_gradient=full_gradient))
    index = torch.zeros(rows, 1, batch, dtype=torch.long, device=engine.feed.device)
    keys = index if protocol.augmentation is not None else None
    streams = index[:, :, 0] if objective.draws_masks else None
    buffers = {name: torch.stack([buffer] * rows) for name, buffer in objective.buffers.items()}
    clip = None if algorithm.clips_direction else protocol.clip
    return LocalWork(
        algorithm, local, down, buffers, Batches(index, None, keys, streams), lr, clip,
        needs.control_variate, needs.second_gradient, needs.loss,
    )  # fmt: skip
