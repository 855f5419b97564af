"""The stacked engine: the clients of one round, or of the same round of several experiments, trained as one model.

Rows are (experiment, client) pairs. Local state is [rows, p]; hyper-parameters that differ between experiments are
[rows, 1]. The server's half of the round is the reference's own (`close_round`), experiment by experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina import rng
from lamina.aggregation import Mean, combine_vectors
from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo, options
from lamina.data.dataset import Dataset
from lamina.engines.loop import WHOLE_BATCH, Loop
from lamina.engines.stacked.forward import Forward, arithmetic
from lamina.engines.stacked.graphed import GraphedSteps, room_for
from lamina.engines.stacked.memory import client_home, even_size, in_chunks_that_fit, is_out_of_memory, rows_that_fit
from lamina.engines.stacked.ranks import Ranks
from lamina.engines.stacked.rows import map_record, pad_plans, row_of, row_sums, send, squares, stack_records
from lamina.engines.stacked.steps import Nowhere, Steps, Summing, SumOfGradients, join, split, works_by_layer
from lamina.engines.state import RoundReport, State, Sums, client_weights, close_round, diverged, undo_weighting
from lamina.errors import Diverged, LaminaError
from lamina.layers import Layers
from lamina.ledger import payload_bytes
from lamina.objective import Buffers, Objective
from lamina.plan import Round, dropout_streams, sample_counters
from lamina.protocol import Protocol

log = logging.getLogger(__name__)

MOST_GRAPHS = 2  # captured steps kept at a time, of rounds with and without short batches, say; and of full gradients
EMPTY_ROWS = 0.5  # of a captured step may be idle (members that diverged) before a smaller one is captured
COMPILED_FROM = 500_000  # parameters; less is done before its compilation would pay


@dataclass(frozen=True)
class Member:
    """One experiment of a population: its algorithm (with its own numbers), state, plan of the round and settings."""

    algorithm: Algorithm
    state: State
    plan: Round
    protocol: Protocol


@dataclass(frozen=True)
class Row:
    """One client of one member."""

    member: int
    c: int  # position in the member's cohort
    weight: float


Outcome = tuple[State, RoundReport] | Diverged


@dataclass
class Stacked:
    """The stacked engine for one objective and data set."""

    algorithm: Algorithm  # for `run_round`, and the kind of algorithm of every member
    objective: Objective
    data: Dataset
    forward: Forward
    protocol: Protocol  # for `run_round`; members share its aggregation and augmentation
    record_trust_ratios: bool = False
    rows_per_chunk: int | None = None  # None: as many as memory (on a CPU, its cache) suggests
    most_rows: int | None = None  # in a chunk, once more were seen not to fit
    compiled: bool | None = None  # on a GPU: compile the step (slower to start, faster to run); None: if it pays
    meanwhile: Callable[[], None] | None = None  # what the host does while a GPU works on a round
    always_graphed: bool = False  # take the GPU's path on a CPU too, without a graph: for tests
    client_home: torch.device | None = None  # where clients' state is kept; None: decided in the first round
    row_bytes: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # by batch size; see memory.py
    _graphs: dict[Any, GraphedSteps] = field(default_factory=dict, repr=False)
    _pool: Any = field(default=None, repr=False)  # the memory their activations share

    def run_round(self, state: State, plan: Round) -> tuple[State, RoundReport]:
        """One round of one experiment."""
        (outcome,) = self.run_members([Member(self.algorithm, state, plan, self.protocol)])
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome

    def run_members(self, members: Sequence[Member]) -> list[Outcome]:
        """The same round of several experiments that differ in numbers and seeds; each ends as if it ran alone."""
        ranks = Ranks.current()
        rows = [
            Row(e, c, weight)
            for e, member in enumerate(members)
            for c, weight in enumerate(client_weights(member.plan, member.protocol.by_examples))
            if ranks.owns(int(member.plan.cohort[c]))
        ]
        # clients with as many steps as their neighbours waste least on masked steps
        rows.sort(key=lambda row: -int(members[row.member].plan.steps[row.c]))
        chunks = self._chunks(rows, members)

        gradients = self._full_gradients(members, chunks)
        downs = []
        for e, member in enumerate(members):
            mean = None
            if member.algorithm.needs(member.plan.number).control_variate:
                mean = self._mean_gradient(e, member, rows, gradients, ranks)
            info = ServerInfo(
                member.plan.number,
                member.plan.lr,
                self.objective.layers,
                member.plan.participation,
                mean_gradient=mean,
            )
            downs.append(member.algorithm.broadcast(member.state.server, info))

        sums = [self._start_sums(member) for member in members]
        clients = [dict(member.state.clients) for member in members]
        failed: dict[int, Diverged] = {}
        in_chunks_that_fit(
            self, chunks, lambda chunk: self._run_chunk(chunk, members, downs, gradients, sums, clients, failed)
        )

        if ranks.world > 1:
            layouts = [self._zeros(member, down) for member, down in zip(members, downs, strict=True)]
            ranks.combine(sums, layouts, failed)
            ranks.share_uploads(sums, layouts, failed, [len(member.plan.cohort) for member in members])
        for member, total in zip(members, sums, strict=True):
            total.bytes_up = 0 if total.up is None else sum(payload_bytes(total.up).values()) * len(member.plan.cohort)

        outcomes: list[Outcome] = []
        for e, member in enumerate(members):
            try:
                if e in failed:
                    raise failed[e]
                done = close_round(
                    member.algorithm, self.objective.layers, member.state, member.plan, downs[e], sums[e], clients[e]
                )
                outcomes.append(done)
            except Diverged as error:
                outcomes.append(error)
        return outcomes

    def _chunks(self, rows: list[Row], members: Sequence[Member]) -> list[list[Row]]:
        size = self.rows_per_chunk or rows_that_fit(self, members[0])
        size = min(size, self.most_rows or size)
        if self.objective.device.type == "cuda":  # one captured step serves all
            size = even_size(len(rows), size)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    # --- one chunk ------------------------------------------------------------------------------------------------

    def _run_chunk(
        self,
        chunk: list[Row],
        members: Sequence[Member],
        downs: list[Any],
        gradients: dict[tuple[int, int], Tensor],
        sums: list[Sums],
        clients: list[dict[int, Any]],
        failed: dict[int, Diverged],
    ) -> None:
        home = client_home(self, members)
        algorithm = self._row_algorithm([members[row.member].algorithm for row in chunk])
        own_downs = {e: self._record_in_layout(downs[e]) for e in {row.member for row in chunk}}
        down = stack_records([own_downs[row.member] for row in chunk])
        client = stack_records(self._clients(chunk, members, clients, home))
        client = self._record_in_layout(map_record(lambda value: value.to(self.objective.device), client))
        plans = [members[row.member].plan for row in chunk]
        buffers = {
            n: torch.stack([members[row.member].state.buffers[n] for row in chunk]) for n in self.objective.buffers
        }
        info = ClientInfo(
            plans[0].number,
            self._per_row([plan.lr for plan in plans]),
            self.forward.layout or self.objective.layers,
            steps=self._per_row([float(plan.steps[row.c]) for plan, row in zip(plans, chunk, strict=True)]),
            full_gradient=torch.stack([gradients[row.member, row.c] for row in chunk])
            if gradients and algorithm.needs(plans[0].number).full_gradient
            else None,
        )
        shares = self._shares(chunk, failed)  # made before the GPU is busy: the host would wait for it otherwise
        relative = self._relative_weights(chunk, members) if algorithm.state_changes else None
        clip = self._row_clip([members[row.member].protocol.clip for row in chunk])
        local, losses = self._train(algorithm, down, client, buffers, info, chunk, plans, clip)
        up, client = algorithm.finish(local, down, client, info)
        sent_up = up
        if relative is not None:
            up = undo_weighting(algorithm, up, relative)
        client = map_record(lambda value: self._usual(value).to(home), client)
        ratios = algorithm.trust_ratios(local) if self.record_trust_ratios else None

        sums_of = [losses, *row_sums(up), *(total.to(losses.device) for total in row_sums(client))]
        square = squares(up.delta)
        added = self._means(up, buffers, chunk, shares)  # before the wait, in the hope that all is finite
        if self.meanwhile is not None and square.is_cuda:
            self.meanwhile()
        # a sum is finite only if all its terms are; one GPU wait for all of it
        measured = torch.stack([losses, square, torch.stack(sums_of).sum(0)]).tolist()
        for r, (row, check) in enumerate(zip(chunk, measured[2], strict=True)):
            if not math.isfinite(check) and row.member not in failed:
                bad = map_record(self._usual, row_of(up, r))
                failed[row.member] = self._explain(members[row.member], row, downs[row.member], gradients, bad)
        if any(row.member in failed for row in chunk):
            added = self._means(up, buffers, chunk, self._shares(chunk, failed))
        stateful = any(value is not None for value in client)
        # records of their own: checkpoints tell what has changed by identity
        kept = [map_record(torch.clone, row_of(client, r)) if stateful else None for r in range(len(chunk))]
        totals = {e: sums[e].plus(own, moved, weight) for e, (own, moved, weight) in added.items()}
        # copies: the next chunk's captured steps write over this one's results
        sent = [
            (
                map_record(lambda value: self._usual(value).clone(), row_of(sent_up, r)),
                {n: b[r].clone() for n, b in buffers.items()},
            )
            for r in range(len(chunk) if not isinstance(self.protocol.aggregation, Mean) else 0)
        ]
        # Nothing but `failed` was changed so far (who fails, fails again), and from here on nothing needs memory: see
        # `in_chunks_that_fit`, which runs a chunk again that did not fit.
        for r, (row, loss, length, check) in enumerate(zip(chunk, *measured, strict=True)):
            if not math.isfinite(check):
                continue
            total = sums[row.member]
            total.loss += row.weight * loss
            total.square += row.weight * length
            total.add_trust(None if ratios is None else ratios[r], row.weight)
            if sent:
                total.keep(row.c, *sent[r])
            if stateful:
                clients[row.member][int(plans[r].cohort[row.c])] = kept[r]
        for e, (total_up, total_buffers) in totals.items():
            sums[e].up, sums[e].buffers = total_up, total_buffers

    def _mean_gradient(
        self, e: int, member: Member, rows: list[Row], gradients: dict[tuple[int, int], Tensor], ranks: Ranks
    ) -> Tensor:
        """The full gradients of a member's clients, combined as its uploads are."""
        own = [row for row in rows if row.member == e]
        mean = torch.zeros_like(member.state.server.x)
        if isinstance(self.protocol.aggregation, Mean):
            for row in own:
                mean = mean + row.weight * gradients[e, row.c]
            return self._usual(ranks.add(mean))
        vectors = ranks.gather({row.c: gradients[e, row.c] for row in own}, mean, len(member.plan.cohort))
        combined = combine_vectors(
            self.protocol.aggregation, vectors, client_weights(member.plan, member.protocol.by_examples)
        )
        return self._usual(combined)

    def _relative_weights(self, chunk: list[Row], members: Sequence[Member]) -> Tensor | None:
        """Every row's weight times the size of its cohort; None if no member weights its clients by their examples."""
        if not any(members[row.member].protocol.by_examples for row in chunk):
            return None
        weighted = [(row.weight * len(members[row.member].plan.cohort), members[row.member]) for row in chunk]
        return self._column([relative if member.protocol.by_examples else 1.0 for relative, member in weighted])

    def _shares(self, chunk: list[Row], failed: Mapping[int, Diverged]) -> tuple[list[int], Tensor]:
        """The members that still run, and every row's weight in each one's mean [members, rows]."""
        members = list(dict.fromkeys(row.member for row in chunk if row.member not in failed))
        shares = np.zeros((len(members), len(chunk)))
        for r, row in enumerate(chunk):
            if row.member not in failed:
                shares[members.index(row.member), r] = row.weight
        return members, send(shares, self.objective.device).to(self.objective.dtype)

    def _means(
        self, up: Any, buffers: Buffers, chunk: list[Row], shares: tuple[list[int], Tensor]
    ) -> dict[int, tuple[Any, Buffers, float]]:
        """What every member's rows add to its sums: Up, buffers, and the weight they still need."""
        members, share = shares
        if not members:
            return {}
        if len(chunk) == 1:  # one large model: every pass over it counts
            own = map_record(self._usual, row_of(up, 0))
            return {members[0]: (own, {n: b[0] for n, b in buffers.items()}, chunk[0].weight)}
        all_count = {row.member for row in chunk} == set(members)
        good = (share != 0).any(0)

        def means(values: Tensor) -> Tensor:
            """[rows, ...] -> [members, ...]; a row that diverged has no share, not even times zero."""
            if not all_count:
                values = torch.where(good.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
            made: Tensor = torch.tensordot(share, values, dims=1)
            return made

        with arithmetic("fp32"):  # whatever the model's arithmetic is, the mean is exact
            added = map_record(lambda value: self._usual(means(value)), up)
            moved = {name: means(b) for name, b in buffers.items() if b.is_floating_point()}
        return {e: (row_of(added, i), {n: b[i] for n, b in moved.items()}, 1.0) for i, e in enumerate(members)}

    def _start_sums(self, member: Member) -> Sums:
        """Zeros, and what every rank knows from the plan alone."""
        weights = client_weights(member.plan, member.protocol.by_examples)
        buffers = {n: torch.zeros_like(b) for n, b in member.state.buffers.items() if b.is_floating_point()}
        steps = float(np.dot(weights, member.plan.steps))
        return Sums(
            buffers=buffers,
            steps=steps,
            weights=weights,
            aggregation=self.protocol.aggregation,
        )

    def _zeros(self, member: Member, down: Any) -> tuple[Any, Tensor]:
        """What a client sends in this round, and its trust ratios, with zeros in them: tells which fields there are."""
        x = member.state.server.x
        needs = member.algorithm.needs(member.plan.number)
        layers = self.objective.layers
        info = ClientInfo(member.plan.number, member.plan.lr, layers, full_gradient=x if needs.full_gradient else None)
        client = member.algorithm.client_init(x, layers)
        local = member.algorithm.begin(down, client, info)
        up, _ = member.algorithm.finish(local, down, client, info)
        ratios = member.algorithm.trust_ratios(local) if self.record_trust_ratios else None
        trust = x.new_zeros(0) if ratios is None else torch.zeros_like(ratios)
        return type(up)(*(None if value is None else torch.zeros_like(value) for value in up)), trust

    def _clients(
        self, chunk: list[Row], members: Sequence[Member], clients: list[dict[int, Any]], home: torch.device
    ) -> list[Any]:
        """Every row's client record; those that take part for the first time share one."""
        fresh: dict[int, Any] = {}
        records = []
        for row in chunk:
            e, member = row.member, members[row.member]
            record = clients[e].get(int(member.plan.cohort[row.c]))
            if record is None:
                if e not in fresh:
                    new = member.algorithm.client_init(member.state.server.x, self.objective.layers)
                    fresh[e] = map_record(lambda value: value.to(home), new)
                record = fresh[e]
            records.append(record if record is fresh.get(e) else map_record(lambda value: value.to(home), record))
        return records

    def _row_algorithm(self, algorithms: list[Algorithm]) -> Algorithm:
        """One algorithm for all rows: numbers that differ become [rows, 1] tensors."""
        first = algorithms[0]
        if all(a is first for a in algorithms):
            return first
        changed = {}
        for name in options(type(first)):
            values = [getattr(a, name) for a in algorithms]
            if any(value != values[0] for value in values):
                changed[name] = self._column(values)
        return dataclasses.replace(first, **changed) if changed else first  # type: ignore[type-var]

    def _per_row(self, values: list[float]) -> float | Tensor:
        return values[0] if all(v == values[0] for v in values) else self._column(values)

    def _row_clip(self, values: list[float | None]) -> float | Tensor | None:
        """The largest norm of a gradient, for all rows or one per row; None: any."""
        if all(value is None for value in values):
            return None
        return self._per_row([math.inf if value is None else value for value in values])

    def _column(self, values: list[float]) -> Tensor:
        return send(np.array(values), self.objective.device).to(self.objective.dtype).unsqueeze(1)

    def _in_layout(self, values: Tensor) -> Tensor:
        """Reorder vectors ``[..., p]`` as the forward pass wants them; numbers per layer or per row have no order."""
        layout = self.forward.layout
        if layout is None or values.shape[-1] != layout.size:
            return values
        return values.index_select(-1, layout.order)

    def _usual(self, values: Tensor) -> Tensor:
        """Back to the usual order."""
        layout = self.forward.layout
        if layout is None or values.shape[-1] != layout.size:
            return values
        return values.index_select(-1, layout.inverse)

    def _record_in_layout(self, record: Any) -> Any:
        return map_record(self._in_layout, record)

    # --- local training -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _parts(self) -> list[Layers]:
        """The parts local state is kept in during training: layers, or one whole vector."""
        layers = self.forward.layout or self.objective.layers
        parts = layers.parts()
        # If every tensor has one element, vectors, numbers per layer and numbers per row have the same shape.
        return parts if any(part.size > 1 for part in parts) and works_by_layer(self.algorithm) else [layers]

    def steps(
        self, algorithm: Algorithm | SumOfGradients, *, control: bool = False, clip: float | Tensor | None = None
    ) -> Steps:
        """The local steps of rows that run this algorithm."""
        whole = isinstance(algorithm, SumOfGradients)
        return Steps(
            self.objective,
            self.data,
            self.forward,
            algorithm,
            self._parts,
            control=control,
            clip=clip,
            augmentation=None if whole else self.protocol.augmentation,
            whole=whole,
        )

    def _train(
        self,
        algorithm: Algorithm,
        down: Any,
        client: Any,
        buffers: Buffers,
        info: ClientInfo,
        chunk: list[Row],
        plans: list[Round],
        clip: float | Tensor | None,
    ) -> tuple[Any, Tensor]:
        """All local steps of a chunk: the final local state and every row's mean loss."""
        device = self.objective.device
        index, filled = pad_plans(plans, [row.c for row in chunk])
        keys, streams = None, None
        own_streams = np.array([plan.streams[row.c] for plan, row in zip(plans, chunk, strict=True)])
        if self.protocol.augmentation is not None:
            counters = sample_counters(index.shape[1], index.shape[2])
            keys = send(rng.bits(own_streams[:, None, None], counters), device)
        if self.objective.dropouts:
            streams = send(dropout_streams(own_streams, index.shape[1]), device)
        samples, counts = send(index, device), send(filled, device)
        local = algorithm.begin(down, client, info)
        steps = self.steps(algorithm, control=algorithm.needs(info.round).control_variate, clip=clip)
        taken = send((filled > 0).sum(1), device)
        ragged = bool((filled < index.shape[2]).any())
        if device.type == "cuda" or self.always_graphed:
            lone_sample = bool((filled == 1).any())
            self.forward.announce(lone_sample)  # BatchNorm refuses one while the step is captured
            masked = counts if ragged else None
            graph = self._graph(steps, local, down, buffers, samples, masked, keys, streams, lone_sample)
            local, total = graph.run(steps, local, down, buffers, samples, counts, keys, streams, info.lr)
            return local, total / taken
        parts, fixed = split(local, steps.parts), split(down, steps.parts)
        total = torch.zeros(len(chunk), dtype=self.objective.dtype, device=device)
        for k in range(index.shape[1]):
            least, most = int(filled[:, k].min()), int(filled[:, k].max())
            self.forward.announce(bool((filled[:, k] == 1).any()))
            # batches that are equally short are cut, others padded and masked
            own_keys = None if keys is None else keys[:, k, :most]
            own_masks = None if streams is None else streams[:, k]
            some = None if least == most else counts[:, k]
            parts, losses = steps.step(parts, fixed, buffers, samples[:, k, :most], some, own_keys, own_masks, info.lr)
            total = total + losses
        return join(parts, local), total / taken

    def _graph(
        self,
        steps: Steps,
        local: Any,
        down: Any,
        buffers: Buffers,
        samples: Tensor,
        counts: Tensor | None,
        keys: Tensor | None,
        streams: Tensor | None,
        lone_sample: bool,
    ) -> GraphedSteps:
        """The captured step for this shape of chunk; captured once, then replayed in every round."""
        algorithm = steps.algorithm
        rows = samples.shape[0]
        shape = (
            steps.whole,
            (room_for(samples.shape[1]), samples.shape[2]),
            counts is None,
            steps.control,
            _identity(steps.clip),
            lone_sample,
            tuple(v is None for v in local),
            tuple(None if v is None else v.stride(0) == 0 for v in down),
            tuple((n, _identity(getattr(algorithm, n))) for n in options(type(algorithm))),
        )
        for (known, room), graph in self._graphs.items():
            if known == shape and (1 - EMPTY_ROWS) * room <= rows <= room:
                return graph
        alike = [key for key in self._graphs if key[0][0] == steps.whole]
        if len(alike) >= MOST_GRAPHS:  # each holds a copy of the local state
            del self._graphs[alike[0]]
            gc.collect()  # it is in cycles
        compiled = self.compiled
        if compiled is None:
            compiled = self.objective.start.numel() >= COMPILED_FROM
        inputs = (steps, local, down, buffers, samples, counts, keys, streams)
        if self._pool is None and self.objective.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        made, said = None, ""
        try:
            made = GraphedSteps(*inputs, compiled=compiled, pool=self._pool)
        except LaminaError:
            raise
        except Exception as error:  # whatever a compiler raises
            if not compiled or is_out_of_memory(error):
                raise
            said = str(error).splitlines()[0]
        if made is None:  # out of the except clause, which holds the memory of what has failed
            log.warning("torch.compile fails on this model, so it runs uncompiled: %s", said)
            self.compiled = False
            made = GraphedSteps(*inputs, compiled=False, pool=self._pool)
        self._graphs[shape, rows] = made
        return made

    def forget_graphs(self) -> bool:
        """Give back the memory of all captured steps; whether there were any."""
        held = bool(self._graphs)
        self._graphs.clear()
        self._pool = None
        gc.collect()  # they are in cycles
        if self.objective.device.type == "cuda":
            torch.cuda.empty_cache()
        return held

    def _full_gradients(self, members: Sequence[Member], chunks: list[list[Row]]) -> dict[tuple[int, int], Tensor]:
        """grad F_i(x) over all of every client's data, if the algorithm asks for it in this round."""
        needs = members[0].algorithm.needs(members[0].plan.number)
        if not (needs.full_gradient or needs.control_variate):
            return {}
        found = {}
        device = self.objective.device
        steps = self.steps(SumOfGradients())

        def add_gradients(chunk: list[Row]) -> None:
            plans = [members[row.member].plan for row in chunk]
            own = [plan.samples[row.c] for plan, row in zip(plans, chunk, strict=True)]
            sizes = np.array([len(ids) for ids in own])
            batch = plans[0].index.shape[2]  # as in training: what fits there fits here
            if self.objective.evaluates_by_batch:
                batch = WHOLE_BATCH  # as in the loop, for it matters what is evaluated together
            elif device.type == "cpu":
                batch = max(batch, WHOLE_BATCH)
            many = -(-int(sizes.max()) // batch)
            padded = np.zeros((len(chunk), many * batch), dtype=np.int64)
            for line, ids in zip(padded, own, strict=True):
                line[: len(ids)], line[len(ids) :] = ids, ids[0]
            samples = send(padded.reshape(len(chunk), many, batch), device)
            counts = send(np.clip(sizes[:, None] - batch * np.arange(many), 0, batch), device)
            flat = self._in_layout(torch.stack([members[row.member].state.server.x for row in chunk]))
            buffers = {
                n: torch.stack([members[row.member].state.buffers[n] for row in chunk]) for n in self.objective.buffers
            }
            local, down = Summing(flat, torch.zeros_like(flat)), Nowhere()
            if device.type == "cuda" or self.always_graphed:
                graph = self._graph(steps, local, down, buffers, samples, counts, None, None, False)
                local, _ = graph.run(steps, local, down, buffers, samples, counts, None, None, 0.0)
            else:
                parts, fixed = split(local, steps.parts), split(down, steps.parts)
                for k in range(many):
                    parts, _ = steps.step(parts, fixed, buffers, samples[:, k], counts[:, k], None, None, 0.0)
                local = join(parts, local)
            total = local.total / send(sizes, device).to(flat.dtype).unsqueeze(1)
            for r, row in enumerate(chunk):
                found[row.member, row.c] = total[r]

        in_chunks_that_fit(self, chunks, add_gradients)
        return found

    def _explain(
        self, member: Member, row: Row, down: Any, gradients: dict[tuple[int, int], Tensor], up: Any
    ) -> Diverged:
        """Where a row went non-finite: the reference loop runs that client again and looks at every step."""
        loop = Loop(member.algorithm, self.objective, self.data, member.protocol)
        client_id = int(member.plan.cohort[row.c])
        client = member.state.clients.get(client_id)
        layers = self.objective.layers
        client = member.algorithm.client_init(member.state.server.x, layers) if client is None else client
        client = map_record(lambda value: value.to(self.objective.device), client)  # it may be kept on the host
        info = ClientInfo(
            member.plan.number,
            member.plan.lr,
            layers,
            float(member.plan.steps[row.c]),
            self._usual(gradients[row.member, row.c]) if gradients else None,
        )
        try:
            loop.explain(down, client, member.state.buffers, info, member.plan, row.c, up)
        except Diverged as error:
            return error
        return diverged(layers, up.delta, member.plan.number, member.plan.lr, client_id)


def _identity(value: Any) -> Any:
    """A hashable stand-in for an option; numbers that differ between rows are inputs of a captured step."""
    return "one per row" if isinstance(value, Tensor) else value
