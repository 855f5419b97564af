"""The server's side: the round loop over Flower's Grid, with the same algorithm, plan and records as a simulation.

Read `run`, `_round` and `_attempt`: the run with its records, a round with its repetitions, one try.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from lamina.aggregation import combine_vectors
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.data.dataset import Dataset, as_dataset
from lamina.devices import choose_device
from lamina.engines.state import State, Sums, client_weights, close_round, undo_weighting
from lamina.errors import Diverged, LaminaError
from lamina.experiment.folder import RunFolder
from lamina.flower import checks, outliers, wire
from lamina.flower.bounds import absurd_losses
from lamina.flower.checks import Expected, Gradient, Refused, Update
from lamina.flower.mail import LATE, Mail, Traffic
from lamina.flower.records import Attendance, Journal
from lamina.flower.roster import Roster
from lamina.flower.signing import Signer
from lamina.flower.wire import Task
from lamina.history import History, Row
from lamina.metrics import evaluate, refuse_nonfinite, round_row
from lamina.objective import Objective
from lamina.plan import Round
from lamina.storage.checkpoint import load_newest
from lamina.storage.identity import of_run

if TYPE_CHECKING:
    from lamina.flower.federation import Federation

log = logging.getLogger(__name__)
SHORT, MOST_DIGESTS = 16, 100  # characters of an update's digest, and how many of them are remembered per client
PATIENCE, AGAIN = 10.0, 60.0  # seconds until a line says who is waited for, and until it is said again


class Stopped(LaminaError):
    """The federation cannot go on: too few nodes answer. All finished rounds are kept."""


class Server:
    """One run of a federation."""

    def __init__(
        self,
        federation: Federation,
        grid: Grid,
        folder: RunFolder,
        nodes: Mapping[int, int] | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.federation, self.folder = federation, folder
        self.algorithm, self.plan, self.limits = federation.algorithm, federation.plan, federation.limits
        self.protocol = self.plan.protocol
        device = choose_device(federation.device)
        self.objective = Objective(federation.make_model().to(device), self.protocol.loss)
        self.objective.refuse_rate(self.protocol.lr)
        self.test_data = self._test_data(device)
        self.state = State.start(self.algorithm, self.objective, self.plan.clients.count)
        self.history = History()
        self.app = wire.fingerprint(self.algorithm, self.objective)
        upload = self._example_upload()
        self.limits.check_fields(upload._fields)
        self._no_totals = type(upload)(*[None] * len(upload))  # of a client that has not taken part
        self.mail = Mail(grid, federation.poll, lambda node: self.roster.name(node), signer)
        self.roster = Roster(self.mail, self.plan.clients.count, nodes)
        self.journal = Journal(folder.path)
        # what must survive a restart together with the state: all in one checkpoint, so rounds are never mixed
        self.run_name = secrets.token_hex(16)
        self.base: dict[int, tuple[int, str]] = {}  # by client: the round and exchange whose state was last accepted
        self._older_base: dict[int, tuple[int, str]] = {}  # as of the checkpoint before the last
        self.examples: dict[int, int] = {}  # by client: how many it had when it last took part
        self.recent: dict[str, list[float]] = {}  # the medians of the last rounds' answers, by what was measured
        self.accepted: dict[int, list[str]] = {}  # by client: digests of its last updates
        self.issued = 0  # of the last task
        self.growth: dict[str, float] = {}  # the largest median growth of any round, by layer of a second moment
        # of this attempt
        self._tokens: dict[int, str] = {}  # by client: the exchange
        self._sizes: outliers.Sizes = {}
        self._diverged: dict[int, str] = {}  # by client: the layer in which it says its training went non-finite
        self._waits_since, self._waits_said = 0.0, 0.0
        self._said: set[str] = set()  # the warnings of the last attempt

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> History:
        """Run what is left of the rounds, each in the records before the next begins."""
        self._go_on()
        self.folder.begin()  # whoever is missing is in the records from the first attempt on
        for client in self.roster.nobodys():
            log.warning("no node is listed for client %d: it takes no part", client)
        try:
            if len(self.history):  # killed after the checkpoint of a round with an infinite test loss
                refuse_nonfinite(self.history[-1])
            first = True
            while self.state.round < self.federation.rounds:
                self._run_round(wait_for_all=first)
                first = False
        except Diverged as error:
            self.folder.diverge(error)
            raise
        self.folder.finish(self)
        return self.history

    def _run_round(self, *, wait_for_all: bool) -> None:
        """One more round, evaluated if it is its turn, and in the records."""
        started = time.monotonic()
        self.mail.traffic = Traffic()
        plan, report, record = self._round(self.state.round + 1, wait_for_all=wait_for_all)
        row = round_row(self.algorithm, self.objective.start, plan, report, time.monotonic() - started)
        row |= self._counts(record)
        if plan.number % self.federation.evaluate_every == 0 or plan.number == self.federation.rounds:
            row |= self._evaluate(record)
        self._record(row, record)
        refuse_nonfinite(row)

    def _go_on(self) -> None:
        """Take up the run in the folder where its newest sound checkpoint leaves it."""
        start = (self.state, self._no_totals)
        self.folder.checkpoints.identity = of_run(self.algorithm, self.objective, self.plan)
        loaded = load_newest([self.folder.checkpoints], [start], self.folder.rounds())
        if loaded is not None:
            ((self.state, (facts,)),) = loaded
            self.run_name = facts["run"]
            self.base = _bases(facts["base"])
            self._older_base = _bases(facts.get("older", {}))
            self.examples = {int(client): int(count) for client, count in facts.get("examples", {}).items()}
            self.recent = {str(name): [float(v) for v in values] for name, values in facts.get("recent", {}).items()}
            self.accepted = {int(client): list(map(str, d)) for client, d in facts.get("accepted", {}).items()}
            self.issued = int(facts.get("issued", 0))
            self.growth = {str(name): float(value) for name, value in facts.get("growth", {}).items()}
            if self.roster.fixed is None:
                self.roster.bound = {int(client): int(node) for client, node in facts["nodes"].items()}
        self.history = self.folder.go_on_after(self.state.round)
        self.journal.cut(self.state.round)

    def _record(self, row: Row, record: Attendance) -> None:
        """Keep a finished round."""
        self.history.append(row)
        self.folder.refuse_lost()
        self.journal.write(record)
        self.folder.record(row, self)
        facts = {
            "run": self.run_name,
            "base": {str(client): list(base) for client, base in self.base.items()},
            "older": {str(client): list(base) for client, base in self._older_base.items()},
            "examples": {str(client): count for client, count in self.examples.items()},
            "recent": self.recent,
            "accepted": {str(client): digests for client, digests in self.accepted.items()},
            "issued": self.issued,
            "growth": self.growth,
            "nodes": {str(client): str(node) for client, node in self.roster.bound.items()},
        }
        self.folder.checkpoint(self, [facts])
        shown = "".join(f", {name} {row[name]:.4f}" for name in ("accuracy", "node_accuracy") if name in row)
        log.info(
            "round %d: %d of %d clients, %.1f s%s", row["round"], row["clients"], row["asked"], row["seconds"], shown
        )

    def _counts(self, record: Attendance) -> dict[str, float | int]:
        traffic = self.mail.traffic
        return {
            "asked": len(self.plan.cohort(record.round)),
            "missing": len(record.missing),
            "refused": len(record.refused),
            "wire_bytes_down": traffic.wire_down,
            "wire_bytes_up": traffic.wire_up,
        }

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, number: int, *, wait_for_all: bool) -> tuple[Round, Any, Attendance]:
        """A round, tried again with the same plan while too few answer."""
        attempts = self.federation.attempts
        for attempt in range(1, attempts + 1):
            record = Attendance(number, attempt)
            cohort = self.plan.cohort(number).tolist()
            needed = self.federation.needed(len(cohort))
            until = time.monotonic() + self.federation.deadline
            everyone = list(range(self.plan.clients.count))
            self._waits_since = self._waits_said = time.monotonic()
            self.roster.call(
                everyone if wait_for_all else cohort,
                needed,
                until,
                record,
                all_of_them=wait_for_all and attempt == 1,
                waits=lambda clients: self._waits(clients, "to connect"),
            )
            down, updates = self._attempt(number, cohort, needed, record)
            self._say(record)
            if len(updates) >= needed:
                return self._close(number, down, updates, record)
            log.warning(
                "round %d: %d of %d needed updates, try %d of %d", number, len(updates), needed, attempt, attempts
            )
            self.folder.refuse_lost()
            self.journal.write(record)
            self._refuse_divergence(number, needed)
        who = "; ".join(record.lines()) or "nobody is connected"
        kept = f"the {self.state.round} finished rounds are kept: " if self.state.round else ""
        late = any(one["why"].startswith(LATE) for one in record.missing)
        advice = (
            f"; if nodes need longer, raise deadline (now {self.federation.deadline:g} s)" * late
            + ", or lower quorum" * bool(updates)
        )
        raise Stopped(
            f"round {number}: {len(updates)} of the {needed} updates needed came, {attempts} times ({who}); "
            f"{kept}start the server again with the same folder '{self.folder.path}' to go on{advice}"
        )

    def _refuse_divergence(self, number: int, needed: int) -> None:
        """Raise `Diverged` if, of a round without a quorum, a quorum says that its training went non-finite."""
        if len(self._diverged) < needed:
            return
        client, layer = min(self._diverged.items())
        raise Diverged(
            f"round {number}: training went non-finite on {len(self._diverged)} clients, on client {client} first in "
            f"'{layer}'; lower the learning rate (now {self.protocol.rate(number):g}) or clip the gradients"
            + (". Earlier rounds are kept" if number > 1 else ""),
            round=number,
            client=client,
            layer=layer,
        )

    def _waits(self, clients: Iterable[int], what: str) -> None:
        """Say who is waited for, after a while and then now and then."""
        now = time.monotonic()
        said = self._waits_said > self._waits_since
        if now - self._waits_said < (AGAIN if said else PATIENCE):
            return
        self._waits_said = now
        names = sorted(clients)
        whom = f"client{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
        log.warning("waiting for %s %s (deadline: %g s)", whom, what, self.federation.deadline)

    def _waits_for_nodes(self, nodes: Iterable[int]) -> None:
        if not self.state.round:  # later it is known how long a round takes
            self._waits([self._client(node) for node in nodes], "to answer")

    def _say(self, record: Attendance) -> None:
        """Log who is not in the mean; what is the same in every round is logged once."""
        lines = record.lines()
        for line in lines:
            if line not in self._said:
                log.warning("round %d: %s", record.round, line)
        self._said = set(lines)

    def _attempt(
        self, number: int, cohort: list[int], needed: int, record: Attendance
    ) -> tuple[Any, dict[int, Update]]:
        """Ask the clients of a round for their updates: what was broadcast, and the sound updates by client."""
        self._sizes, self._diverged = {}, {}
        there = {}
        for client in cohort:
            node = self.roster.node_of(client)
            if node is None:
                record.miss(client, self.roster.bound.get(client), self.roster.why_absent(client))
            else:
                there[client] = node
        needs, x = self.algorithm.needs(number), self.state.server.x
        layers, rate = self.objective.layers, self.protocol.rate(number)
        info = ServerInfo(number, rate, layers, participation=len(cohort) / self.plan.clients.count)
        first: dict[int, str] = {}  # by client: the token of Mime's first exchange
        said: dict[int, int] = {}  # and the number of examples it gave
        if needs.control_variate:
            first = {client: secrets.token_hex(8) for client in there}
            gradients = self._gradients(number, there, first, record)
            if len(gradients) < needed:
                return None, {}  # nobody need train for nothing
            said = {client: one.examples for client, one in gradients.items()}
            there = {client: there[client] for client in gradients}
            info = info._replace(mean_gradient=self._mean_gradient(number, gradients))
        down = self.algorithm.broadcast(self.state.server, info)
        client_info = ClientInfo(number, rate, layers, full_gradient=x if needs.full_gradient else None)
        expected = self._expected(down, client_info)
        return down, self._updates(number, there, down, expected, first, said, record)

    def _exchange(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        number: int,
        record: Attendance,
        take: Callable[[int, RecordDict], RecordDict | None],
    ) -> None:
        """Messages to nodes and their replies, with a deadline of their own; who does not reply is in the record."""
        seconds = self.federation.deadline
        tokens = {node: wire.token_of(content) for node, content in contents.items()}

        def answer(node: int, content: RecordDict) -> RecordDict | None:
            if wire.take_answer(content) != tokens[node]:
                record.refuse(
                    self._client(node), node, "its reply does not name the task it was sent: an old one again?"
                )
                return None
            again = take(node, content)
            if again is not None:
                tokens[node] = wire.token_of(again)
            return again

        failed = self.mail.exchange(contents, kind, str(number), seconds, record, answer, self._waits_for_nodes)
        for node, why in failed.items():
            record.miss(self._client(node), node, why)

    def _gradients(
        self, number: int, there: dict[int, int], tokens: Mapping[int, str], record: Attendance
    ) -> dict[int, Gradient]:
        """Mime's first exchange: every client's full gradient at x and number of examples."""
        x = self.state.server.x
        arrays = {"x": wire.encode(x)}
        gradients: dict[int, Gradient] = {}

        def take(node: int, content: RecordDict) -> None:
            client = self._client(node)
            sound = self._judge(node, content, record, lambda: checks.read_gradient(content, x, self.limits))
            if sound is not None:
                gradients[client] = sound
                self._note_clipped(node, sound.clipped, record)

        contents = {
            node: self._message(arrays, self._task(number, client, tokens[client])) for client, node in there.items()
        }
        self._exchange(contents, wire.GRADIENT, number, record, take)
        odd = outliers.judge_gradients(gradients, self._broadcast(None, number), self.limits)
        self._refuse_odd(gradients, odd, outliers.sizes_of_gradients(gradients), there, record)
        return dict(sorted(gradients.items()))

    def _refuse_odd(
        self,
        answers: dict[int, Any],
        odd: Mapping[int, str],
        sizes: outliers.Sizes,
        there: Mapping[int, int],
        record: Attendance,
    ) -> None:
        """Take out answers that stand out from the others, or are absurd beside those of the last rounds."""
        self._sizes |= sizes
        counts = {client: answer.examples for client, answer in answers.items()}
        few = outliers.judge_by_earlier_rounds(sizes, self.recent, self.limits)
        for client, why in {**odd, **few, **checks.grown(counts, self.examples, self.limits)}.items():
            record.refuse(client, there[client], why)
            del answers[client]

    def _note_clipped(self, node: int, fields: Iterable[str], record: Attendance) -> None:
        for name in fields:
            record.note(f"{self.roster.name(node)}: '{name}' was scaled down to the limit")

    def _mean_gradient(self, number: int, gradients: Mapping[int, Gradient]) -> Tensor:
        plan = self._as_round(number, {client: one.examples for client, one in gradients.items()})
        weights = client_weights(plan, self.protocol.by_examples)
        return combine_vectors(self.protocol.aggregation, [one.gradient for one in gradients.values()], weights)

    def _updates(
        self,
        number: int,
        there: Mapping[int, int],
        down: Any,
        expected: Expected,
        first: Mapping[int, str],
        said: Mapping[int, int],
        record: Attendance,
    ) -> dict[int, Update]:
        """Local training on every client, and what is sound of what they send."""
        versions = self.algorithm.down_versions(number)
        arrays = wire.pack(down)
        digests = {name: wire.digest(getattr(down, name)) for name in (*versions, *(["x"] if first else []))
                   if name in arrays}  # fmt: skip
        tokens: dict[int, str] = {}
        updates: dict[int, Update] = {}
        resent: set[int] = set()

        def message(client: int, held: Iterable[str], base: tuple[int, str]) -> RecordDict:
            tokens[client] = secrets.token_hex(8)
            task = replace(
                self._task(number, client, tokens[client]),
                base=base[1],
                keep=[bases[client][1] for bases in (self.base, self._older_base) if client in bases],
                held=list(held),
                held_digests=[digests[name] for name in held],
                gradient=first.get(client, ""),
            )
            return self._message({name: array for name, array in arrays.items() if name not in task.held}, task)

        def take(node: int, content: RecordDict) -> RecordDict | None:
            client = self._client(node)
            problem = checks.read_problem(content)
            if problem is not None and problem.missing and client not in resent:  # it lost what we thought it had
                resent.add(client)
                base = self.base.get(client, (0, ""))
                if "state" in problem.missing:
                    record.note(f"{self.roster.name(node)} has lost its client state and begins anew")
                    base = (0, "")
                else:
                    record.note(f"{self.roster.name(node)} {problem.text}: all is sent again")
                return message(client, (), base)
            read = lambda: checks.read_update(content, expected, said.get(client))  # noqa: E731
            sound = self._judge(node, content, record, read)
            if sound is not None:
                updates[client] = sound
                self._note_clipped(node, sound.clipped, record)
            return None

        contents = {
            node: message(client, self._held(client, versions, digests, x=bool(first)), self.base.get(client, (0, "")))
            for client, node in there.items()
        }
        self._exchange(contents, MessageType.TRAIN, number, record, take)
        self._refuse_repeated(updates, there, record)
        known = self._broadcast(down, number)
        implied = tuple(expected.implied(expected.up, 1))
        odd = outliers.judge_updates(updates, known._replace(implied=implied), self.limits)
        self._refuse_odd(updates, odd, outliers.sizes_of_updates(updates, known), there, record)
        self._bound_losses(updates, record)
        self._tokens = tokens
        return dict(sorted(updates.items()))

    def _refuse_repeated(self, updates: dict[int, Update], there: Mapping[int, int], record: Attendance) -> None:
        """Take out updates that were in the mean of an earlier round; that nothing moves is no sign of a replay."""
        for client, update in list(updates.items()):
            if bool(update.up.delta.any()) and wire.digest(update.up.delta)[:SHORT] in self.accepted.get(client, []):
                record.refuse(client, there[client], "its update is one it has sent before")
                del updates[client]

    def _bound_losses(self, updates: dict[int, Update], record: Attendance) -> None:
        """Replace training losses that are out of all proportion by the round's typical one: they are only claims."""
        reference, absurd = absurd_losses({client: update.loss for client, update in updates.items()}, self._last_loss)
        for client in absurd:
            name = self.roster.name(self.roster.bound[client])
            record.note(f"{name}: its training loss {updates[client].loss:.3g} is out of all proportion: not recorded")
            updates[client] = updates[client]._replace(loss=reference)

    @property
    def _last_loss(self) -> float | None:
        return float(self.history[-1]["train_loss"]) if len(self.history) else None

    def _close(
        self, number: int, down: Any, updates: dict[int, Update], record: Attendance
    ) -> tuple[Round, Any, Attendance]:
        """The server's step on the mean of the updates: the same words as in the engines."""
        plan = self._as_round(number, {client: update.examples for client, update in updates.items()})
        weights = client_weights(plan, self.protocol.by_examples)
        sums = Sums(weights=weights, aggregation=self.protocol.aggregation)
        for c, (update, weight) in enumerate(zip(updates.values(), weights, strict=True)):
            sums.keep(c, update.up, update.buffers)
            up = update.up
            if self.protocol.by_examples:
                up = undo_weighting(self.algorithm, up, weight * len(updates))
            sums.add(up, update.buffers, weight)
            sums.loss += weight * update.loss
            sums.steps += weight * update.steps
            sums.square += weight * float(torch.sum(update.up.delta.double() ** 2))
        totals = self._add_to_totals(updates)
        self.state, report = close_round(self.algorithm, self.objective.layers, self.state, plan, down, sums, totals)
        self._older_base = dict(self.base)
        for client in updates:
            self.base[client] = (number, self._tokens[client])
            record.accept(client, self.roster.bound[client])
            self.examples[client] = updates[client].examples
            digests = [*self.accepted.get(client, []), wire.digest(updates[client].up.delta)[:SHORT]]
            self.accepted[client] = digests[-MOST_DIGESTS:]
        for name, value in outliers.median_growth(updates, self._broadcast(down, number)).items():
            self.growth[name] = max(value, self.growth.get(name, 0.0))
        for name, median in outliers.medians(self._sizes, list(updates)).items():
            self.recent[name] = [*self.recent.get(name, []), median][-outliers.REMEMBERED :]
        record.complete = True
        traffic = self.mail.traffic
        return plan, replace(report, bytes_down=traffic.down, bytes_up=traffic.up), record

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self, record: Attendance) -> dict[str, float | int]:
        """The new model's loss and accuracy: on the server's test data, on the nodes, or both."""
        started, where = time.monotonic(), self.federation.evaluate_on
        metrics: dict[str, float | int] = {}
        if self.test_data is not None and where in ("central", "both"):
            metrics |= evaluate(self.objective, self.state.server.x, self.state.buffers, self.test_data)
        if where in ("nodes", "both"):
            metrics |= self._evaluate_on_nodes(record)
        return metrics | {"evaluation_seconds": time.monotonic() - started} if metrics else {}

    def _evaluate_on_nodes(self, record: Attendance) -> dict[str, float | int]:
        """The mean over the examples of all connected nodes."""
        self.mail.traffic = Traffic()
        results: dict[int, tuple[float, float | None, int]] = {}
        same_data = self.federation.node_test is None  # as they train on
        said = Attendance(record.round)  # who trained well but did not evaluate still took part in the round

        def take(node: int, content: RecordDict) -> None:
            client = self._client(node)
            most = self.examples.get(client) if same_data else None
            sound = self._judge(node, content, said, lambda: checks.read_evaluation(content, self.limits, most))
            if sound is not None:
                results[client] = sound

        number, arrays = record.round, {"x": wire.encode(self.state.server.x)}
        clients = {client: self.roster.node_of(client) for client in range(self.plan.clients.count)}
        contents = {
            node: self._message(arrays, self._task(number, client, secrets.token_hex(8)))
            for client, node in clients.items()
            if node is not None
        }
        self._exchange(contents, MessageType.EVALUATE, number, said, take)
        counts = {client: examples for client, (_, _, examples) in results.items()}
        for client, why in outliers.judge_counts(counts, self.limits).items():
            said.refuse(client, clients[client], why)
            del results[client]
        for client in absurd_losses({client: loss for client, (loss, _, _) in results.items()}, None)[1]:
            said.refuse(
                client, clients[client], f"its evaluation loss {results[client][0]:.3g} is out of all proportion"
            )
            del results[client]
        for line in said.lines():
            record.note(f"evaluation: {line}")
        metrics: dict[str, float | int] = {"evaluating_nodes": len(results)}
        metrics["evaluation_bytes"] = self.mail.traffic.down
        if results:
            ordered = [result for _, result in sorted(results.items())]
            metrics["node_loss"] = sum(loss * n for loss, _, n in ordered) / sum(n for _, _, n in ordered)
            scored = [(accuracy, n) for _, accuracy, n in ordered if accuracy is not None]
            if scored:
                metrics["node_accuracy"] = sum(a * n for a, n in scored) / sum(n for _, n in scored)
        return metrics

    # --- parts ------------------------------------------------------------------------------------------------------

    def _test_data(self, device: torch.device) -> Dataset | None:
        if self.federation.test is None or self.federation.evaluate_on == "nodes":
            return None
        return as_dataset(self.federation.test()).to(device)

    def _client(self, node: int) -> int:
        client = self.roster.client_of(node)
        assert client is not None  # only bound nodes are sent anything but a question
        return client

    def _task(self, number: int, client: int, token: str) -> Task:
        self.issued = max(self.issued + 1, time.time_ns() // 1000)
        return Task(
            run=self.run_name,
            token=token,
            app=self.app,
            issued=self.issued,
            round=number,
            client=client,
            clients=self.plan.clients.count,
            participation=len(self.plan.cohort(number)) / self.plan.clients.count,
            settings=json.dumps(self.protocol.local_record(number)),
        )

    def _message(self, down: Mapping[str, Array], task: Task) -> RecordDict:
        buffers = {name: wire.encode(value) for name, value in wire.floating(self.state.buffers).items()}
        return wire.content_of({"down": down, "buffers": buffers, "task": task.record()})

    def _held(self, client: int, versions: Mapping[str, int], digests: Mapping[str, str], *, x: bool) -> list[str]:
        """The Down fields a client holds in the version of this round, as far as it has confirmed it."""
        held = self.state.ledger.held
        names = [n for n, version in versions.items() if n in digests and n in held and held[n][client] == version]
        return [*names, "x"] if x else names

    def _expected(self, down: Any, info: ClientInfo) -> Expected:
        """What a sound update looks like: the fields an engine would get from one local step."""
        algorithm, x = self.algorithm, self.state.server.x
        client = algorithm.client_init(x, info.layers)
        zero = torch.zeros_like(x)
        local = algorithm.step(algorithm.begin(down, client, info), down, zero, info.lr, info.layers)
        up, _ = algorithm.finish(local, down, client, info)
        non_negative = self.limits.non_negative
        return Expected(
            up,
            wire.floating(self.state.buffers),
            lambda examples: int(self.protocol.steps(np.array([examples]))[0]),
            self.limits,
            algorithm.non_negative if non_negative is None else non_negative,
            lambda up, steps: algorithm.implied_fields(up, down, info._replace(steps=float(steps))),
            sum(float(value.norm()) for name, value in down._asdict().items() if name != "x" and value is not None),
        )

    def _broadcast(self, down: Any, number: int) -> outliers.Broadcast:
        """What answers are compared by; without a `down` there are no second moments yet."""

        def info(steps: int) -> ClientInfo:
            return ClientInfo(number, self.protocol.rate(number), self.objective.layers, steps=float(steps))

        buffers = wire.floating(self.state.buffers)
        return outliers.Broadcast(
            self.objective.layers,
            buffers,
            lambda steps: {} if down is None else self.algorithm.inherited_moments(down, info(steps)),
            self.protocol.by_examples,
            lambda steps: None if down is None else self.algorithm.inherited_step(down, info(steps)),
            self.growth,
            drift=None if down is None else self.state.server.x - self.objective.start,
            totals={
                name: {client: getattr(total, name) for client, total in self.state.clients.items()}
                for name in (() if down is None else self.algorithm.state_changes)
            },
        )

    def _add_to_totals(self, updates: Mapping[int, Update]) -> dict[int, Any]:
        """Return what every client has added so far in the fields of Up that the server adds up over the rounds.

        A client that lost its state goes on from its old total: it is the server's sum that matters.
        """
        totals = dict(self.state.clients)
        for client, update in updates.items():
            for name in self.algorithm.state_changes:
                before, change = totals.get(client, self._no_totals), getattr(update.up, name)
                total = change if getattr(before, name) is None else getattr(before, name) + change
                totals[client] = before._replace(**{name: total})
        return totals

    def _example_upload(self) -> Any:
        """An Up of one local step: its fields are what a client may send."""
        algorithm, layers, rate = self.algorithm, self.objective.layers, self.protocol.rate(1)
        zero = torch.zeros_like(self.state.server.x)
        down = algorithm.broadcast(self.state.server, ServerInfo(1, rate, layers, mean_gradient=zero))
        client, info = algorithm.client_init(zero, layers), ClientInfo(1, rate, layers, full_gradient=zero)
        local = algorithm.step(algorithm.begin(down, client, info), down, zero, 1.0, layers)
        up, _ = algorithm.finish(local, down, client, info)
        return up

    def _judge(self, node: int, content: RecordDict, record: Attendance, read: Callable[[], Any]) -> Any:
        """What is read of a reply, or None if there is nothing sound: then the record says why."""
        client = self._client(node)
        problem = checks.read_problem(content)
        if problem is not None and problem.diverged is not None:
            self._diverged[client] = problem.diverged
            record.refuse(client, node, problem.text)
            return None
        if problem is not None:
            record.miss(client, node, problem.text)
            return None
        try:
            return read()
        except Refused as error:
            record.refuse(client, node, str(error))
        except Exception as error:  # nothing a node sends may end the run
            record.refuse(client, node, wire.shorten(f"it cannot be read ({type(error).__name__}: {error})"))
        return None

    def _as_round(self, number: int, examples: Mapping[int, int]) -> Round:
        """The round as it really was: the clients that answered and their numbers of examples."""
        cohort, sizes = np.array(list(examples), dtype=np.int64), np.array(list(examples.values()), dtype=np.int64)
        steps = self.protocol.steps(sizes)
        nothing = np.zeros((len(cohort), 1, 1), dtype=np.int64)
        return Round(
            number=number,
            lr=self.protocol.rate(number),
            participation=len(cohort) / self.plan.clients.count,
            cohort=cohort,
            samples=[np.broadcast_to(np.int64(0), (int(n),)) for n in sizes],
            index=nothing,  # which samples they were is not known here
            filled=(np.arange(int(steps.max())) < steps[:, None]).astype(np.int64),
            streams=nothing[:, 0, 0],
        )


def _bases(table: Mapping[str, tuple[int, str]]) -> dict[int, tuple[int, str]]:
    return {int(client): (int(number), str(token)) for client, (number, token) in table.items()}
