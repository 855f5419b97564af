"""Rows: pairs of an experiment and a client, whose records and plans become tensors with a leading axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Number
from lamina.algorithms.declaration import options
from lamina.base.errors import Diverged
from lamina.data.parts import Indices
from lamina.engines.ranks import Ranks
from lamina.engines.state import RoundReport, RoundSums, State, client_weights
from lamina.objective.layers import ChannelsLast
from lamina.objective.objective import Buffers
from lamina.rounds.plan import RoundPlan
from lamina.rounds.settings import TrainSettings


@dataclass(frozen=True)
class Member:
    """One experiment of a population: its algorithm (with its own numbers), state, plan of the round and settings."""

    algorithm: Algorithm
    state: State
    plan: RoundPlan
    protocol: TrainSettings


@dataclass(frozen=True)
class Row:
    """One client of one member."""

    member: int
    c: int  # position in the member's cohort
    weight: float


Outcome = tuple[State, RoundReport] | Diverged
PlanAhead = Callable[[], Sequence[RoundPlan] | None]  # plans the next round of every member


@dataclass
class RoundInProgress:
    """One round of all members, filled chunk by chunk."""

    members: Sequence[Member]
    rows: list[Row]
    ahead: PlanAhead | None = None
    continues: bool = False  # whether the next round most likely follows
    gradients: dict[Row, Tensor] = field(default_factory=dict)  # over all of a client's data, if the algorithm needs it
    downs: list[Any] = field(default_factory=list)
    sums: list[RoundSums] = field(default_factory=list)
    clients: list[dict[int, Any]] = field(default_factory=list)
    failed: dict[int, Diverged] = field(default_factory=dict)

    def is_last(self, chunk: Sequence[Row]) -> bool:
        """Return whether no rows remain after these."""
        return chunk[-1] == self.rows[-1]

    def plans(self, chunk: Sequence[Row]) -> list[RoundPlan]:
        """Return the plan of every row."""
        return [self.members[row.member].plan for row in chunk]

    def client_id(self, row: Row) -> int:
        """Return the number of a row's client."""
        return int(self.members[row.member].plan.cohort[row.c])


class Started(NamedTuple):
    """Local steps that some rows have taken, or a GPU still takes; tensors are [rows, ...]."""

    algorithm: Algorithm
    local: Any  # valid until other steps are started
    losses: Tensor
    down: Any
    client: Any
    kept: Any
    buffers: Buffers
    info: ClientInfo
    steps: Any  # of every row, on the host
    home: torch.device  # where clients' state is kept
    row_weights: tuple[list[int], Tensor]
    relative: Tensor | None


class Trained(NamedTuple):
    """What the rows of a chunk have trained; [rows, ...] each."""

    losses: Tensor
    sent: Any  # the uploads
    up: Any  # the uploads as they enter the mean
    client: Any  # what the clients keep
    buffers: Buffers
    within: Tensor  # 1 for uploads within an adaptive bound, else 0; of double precision
    ratios: Tensor | None  # trust ratios, if they are recorded
    row_weights: tuple[list[int], Tensor]  # members, and every row's weight in each one's mean


def stack_records(records: list[Any]) -> Any:
    """Return [p] records of the same kind as one record of [rows, p]."""
    kind, distinct = type(records[0]), list({id(record): record for record in records}.values())
    if len(distinct) == 1:  # the same broadcast for every row: no copy
        return kind(*(None if v is None else v.expand(len(records), *v.shape) for v in records[0]))
    stacked = kind(*(None if values[0] is None else torch.stack(values) for values in zip(*distinct, strict=True)))
    if len(distinct) == len(records):
        return stacked
    places = {id(record): i for i, record in enumerate(distinct)}
    which = np.array([places[id(record)] for record in records])
    return map_record(lambda values: values.index_select(0, send(which, values.device)), stacked)


def map_record(change: Callable[[Tensor], Tensor], record: Any) -> Any:
    """The record with every field changed that is there."""
    return type(record)(*(None if value is None else change(value) for value in record))


def on_device(record: Any, device: torch.device) -> Any:
    """Return the record with all fields on a device; the record itself if they are."""
    if all(value is None or value.device == device for value in record):
        return record
    return map_record(lambda value: value.to(device), record)


def row_of(record: Any, r: int) -> Any:
    """One row of a record of rows."""
    return map_record(lambda value: value[r], record)


def rows_of(record: Any) -> list[Any]:
    """Return all rows of a record of rows, each with memory of its own."""
    # times 1.0: torch has no copy of many tensors at once, which takes a few launches instead of one for each
    lists = [None if value is None else torch._foreach_mul(value.unbind(0), 1.0) for value in record]
    count = next(len(values) for values in lists if values is not None)
    return [type(record)(*(None if values is None else values[r] for values in lists)) for r in range(count)]


def row_sums(record: Any) -> list[Tensor]:
    """The sum of every row of every field."""
    return [value.reshape(len(value), -1).sum(-1) for value in record if value is not None]


def row_buffers(buffers: Buffers, r: int) -> Buffers:
    """Return the buffers of one row."""
    return {name: buffer[r] for name, buffer in buffers.items()}


def row_algorithm(chunk: Sequence[Row], members: Mapping[int, Member], like: Tensor) -> Algorithm:
    """Return one algorithm for all rows: numbers that differ become columns [rows, 1]."""
    first = members[chunk[0].member].algorithm
    changed = {}
    for name in options(type(first)) if len(members) > 1 else ():
        values = {e: getattr(member.algorithm, name) for e, member in members.items()}
        if any(value != getattr(first, name) for value in values.values()):
            changed[name] = column([values[row.member] for row in chunk], like)
    return dataclasses.replace(first, **changed) if changed else first  # type: ignore[type-var]


def members_and_weights(chunk: Sequence[Row]) -> tuple[Indices, Any]:
    """Return every row's member and weight as arrays."""
    return np.array([row.member for row in chunk]), np.array([row.weight for row in chunk])


def per_member(chunk: Sequence[Row], values: Mapping[int, float], like: Tensor) -> Number:
    """Return a member's number for each of its rows, as a column; one number if all members have the same."""
    first = values[chunk[0].member]
    if all(value == first for value in values.values()):
        return first
    return column([values[row.member] for row in chunk], like)


def column(values: list[float], like: Tensor) -> Tensor:
    """Return numbers as a column [rows, 1] with the type and device of another tensor."""
    return send(np.array(values), like.device).to(like.dtype).unsqueeze(1)


def plan_rows(plans: Sequence[RoundPlan], protocols: Sequence[TrainSettings]) -> list[Row]:
    """Return this rank's rows of a round, from every member's plan and settings, those with most steps first.

    Neighbours have about as many steps, so that little is wasted on masked ones.
    """
    ranks = Ranks.current()
    pairs = zip(plans, protocols, strict=True)
    weights = [client_weights(plan, protocol.by_examples) for plan, protocol in pairs]
    rows = [Row(e, c, weight) for e, of_member in enumerate(weights) for c, weight in enumerate(of_member)]
    steps = np.concatenate([plan.steps for plan in plans])
    ordered = [rows[i] for i in np.argsort(-steps, kind="stable")]
    if ranks.world == 1:
        return ordered
    return [row for row in ordered if ranks.owns(int(plans[row.member].cohort[row.c]))]


def pad_plans(plans: list[RoundPlan], places: list[int]) -> tuple[Any, Any]:
    """Return every row's indices [rows, K, B] and counts [rows, K] up to the longest K; missing steps have count 0."""
    longest = max(int(plan.steps[c]) for plan, c in zip(plans, places, strict=True))
    if all(plan.index is plans[0].index for plan in plans):
        return plans[0].index[places, :longest], plans[0].filled[places, :longest]
    width = max(plan.index.shape[2] for plan in plans)
    index = np.zeros((len(plans), longest, width), dtype=np.int64)
    counts = np.zeros((len(plans), longest), dtype=np.int64)
    for plan in {id(plan.index): plan for plan in plans}.values():  # members with the same seed share their batches
        rows = np.array([r for r, other in enumerate(plans) if other.index is plan.index])
        batches, filled = (values[np.array(places)[rows], :longest] for values in (plan.index, plan.filled))
        index[rows] = batches[:, :1, :1]  # padding: any sample of the client's own
        index[rows, : batches.shape[1], : batches.shape[2]] = batches
        counts[rows, : filled.shape[1]] = filled
    return index, counts


def send(values: Any, device: torch.device) -> Tensor:
    """Return an array or a tensor on the device, by pinned memory: from any other, the host waits for the GPU."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if tensor.device.type == device.type:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_layout(values: Tensor, layout: ChannelsLast | None, back: bool = False) -> Tensor:
    """Reorder vectors ``[..., p]`` as the forward pass wants them, or back; numbers per layer or row have no order."""
    if layout is None or values.shape[-1] != layout.size:
        return values
    return values.index_select(-1, layout.inverse if back else layout.order)
