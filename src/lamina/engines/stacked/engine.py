"""The stacked engine: the clients of one round, or of the same round of several experiments, trained as one model.

Words: a *member* is one experiment (a `Simulation` has one, a `Population` many); a *row* is a pair of a member and one
of its active clients; a *chunk* is as many rows as fit the memory. Local state is [rows, p]; numbers that differ
between members are [rows, 1]. If torchrun has started several processes ("ranks"), each has the rows of its own clients
only. The forward pass may want the elements of vectors in another order than the usual one (its *layout*).

Four parts have a state of their own: the engine runs rounds chunk by chunk, `Memory` says how many rows fit and where
clients' state is kept, `Graphs` captures local steps on a GPU, and `BatchFeed` orders the rows and sends their batches.
The server's half of a round is the reference's own (`close_round`), member by member.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo, with_displacement
from lamina.base.errors import BadInput, Diverged
from lamina.channel.channel import Link
from lamina.data.dataset import Dataset
from lamina.data.feed import as_augmentation
from lamina.data.parts import Indices
from lamina.engines.loop import FIXED_CHUNK
from lamina.engines.personal import client_broadcast, client_result, pass_channel, unpack
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.apart import Apart
from lamina.engines.stacked.early import EarlyRound, can_begin_next, next_members, read_later
from lamina.engines.stacked.feed import BatchFeed
from lamina.engines.stacked.forward import CapturedForward, Forward, StackedForward
from lamina.engines.stacked.graphs import Graphs
from lamina.engines.stacked.independence import parts_of
from lamina.engines.stacked.memory import Memory
from lamina.engines.stacked.one_row import empty_upload, explain, model_of, record_of
from lamina.engines.stacked.rows import (
    Member,
    Outcome,
    PlanAhead,
    RoundInProgress,
    Row,
    Started,
    Trained,
    column,
    map_record,
    members_and_weights,
    on_device,
    per_member,
    row_algorithm,
    row_of,
    row_sums,
    rows_of,
    send,
    stack_records,
    to_layout,
)
from lamina.engines.stacked.spread import chunk_distances
from lamina.engines.stacked.steps import (
    Batches,
    LocalWork,
    NoBroadcast,
    StackedObjective,
    Summing,
    SumOfGradients,
    train,
)
from lamina.engines.stacked.totals import Totals
from lamina.engines.state import (
    RoundReport,
    RoundSums,
    ServerStep,
    State,
    client_weights,
    close_round,
    step_server,
    undo_weighting,
)
from lamina.objective.layers import Layers
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.aggregation import Mean, combine_vectors
from lamina.rounds.plan import RoundPlan
from lamina.rounds.settings import TrainSettings

log = logging.getLogger(__name__)


@dataclass
class Stacked:
    """The stacked engine for one objective and data set."""

    algorithm: Algorithm  # for `run_round`, and the kind of algorithm of every member
    objective: Objective
    data: Dataset
    forward: Forward
    protocol: TrainSettings  # for `run_round`; members share its aggregation and augmentation
    record_trust_ratios: bool = False
    why: str = ""  # the reason for this engine, which messages quote
    memory: Memory = field(init=False)
    graphs: Graphs | Apart | None = field(init=False)  # captured local steps; None: steps run one operation at a time
    feed: BatchFeed = field(init=False)
    totals: Totals = field(init=False)
    begins_early: bool = field(init=False)  # a GPU would idle while the host reports a round; see early.py
    _early: EarlyRound | None = field(default=None, init=False, repr=False)  # the next round, if it was begun early

    def __post_init__(self) -> None:
        self.memory = Memory(self.objective.device)
        graphs = Graphs() if self.objective.device.type == "cuda" else None
        self.graphs = Apart() if isinstance(self.forward, CapturedForward) else graphs
        # where the numbers of a batch's samples are needed: with the data, or where a file is read
        device = torch.device("cpu") if self.problem.needs_host else self.objective.device
        self.feed = BatchFeed(self.objective, self.protocol, device)
        self.totals = Totals(self.objective, self.forward)
        self.begins_early = self.objective.device.type == "cuda"

    @property
    def name(self) -> str:
        """Return the name of the engine: "stacked", or "captured" if clients are trained apart."""
        return self.forward.name

    @functools.cached_property
    def parts(self) -> list[Layers]:
        """The parts that a row's state is kept in on a CPU: its layers, or one whole vector."""
        return parts_of(self.algorithm, self.problem.layers, self.objective.device)

    @functools.cached_property
    def problem(self) -> StackedObjective:
        """What the rows differentiate."""
        augmentation = as_augmentation(self.protocol.augmentation)
        return StackedObjective(self.objective, self.data, self.forward, augmentation)

    def run_round(
        self, state: State, plan: RoundPlan, ahead: PlanAhead | None = None, *, continues: bool = False
    ) -> tuple[State, RoundReport]:
        """Run one round of one experiment; see `run_members`."""
        (outcome,) = self.run_members([Member(self.algorithm, state, plan, self.protocol)], ahead, continues=continues)
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome

    def run_members(
        self, members: Sequence[Member], ahead: PlanAhead | None = None, *, continues: bool = False
    ) -> list[Outcome]:
        """Run the same round of several experiments that differ in numbers and seeds; each ends as if it ran alone.

        Args:
            members: the experiments.
            ahead: plans the next round; it is called while a GPU works on this one.
            continues: whether that round most likely follows at once, so that a GPU may begin it before this one is
                reported. Nothing that waits for the GPU, such as an evaluation, may come between them.
        """
        ranks = Ranks.current()
        if ranks.world > 1 and not isinstance(self.protocol.aggregation, Mean):
            raise BadInput("a robust aggregation needs all uploads in one process: run it without torchrun")
        early, self._early = self._early, None
        if early is not None and not early.is_round_of(members):
            early = None
        rows = self.feed.rows(members) if early is None else early.now.rows
        needs_gradients = _needs_gradients(members[0])
        chunks = self._chunks(members, rows)
        if early is not None and len(chunks) == 1:
            now, started = dataclasses.replace(early.now, members=members), [early.started]
        else:
            now, started = RoundInProgress(members, rows), []
            if needs_gradients:
                self._run(chunks, lambda chunk: self._add_full_gradients(now, chunk))
            self._open(now)
        now.ahead, now.continues = ahead, continues

        def work(chunk: list[Row]) -> None:
            start = started.pop() if started else self._start(now, chunk)  # one that was begun early is used once
            self._add(now, chunk, self._finish(now, chunk, start))

        # a chunk that does not fit the GPU's memory is run again: `_add` adds nothing before all memory is there
        self._run(chunks, work)
        if ranks.world > 1:
            pairs, trust = zip(members, now.downs, strict=True), self.record_trust_ratios
            layouts = [empty_upload(self.objective, member, down, trust) for member, down in pairs]
            ranks.combine(now.sums, layouts, now.failed)
        return [self._close(now, e) for e in range(len(members))]

    def _chunks(self, members: Sequence[Member], rows: list[Row]) -> list[list[Row]]:
        """Cut the rows of a round into chunks that fit the memory."""
        batch, graphs = members[0].plan.index.shape[2], 2 if _needs_gradients(members[0]) else 1
        return self.memory.cut(rows, self.problem, batch, graphs)

    def _open(self, now: RoundInProgress) -> None:
        """Broadcast, and set up the sums of a round."""
        needs = now.members[0].algorithm.needs(now.members[0].plan.number)
        for e, member in enumerate(now.members):
            mean = self._mean_gradient(now, e, Ranks.current()) if needs.control_variate else None
            plan, layers = member.plan, self.objective.shared_layers
            info = ServerInfo(plan.number, plan.lr, layers, plan.participation, mean_gradient=mean)
            down = member.algorithm.broadcast(member.state.server, info)
            now.downs.append(self.protocol.channel.seen_broadcast(down, layers))
        now.sums = [self._empty_sums(member) for member in now.members]
        now.clients = [dict(member.state.clients) for member in now.members]

    def _run(self, chunks: list[list[Row]], work: Callable[[list[Row]], None]) -> None:
        self.memory.run(chunks, work, release=lambda: self.graphs is not None and self.graphs.release())

    def _close(self, now: RoundInProgress, e: int) -> Outcome:
        """Take a member's step on the server."""
        if e in now.failed:
            return now.failed[e]
        member, sums = now.members[e], now.sums[e]
        objective, down = self.objective, now.downs[e]
        try:
            return close_round(member.algorithm, objective, member.state, member.plan, down, sums, now.clients[e])
        except Diverged as error:
            return error

    # --- one chunk ------------------------------------------------------------------------------------------------

    def _start(self, now: RoundInProgress, chunk: list[Row]) -> Started:
        """Let every row's client take its local steps; a GPU may still be working on them."""
        members = {e: now.members[e] for e in {row.member for row in chunk}}
        first, like, layout = members[chunk[0].member], self.objective.start, self.forward.layout
        clients, channel = first.state.ledger.clients * len(now.members), self.protocol.channel
        home = self.memory.choose_client_home(first.algorithm, first.state.server.x, self.objective, clients, channel)
        algorithm = row_algorithm(chunk, members, like)
        downs = {e: self._in_layout(now.downs[e]) for e in members}
        down = stack_records([downs[row.member] for row in chunk])
        records = on_device(stack_records(self._client_records(now, chunk, home)), self.objective.device)
        kept = unpack(records)
        client = self._in_layout(kept.client)
        buffers = self._row_buffers(now, chunk) | {name: value.clone() for name, value in kept.buffers.items()}
        batches, filled = self.feed.batches(now, chunk)
        steps = (filled > 0).sum(1)  # of every row
        needs = algorithm.needs(first.plan.number)
        info = ClientInfo(
            first.plan.number,
            per_member(chunk, {e: member.plan.lr for e, member in members.items()}, like),
            self.problem.layers,
            steps=float(steps[0]) if (steps == steps[0]).all() else column(steps, like),
            full_gradient=torch.stack([now.gradients[row] for row in chunk]) if needs.full_gradient else None,
        )
        if kept.server is not None:
            gradients = torch.stack([now.gradients[row] for row in chunk]) if needs.control_variate else None
            down = client_broadcast(algorithm, self.objective, down, kept, info, gradients, layout)
        # made before the GPU is busy: the host would wait for it otherwise
        row_weights = self.totals.row_weights(now, chunk)
        relative = self.totals.relative_weights(now, chunk) if algorithm.state_changes else None
        limits = {e: None if m.algorithm.clips_direction else m.protocol.clip for e, m in members.items()}
        is_limited = any(limit is not None for limit in limits.values())
        clip = per_member(chunk, {e: limit or math.inf for e, limit in limits.items()}, like) if is_limited else None
        local = algorithm.begin(down, client, info)
        work = LocalWork(
            algorithm, local, down, buffers, batches, info.lr, clip,
            needs.control_variate, needs.second_gradient, needs.loss,
        )  # fmt: skip
        local, losses = self._take_steps(self.problem, work, filled)
        return Started(algorithm, local, losses, down, client, kept, buffers, info, steps, home, row_weights, relative)

    def _finish(self, now: RoundInProgress, chunk: list[Row], started: Started) -> Trained:
        """Return what every row's client uploads and keeps after its local steps."""
        algorithm, local, losses, down, client, kept, buffers, info, steps, home, row_weights, relative = started
        members, layout = {e: now.members[e] for e in {row.member for row in chunk}}, self.forward.layout
        channel = self.protocol.channel
        up, client = algorithm.finish(local, down, client, info)
        trained = (local, up, self._in_usual_order(client))
        sent, record = client_result(algorithm, self.objective, kept, trained, buffers, info, layout)
        if channel.has_codecs:
            losses = losses + 0 * torch.stack(row_sums(sent)).sum(0)  # a codec may lose a NaN: this does not
            sent, record = self._pass_channel(now, chunk, sent, record)
        within, privacy = torch.zeros_like(losses, dtype=torch.float64), self.protocol.privacy
        if privacy is not None:
            bound = None
            if (start := privacy.adaptive_bound) is not None:
                bounds = {e: member.state.clip_bound or start for e, member in members.items()}
                bound = per_member(chunk, bounds, within)
                within = privacy.within(sent, bound)
            sent = privacy.clip(sent, bound)
        sent = with_displacement(algorithm, sent)
        return Trained(
            losses=losses / send(steps, self.objective.device),
            sent=sent,
            up=sent if relative is None else undo_weighting(algorithm, sent, relative),
            client=on_device(record, home),
            buffers=self.objective.shared_buffers(buffers),
            within=within,
            ratios=algorithm.trust_ratios(local) if self.record_trust_ratios else None,
            row_weights=row_weights,
        )

    def _pass_channel(self, now: RoundInProgress, chunk: list[Row], up: Any, record: Any) -> tuple[Any, Any]:
        """Return the uploads that the server reads, in the forward pass's layout, and what clients keep."""
        member, plans = now.members[chunk[0].member], now.plans(chunk)
        clients = np.array([plan.streams[row.c] for plan, row in zip(plans, chunk, strict=True)])
        cohorts = np.array([plan.cohort_stream for plan in plans])
        downs, up = [now.downs[row.member] for row in chunk], self._in_usual_order(up)

        if (cohorts == cohorts[0]).all():
            cohorts = cohorts[:1]  # what all clients of a round draw alike is drawn once

        def send(which: Any, up: Any, down: Any, record: Any) -> tuple[Any, Any]:
            cohort = cohorts[which if len(cohorts) > 1 or isinstance(which, slice) else 0]
            link = Link.of(self.objective.shared_layers, clients[which], cohort, self.objective.device)
            sent, record = pass_channel(self.protocol.channel, member.algorithm, up, down, record, link)
            return sent.up, record

        if self.objective.device.type == "cpu":  # row by row, which stays in the caches
            rows = [send(r, row_of(up, r), downs[r], row_of(record, r)) for r in range(len(chunk))]
            up, record = (stack_records(list(records)) for records in zip(*rows, strict=True))
        else:
            up, record = send(slice(None), up, stack_records(downs), record)
        return self._in_layout(up), record

    def _add(self, now: RoundInProgress, chunk: list[Row], trained: Trained) -> None:
        """Add what some rows have trained to the sums of their members, and leave out members that diverged.

        All sums, and the server's step after the last chunk, are computed in the hope that they are finite, so that the
        host waits for the GPU only once. If they are not, which is rare, the sums are computed again without those
        members, and `close_round` takes the steps.
        """
        up, client, buffers = trained.up, trained.client, trained.buffers
        totals = self.totals.add(now, chunk, trained, trained.row_weights)
        steps = self._step_servers(now, totals) if now.is_last(chunk) else {}
        keeps_state = any(value is not None for value in client)
        # records of their own: checkpoints tell what has changed by identity
        kept = rows_of(client) if keeps_state else []
        uploads = []
        if not isinstance(self.protocol.aggregation, Mean):  # copies: the next chunk writes over these results
            uploads = [
                (sent, {n: b[r].clone() for n, b in buffers.items()})
                for r, sent in enumerate(rows_of(self._in_usual_order(trained.sent)))
            ]

        # Wait. A sum is finite only if all its terms are.
        distances, between = chunk_distances(chunk, up.delta, now.sums, totals, self._to_layout)
        checks = [trained.losses, *row_sums(up._replace(delta=None)), *row_sums(client)]
        check = torch.stack([distances, *(total.to(distances.device) for total in checks)]).sum(0)
        by_row = torch.stack([trained.losses, distances, check, trained.within])
        numbers = torch.cat([by_row.double().flatten(), between, *(step.measured for step in steps.values())])
        read = read_later(numbers)
        has_begun_next = False
        if self.graphs is not None:
            self.feed.look_ahead(now, chunk)
            if self.begins_early and not (keeps_state or trained.ratios is not None):
                has_begun_next = self._begin_next(now, steps)
        of_rows, gaps, of_steps = np.split(np.array(read()), np.cumsum([by_row.numel(), len(between)]))
        loss, spread, checked, within = of_rows.reshape(4, len(chunk))
        is_finite = np.isfinite(checked)
        if not is_finite.all():
            if has_begun_next:  # its local steps have written over these
                self._early = None
                trained = self._finish(now, chunk, self._start(now, chunk))
                up, client, buffers = trained.up, trained.client, trained.buffers
                checks = [trained.losses, *row_sums(up._replace(delta=None)), *row_sums(client)]
            # without the distances: the square of a finite number may be too large for float32
            total = torch.stack([total.to(distances.device) for total in (*checks, up.delta.sum(-1))]).sum(0)
            is_finite = np.isfinite(total.double().tolist())
            for r in map(int, np.flatnonzero(~is_finite)):
                if chunk[r].member not in now.failed:
                    now.failed[chunk[r].member] = self._explain(now, chunk[r], row_of(up, r))
            totals, steps = self.totals.add(now, chunk, trained, self.totals.row_weights(now, chunk)), {}
            again = chunk_distances(chunk, up.delta.double(), now.sums, totals, self._to_layout)
            spread, gaps = (np.array(values.tolist()) for values in again)

        # Add; from here on nothing can fail.
        owner, weight = members_and_weights(chunk)
        for e, gap in zip(dict.fromkeys(owner.tolist()), gaps, strict=True):
            mine = is_finite & (owner == e)
            now.sums[e].loss += float(np.dot(weight[mine], loss[mine]))
            now.sums[e].within += float(np.dot(weight[mine], within[mine]))
            now.sums[e].add_spread(float(weight[mine].sum()), float(np.dot(weight[mine], spread[mine])), float(gap))
        keeps_rows = keeps_state or uploads or trained.ratios is not None
        for r in np.flatnonzero(is_finite).tolist() if keeps_rows else ():
            row = chunk[r]
            if trained.ratios is not None:
                now.sums[row.member].add_trust(trained.ratios[r], row.weight)
            if uploads:
                now.sums[row.member].keep(row.c, *uploads[r])
            if keeps_state:
                now.clients[row.member][now.client_id(row)] = kept[r]
        for e, (total_up, total_buffers) in totals.items():
            now.sums[e].up, now.sums[e].buffers = total_up, total_buffers
        for e, measured in zip(steps, of_steps.reshape(-1, 2), strict=False):  # there are no steps if a row diverged
            now.sums[e].server_step = steps[e]._replace(measured=torch.from_numpy(measured))

    def _begin_next(self, now: RoundInProgress, steps: dict[int, ServerStep]) -> bool:
        """Begin the next round's local steps, if they follow from the servers' steps; return whether it was tried."""
        upcoming = self.feed.upcoming
        if upcoming is None or self.problem.needs_host or not can_begin_next(now, steps):
            return False  # if the host made the batches of all steps first, this round would be reported late
        try:
            members = next_members(now, steps, upcoming)
            if len(self._chunks(members, upcoming.rows)) > 1:
                return False
            following = RoundInProgress(members, upcoming.rows)
            self._open(following)
            self._early = EarlyRound(following, self._start(following, following.rows))
        except Exception as error:  # raised again when the round is due: this one shall not be lost
            number = upcoming.plans[0].number
            log.info("from round %d on no round begins before the last one is reported: %s", number, error)
            self.begins_early = False
        return True

    def _step_servers(self, now: RoundInProgress, totals: dict[int, tuple[Any, Buffers]]) -> dict[int, ServerStep]:
        """Take the members' steps on the server; none if other ranks or another aggregation than the mean need more."""
        if Ranks.current().world > 1 or not isinstance(self.protocol.aggregation, Mean):
            return {}
        steps = {}
        for e, (up, buffers) in totals.items():
            member, sums = now.members[e], dataclasses.replace(now.sums[e], up=up, buffers=buffers)
            steps[e] = step_server(member.algorithm, self.objective, member.state, member.plan, sums)
        return steps

    def _row_buffers(self, now: RoundInProgress, chunk: list[Row]) -> Buffers:
        """Return the server's buffers for every row [rows, ...]."""
        states = [now.members[row.member].state for row in chunk]
        return {name: torch.stack([state.buffers[name] for state in states]) for name in self.objective.buffers}

    def _take_steps(self, problem: StackedObjective, work: LocalWork, filled: Indices) -> tuple[Any, Tensor]:
        """Return the local state after all steps, and the sum of every row's losses."""
        if self.graphs is not None:
            return self.graphs.train(problem, work, filled)
        assert isinstance(problem.forward, StackedForward)
        problem.forward.announce(lone_sample=not problem.summed and bool((filled == 1).any()))
        return train(problem, self.parts, work)

    def _client_records(self, now: RoundInProgress, chunk: list[Row], home: torch.device) -> list[Any]:
        """Return every row's client record, or one for all if clients keep nothing; new clients share a record."""
        new: dict[int, Any] = {}
        records = []
        for row in chunk:
            record = now.clients[row.member].get(now.client_id(row))
            if record is not None:
                records.append(on_device(record, home))
                continue
            if row.member not in new:
                record = record_of(self.objective, now, row)
                if all(value is None for value in record):
                    return [record]
                new[row.member] = on_device(record, home)
            records.append(new[row.member])
        return records

    # --- sums over rows -------------------------------------------------------------------------------------------

    def _empty_sums(self, member: Member) -> RoundSums:
        """Return zeros, and what every rank knows from the plan alone."""
        weights = client_weights(member.plan, member.protocol.by_examples)
        shared = self.objective.shared_buffers(member.state.buffers)
        buffers = {n: torch.zeros_like(b) for n, b in shared.items() if b.is_floating_point()}
        steps = float(np.dot(weights, member.plan.steps))
        protocol = member.protocol
        means: dict[str, Any] = {name: getattr(protocol, name) for name in ("aggregation", "channel")}
        means["privacy"] = protocol.privacy and protocol.privacy.at(member.state.clip_bound)
        return RoundSums(buffers=buffers, steps=steps, weights=weights, **means)

    # --- gradients over all data ----------------------------------------------------------------------------------

    def _add_full_gradients(self, now: RoundInProgress, chunk: list[Row]) -> None:
        """Compute grad F_i(x) over all data of every row's client."""
        device, plans = self.feed.device, now.plans(chunk)
        samples = [plan.samples[row.c] for plan, row in zip(plans, chunk, strict=True)]
        sizes = np.array([len(positions) for positions in samples])
        batch = plans[0].index.shape[2]  # as in training: what fits there fits here
        if self.objective.evaluates_by_batch:
            batch = FIXED_CHUNK  # as in the loop, for it matters what is evaluated together
        elif self.objective.device.type == "cpu":
            batch = max(batch, FIXED_CHUNK)
        steps = -(-int(sizes.max()) // batch)
        padded = np.zeros((len(chunk), steps * batch), dtype=np.int64)
        for line, positions in zip(padded, samples, strict=True):
            line[: len(positions)], line[len(positions) :] = positions, positions[0]
        index = send(padded.reshape(len(chunk), steps, batch), device)
        filled = np.clip(sizes[:, None] - batch * np.arange(steps), 0, batch)
        models = [model_of(self.objective, now, row) for row in chunk]
        y = self._to_layout(torch.stack([x for x, _ in models]))
        buffers = {n: torch.stack([values[n] for _, values in models]) for n in self.objective.buffers}
        batches = Batches(index, send(filled, device), None, None)
        work = LocalWork(SumOfGradients(), Summing(y, torch.zeros_like(y)), NoBroadcast(), buffers, batches, 0.0)
        problem = StackedObjective(self.objective, self.data, self.forward, summed=True)
        local, _ = self._take_steps(problem, work, filled)
        gradients = local.total / send(sizes, y.device).to(y.dtype).unsqueeze(1)
        now.gradients |= dict(zip(chunk, gradients, strict=True))

    def _mean_gradient(self, now: RoundInProgress, e: int, ranks: Ranks) -> Tensor:
        """Return the full gradients of a member's clients, combined as its uploads are."""
        member, rows = now.members[e], [row for row in now.rows if row.member == e]
        if isinstance(self.protocol.aggregation, Mean):
            mean = torch.zeros_like(member.state.server.x)
            for row in rows:
                mean = mean + row.weight * self._shared_gradient(now, row)
            return ranks.add(mean)
        vectors = [self._shared_gradient(now, row) for row in sorted(rows, key=lambda row: row.c)]
        weights = client_weights(member.plan, member.protocol.by_examples)
        return combine_vectors(self.protocol.aggregation, vectors, weights)

    def _shared_gradient(self, now: RoundInProgress, row: Row) -> Tensor:
        """Return the shared part of a row's full gradient, in the usual order."""
        return self.objective.shared_part(self._to_usual_order(now.gradients[row]))

    # --- the order of a vector's elements -------------------------------------------------------------------------

    def _in_layout(self, record: Any) -> Any:
        return map_record(self._to_layout, record)

    def _in_usual_order(self, record: Any) -> Any:
        return map_record(self._to_usual_order, record)

    def _to_layout(self, values: Tensor) -> Tensor:
        return to_layout(values, self.forward.layout)

    def _to_usual_order(self, values: Tensor) -> Tensor:
        return to_layout(values, self.forward.layout, back=True)

    def _explain(self, now: RoundInProgress, row: Row, up: Any) -> Diverged:
        """Return where a row's values stopped being finite."""
        gradient = self._to_usual_order(now.gradients[row]) if row in now.gradients else None
        return explain(self.objective, self.data, now, row, self._in_usual_order(up), gradient)


def _needs_gradients(member: Member) -> bool:
    """Return whether a member's round needs gradients over all data."""
    needs = member.algorithm.needs(member.plan.number)
    return needs.full_gradient or needs.control_variate
