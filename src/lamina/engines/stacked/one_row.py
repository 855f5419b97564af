"""One row of a round: what its client keeps and sees, an empty upload, and why its training diverged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import ClientInfo, with_displacement
from lamina.base.errors import Diverged
from lamina.data.dataset import Dataset
from lamina.engines.loop import Loop
from lamina.engines.personal import client_broadcast, client_result, first_record, personal_model, unpack
from lamina.engines.stacked.rows import Member, RoundInProgress, Row, map_record, on_device
from lamina.objective.objective import Buffers, Objective


def record_of(objective: Objective, now: RoundInProgress, row: Row) -> Any:
    """Return what a row's client kept before this round."""
    member = now.members[row.member]
    state, record = member.state, member.state.clients.get(now.client_id(row))
    if record is not None:
        return record
    channel = member.protocol.channel
    x = channel.seen(state.server.x, objective.shared_layers)
    return first_record(member.algorithm, objective, x, state.private_start, state.buffers, channel)


def model_of(objective: Objective, now: RoundInProgress, row: Row) -> tuple[Tensor, Buffers]:
    """Return the model that a row's client sees."""
    state, record = now.members[row.member].state, on_device(record_of(objective, now, row), objective.device)
    x = now.members[row.member].protocol.channel.seen(state.server.x, objective.shared_layers)
    return personal_model(objective, x, state.buffers, record)


def empty_upload(objective: Objective, member: Member, down: Any, record_trust_ratios: bool) -> tuple[Any, Tensor]:
    """Return an upload and trust ratios of zeros, which tell an empty rank what the others send in this round."""
    algorithm, x = member.algorithm, objective.start
    needs = algorithm.needs(member.plan.number)
    example = x if needs.full_gradient else None
    info = ClientInfo(member.plan.number, member.plan.lr, objective.layers, full_gradient=example)
    kept = unpack(first_record(algorithm, objective, member.state.server.x))
    down = client_broadcast(algorithm, objective, down, kept, info, x if needs.control_variate else None)
    local = algorithm.begin(down, kept.client, info)
    up, client = algorithm.finish(local, down, kept.client, info)
    sent, _ = client_result(algorithm, objective, kept, (local, up, client), objective.buffers, info)
    ratios = algorithm.trust_ratios(local) if record_trust_ratios else None
    zero_up = map_record(torch.zeros_like, with_displacement(algorithm, sent))
    return zero_up, x.new_zeros(0) if ratios is None else torch.zeros_like(ratios)


def explain(
    objective: Objective, data: Dataset, now: RoundInProgress, row: Row, up: Any, gradient: Tensor | None
) -> Diverged:
    """Return where a row's values stopped being finite: the loop runs that client again and checks every step.

    `gradient` is the client's full gradient, if the round has computed it.
    """
    member = now.members[row.member]
    algorithm, plan = member.algorithm, member.plan
    record = on_device(record_of(objective, now, row), objective.device)  # it may be kept on the host
    kept, buffers = unpack(record), model_of(objective, now, row)[1]
    info = ClientInfo(plan.number, plan.lr, objective.layers, float(plan.steps[row.c]), gradient)
    own_gradient = gradient if algorithm.needs(plan.number).control_variate else None
    down = client_broadcast(algorithm, objective, now.downs[row.member], kept, info, own_gradient)
    try:
        Loop(algorithm, objective, data, member.protocol).explain(down, kept.client, buffers, info, plan, row.c, up)
    except Diverged as error:
        return error
