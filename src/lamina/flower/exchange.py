"""The server's exchanges with its nodes in a round: full gradients (Mime), updates, evaluations."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from flwr.app import Array, MessageType, RecordDict

from lamina.engines.state import State
from lamina.flower import checks, wire
from lamina.flower.checks import Evaluation, Expected, Gradient, Problem, Refused, Update
from lamina.flower.judge import Attempt, Judge
from lamina.flower.mail import Mail
from lamina.flower.records import Attendance
from lamina.flower.roster import Roster
from lamina.flower.setup import Setup
from lamina.flower.wire import Task

log = logging.getLogger(__name__)
FIRST_LINE_S, NEXT_LINE_S = 10.0, 60.0  # until a line says who is waited for, and until the next one
Base = tuple[int, str]  # the round and the token of an exchange whose client state the server accepted


class Waiting:
    """Logs now and then which clients the server is waiting for."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.restart()

    def restart(self) -> None:
        """Begin to wait."""
        self._next = time.monotonic() + FIRST_LINE_S

    def say(self, clients: Iterable[int], what: str) -> None:
        """Log who is waited for, if it is time for a line."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + NEXT_LINE_S
        names = sorted(clients)
        whom = f"client{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
        log.warning("waiting for %s %s (deadline: %g s)", whom, what, self._deadline)


class Exchange:
    """Sends tasks to the clients of a round, and returns the sound answers."""

    def __init__(self, setup: Setup, app: str, mail: Mail, roster: Roster, judge: Judge) -> None:
        self.setup, self.app, self.mail, self.roster, self.judge = setup, app, mail, roster, judge
        self.waiting = Waiting(setup.deadline)
        self.diverged: dict[int, str] = {}  # by client, of this attempt: the layer its training went non-finite in
        self._tokens: dict[int, str] = {}  # by client: the last task to train
        # These are kept in the checkpoint.
        self.run_name = secrets.token_hex(16)
        self.base: dict[int, Base] = {}  # by client
        self.older_base: dict[int, Base] = {}  # as of the checkpoint before the last
        self.issued = 0  # of the last task

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        nodes = {client: str(node) for client, node in self.roster.bound.items()}
        base, older = self.base, self.older_base
        return {"run": self.run_name, "base": base, "older": older, "issued": self.issued, "nodes": nodes}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take over what a checkpoint stores."""
        self.run_name, self.issued = facts["run"], int(facts.get("issued", 0))
        self.base, self.older_base = (
            {int(client): (int(number), str(token)) for client, (number, token) in facts.get(name, {}).items()}
            for name in ("base", "older")
        )
        if self.roster.fixed is None:
            self.roster.bound = {int(client): int(node) for client, node in facts["nodes"].items()}

    def accept(self, number: int, clients: Iterable[int]) -> None:
        """Remember the client states that belong to the updates in the mean."""
        self.older_base = dict(self.base)
        for client in clients:
            self.base[client] = (number, self._tokens[client])

    # --- exchanges --------------------------------------------------------------------------------------------------

    def gradients(self, attempt: Attempt) -> dict[int, Gradient]:
        """Ask for every client's full gradient at x and number of examples."""
        x, contents = attempt.state.server.x, self._about_x(attempt)

        def read(client: int, content: RecordDict) -> Gradient:
            gradient = checks.read_gradient(content, x, self.setup.limits)
            return gradient._replace(token=wire.token_of(contents[client]))

        gradients = self._collect(wire.GRADIENT, contents, attempt, read)
        self.judge.remove_odd_gradients(gradients, attempt)
        return dict(sorted(gradients.items()))

    def updates(
        self,
        attempt: Attempt,
        down: Any,
        expected: Expected,
        gradients: Mapping[int, Gradient],
        last_loss: float | None,
    ) -> dict[int, Update]:
        """Have every client train, and return the updates that are used; `gradients` are those of Mime."""
        state, nodes, record = attempt
        versions = self.setup.algorithm.down_versions(record.round)
        arrays = wire.pack(down)
        digests = {name: wire.digest(getattr(down, name)) for name in (*versions, *(["x"] if gradients else []))
                   if name in arrays}  # fmt: skip

        def message(client: int, held: list[str], base: str) -> RecordDict:
            self._tokens[client] = secrets.token_hex(8)
            task = replace(
                self._task(record.round, client, self._tokens[client]),
                base=base,
                keep=[bases[client][1] for bases in (self.base, self.older_base) if client in bases],
                held=held,
                held_digests=[digests[name] for name in held],
                gradient=gradients[client].token if client in gradients else "",
            )
            return self._message(state, {name: a for name, a in arrays.items() if name not in held}, task)

        def base_of(client: int) -> str:
            return self.base[client][1] if client in self.base else ""

        def resend(client: int, problem: Problem) -> RecordDict:
            who = self.roster.name(nodes[client])
            if "state" in problem.missing:
                record.note(f"{who} has lost its client state and begins anew")
                return message(client, [], "")
            record.note(f"{who} {problem.text}: all is sent again")
            return message(client, [], base_of(client))

        def read(client: int, content: RecordDict) -> Update:
            examples = gradients[client].examples if client in gradients else None
            return checks.read_update(content, expected, examples)

        ledger = state.ledger.held  # by Down field: the version every client holds, as far as it has confirmed it
        contents = {}
        for client in nodes:
            held = [n for n, v in versions.items() if n in digests and n in ledger and ledger[n][client] == v]
            contents[client] = message(client, [*held, *(["x"] if gradients else [])], base_of(client))
        updates = self._collect(MessageType.TRAIN, contents, attempt, read, resend)
        self.judge.remove_odd_updates(updates, attempt, down, expected, last_loss)
        return dict(sorted(updates.items()))

    def evaluations(self, state: State, record: Attendance) -> dict[int, Evaluation]:
        """Have every connected client evaluate the model."""
        clients = range(self.setup.plan.clients.count)
        nodes = {client: node for client in clients if (node := self.roster.node_of(client)) is not None}
        attempt = Attempt(state, nodes, record)

        def read(client: int, content: RecordDict) -> Evaluation:
            on_training_data = self.setup.node_test is None
            most = self.judge.examples.get(client) if on_training_data else None
            return checks.read_evaluation(content, self.setup.limits, most)

        evaluations = self._collect(MessageType.EVALUATE, self._about_x(attempt), attempt, read)
        self.judge.remove_odd_evaluations(evaluations, attempt)
        return dict(sorted(evaluations.items()))

    def _collect(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        attempt: Attempt,
        read: Callable[[int, RecordDict], Any],
        resend: Callable[[int, Problem], RecordDict] | None = None,
    ) -> dict[int, Any]:
        """Send clients their messages, and return what is read from the replies; the record names all others.

        Args:
            kind: Flower's message type.
            contents: the messages by client.
            attempt: its record takes down who does not answer, and whose answer is refused.
            read: reads a client's reply, or raises `Refused`.
            resend: makes another message for a client that does not hold what its message relied on.
        """
        state, nodes, record = attempt
        clients = {nodes[client]: client for client in contents}
        tokens = {client: wire.token_of(content) for client, content in contents.items()}
        answers: dict[int, Any] = {}
        resent: set[int] = set()

        def take(node: int, content: RecordDict) -> RecordDict | None:
            client = clients[node]
            if wire.take_answer(content) != tokens[client]:
                record.refuse(client, node, "its reply does not name the task it was sent: an old one again?")
                return None
            problem = checks.read_problem(content)
            if problem is not None and problem.missing and resend is not None and client not in resent:
                resent.add(client)
                again = resend(client, problem)
                tokens[client] = wire.token_of(again)
                return again
            if problem is not None and problem.diverged is not None:
                self.diverged[client] = problem.diverged
                record.refuse(client, node, problem.text)
            elif problem is not None:
                record.miss(client, node, problem.text)
            else:
                try:
                    answers[client] = read(client, content)
                except Refused as error:
                    record.refuse(client, node, str(error))
                except Exception as error:  # nothing a node sends may end the run
                    record.refuse(client, node, wire.shorten(f"it cannot be read ({type(error).__name__}: {error})"))
            return None

        def waits(waiting: Iterable[int]) -> None:
            if not state.round:  # later it is known how long a round takes
                self.waiting.say([clients[node] for node in waiting], "to answer")

        messages = {nodes[client]: content for client, content in contents.items()}
        failed = self.mail.exchange(messages, kind, str(record.round), self.setup.deadline, record, take, waits)
        for node, why in failed.items():
            record.miss(clients[node], node, why)
        for client, answer in answers.items():
            for field in getattr(answer, "clipped", ()):
                record.note(f"{self.roster.name(nodes[client])}: '{field}' was scaled down to the limit")
        return answers

    # --- messages ---------------------------------------------------------------------------------------------------

    def _task(self, number: int, client: int, token: str) -> Task:
        plan = self.setup.plan
        self.issued = max(self.issued + 1, time.time_ns() // 1000)
        return Task(
            run=self.run_name,
            token=token,
            app=self.app,
            issued=self.issued,
            round=number,
            client=client,
            clients=plan.clients.count,
            participation=len(plan.cohort(number)) / plan.clients.count,
            settings=json.dumps(plan.protocol.local_record(number)),
        )

    def _about_x(self, attempt: Attempt) -> dict[int, RecordDict]:
        """Return messages with nothing but x, the buffers and a task, by client."""
        arrays = {"x": wire.encode(attempt.state.server.x)}
        number = attempt.record.round
        return {
            client: self._message(attempt.state, arrays, self._task(number, client, secrets.token_hex(8)))
            for client in attempt.nodes
        }

    def _message(self, state: State, down: Mapping[str, Array], task: Task) -> RecordDict:
        buffers = {name: wire.encode(value) for name, value in wire.floating(state.buffers).items()}
        return wire.content_of({"down": down, "buffers": buffers, "task": asdict(task)})
