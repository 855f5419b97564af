"""What a run's clock must know of its algorithm, model and data, and the clock's place in a run that is resumed."""

from __future__ import annotations

import dataclasses

import torch

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo, trial_step
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.channel.channel import Channel
from lamina.data.dataset import Dataset
from lamina.engines.state import copy_buffers
from lamina.objective.batch import take
from lamina.objective.objective import Objective, buffer_bytes
from lamina.rounds.ledger import bytes_besides_payload, payload_bytes
from lamina.rounds.plan import Demand, Plan
from lamina.rounds.timeline import Timeline
from lamina.training.history import History


def timed(plan: Plan, algorithm: Algorithm, objective: Objective, data: Dataset | None) -> Plan:
    """Return the plan with what its clock needs: the seconds of a step, and what a round asks of a client.

    `data` are training data to count FLOPs on; None on a federation's server, which has none.
    """
    clock = plan.protocol.clock
    if clock is None:
        return plan
    if clock.flops_per_second is not None:
        if data is None:
            raise BadInput(
                "clock.flops_per_second: a federation's server has no training data to count FLOPs on: give "
                "step_seconds"
            )
        clock = clock.with_flops(count_flops(objective, data, _batch_size(plan, len(data))))
        plan = dataclasses.replace(plan, protocol=dataclasses.replace(plan.protocol, clock=clock))
    if plan.protocol.chooser is not None:
        plan = dataclasses.replace(plan, demand=demand_of(algorithm, objective, plan.protocol.channel))
    plan.check_clock()
    return plan


def _batch_size(plan: Plan, samples: int) -> int:
    """Return the samples of a local step; of clients whose samples are dealt anew, with all of them in equal parts."""
    if len(plan.clients.parts):
        return plan.largest_batch
    cohort = max(1, round(plan.protocol.participation * plan.clients.count))
    return plan.protocol.batch_size or max(1, samples // cohort)


def count_flops(objective: Objective, data: Dataset, batch: int) -> int:
    """Return the floating-point operations of one mini-batch's gradient, as torch counts them (its matrix products)."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which takes time

    index = torch.arange(min(batch, len(data)), device=objective.device)
    inputs, targets = data.inputs(index, objective.dtype), take(data.y, index)
    with FlopCounterMode(display=False) as counter, rng.forked(objective.device, seed=0):
        objective.gradient(objective.start, copy_buffers(objective.buffers), inputs, targets)
    flops: int = counter.get_total_flops()
    if not flops:
        raise BadInput("clock.flops_per_second: torch counts no FLOPs in this model: give step_seconds")
    return flops


def demand_of(algorithm: Algorithm, objective: Objective, channel: Channel) -> Demand:
    """Return the bytes of a client's first round, from a trial step without data."""
    x, layers, needs = objective.shared_start, objective.shared_layers, algorithm.needs(1)
    server_info = ServerInfo(1, 0.1, layers, mean_gradient=x if needs.control_variate else None)
    info = ClientInfo(1, 0.1, layers, full_gradient=x if needs.full_gradient else None)
    down, client = algorithm.broadcast(algorithm.init(x, layers), server_info), algorithm.client_init(x, layers)
    up, _ = algorithm.finish(
        trial_step(algorithm, algorithm.begin(down, client, info), down, x, info), down, client, info
    )
    buffers = buffer_bytes(objective.shared_buffers(objective.buffers))
    more_down, more_up = bytes_besides_payload(needs, x, buffers)
    sent_down = sum(payload_bytes(channel.narrow(down, layers)).values())
    return Demand(sent_down + more_down, channel.upload_bytes(algorithm, up, layers) + more_up, algorithm.needs)


def timeline_of(plan: Plan, algorithm: Algorithm) -> Timeline | None:
    """Return the timeline of a run; None if it has no clock."""
    clock = plan.protocol.clock
    return None if clock is None else Timeline(clock, plan.protocol, algorithm, plan.clients.count)


def catch_up(timeline: Timeline, plan: Plan, history: History, finished: int) -> None:
    """Bring a timeline to the last finished round of a run that is resumed."""
    if timeline.round != finished:
        timeline.resume(history, (plan.cohort(int(row["round"])) for row in history), finished)
