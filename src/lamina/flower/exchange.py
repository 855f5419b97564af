"""The server's exchanges with its nodes in a round: full gradients (Mime), updates, evaluations."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Array, MessageType, RecordDict
from torch import Tensor

from lamina.engines.state import State
from lamina.flower import checks, wire
from lamina.flower.checks import Expected, FullGradient, NodeMetrics, Problem, Refused, Update
from lamina.flower.mail import Mail, NoReply, late
from lamina.flower.records import Attendance, Memory
from lamina.flower.roster import Roster
from lamina.flower.setup import Setup
from lamina.flower.wire import Task
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.plan import Plan


class Exchange:
    """Sends tasks to the clients of a round, and returns the sound answers."""

    def __init__(self, setup: Setup, objective: Objective, mail: Mail, roster: Roster, memory: Memory) -> None:
        self.setup, self.objective, self.mail, self.roster, self.memory = setup, objective, mail, roster, memory
        self.app = wire.fingerprint(setup.algorithm, objective)
        self._tokens: dict[tuple[str, int], str] = {}  # of the last task, by type of message and client

    def accept(self, clients: Iterable[int]) -> None:
        """Remember the client states that belong to the updates in the mean."""
        self.memory.older = dict(self.memory.base)
        for client in clients:
            self.memory.base[client] = self._tokens[MessageType.TRAIN, client]

    def gradients(self, state: State, clients: Iterable[int], record: Attendance) -> dict[int, Update]:
        """Ask for every client's full gradient at x and number of examples."""
        expected = Expected.plain(FullGradient(state.server.x), {}, None, self.setup.limits)
        channel, layers = self.setup.protocol.channel, self.objective.shared_layers
        contents = self._about_x(state, channel.narrow_vector(state.server.x, layers), clients, record.round)

        def read(client: int, content: RecordDict) -> Update:
            return checks.read_update(content, expected, client)

        return self._collect(wire.GRADIENT, contents, record, read)

    def updates(
        self,
        state: State,
        clients: Iterable[int],
        record: Attendance,
        down: Any,
        expected: Expected,
        gradients: Mapping[int, Update],
    ) -> dict[int, Update]:
        """Have every client train, and return the sound updates; `gradients` are those of Mime."""
        versions, memory = self.setup.algorithm.down_versions(record.round), self.memory
        arrays = wire.pack(self.setup.protocol.channel.narrow(down, self.objective.shared_layers))
        x_is_held = ["x"] if gradients else []
        digests = {name: wire.digest(getattr(down, name)) for name in (*versions, *x_is_held) if name in arrays}

        def message(client: int, held: list[str], *, is_new: bool = False) -> RecordDict:
            return self._message(
                state,
                {name: array for name, array in arrays.items() if name not in held},
                record.round,
                client,
                **({"base": ""} if is_new else {}),
                keep=[tokens[client] for tokens in (memory.base, memory.older) if client in tokens],
                held=held,
                held_digests=[digests[name] for name in held],
                gradient=self._tokens[wire.GRADIENT, client] if client in gradients else "",
            )

        def resend(client: int, problem: Problem) -> RecordDict:
            is_new = "state" in problem.missing
            what = "has lost its client state and starts again" if is_new else f"{problem.text}: all is sent again"
            record.note(f"{record.name(client)} {what}")
            return message(client, [], is_new=is_new)

        def read(client: int, content: RecordDict) -> Update:
            examples = gradients[client].examples if client in gradients else None
            return checks.read_update(content, expected, client, examples)

        ledger = state.ledger.held  # by Down field: the version every client holds, as far as it has confirmed it
        contents = {}
        for client in clients:
            held = [n for n, v in versions.items() if n in digests and n in ledger and ledger[n][client] == v]
            contents[client] = message(client, held + x_is_held)
        return self._collect(MessageType.TRAIN, contents, record, read, resend)

    def evaluations(self, state: State, record: Attendance, examples: Mapping[int, int]) -> dict[int, NodeMetrics]:
        """Have every connected client evaluate the model; `examples` says on how many it may, by client."""
        clients = [client for client in range(self.roster.clients) if self.roster.is_online(client)]

        def read(client: int, content: RecordDict) -> NodeMetrics:
            return checks.read_evaluation(content, self.setup.limits, examples.get(client), self.setup.node_metrics)

        x = self.setup.algorithm.trained_model(state.server)
        contents = self._about_x(state, x, clients, record.round)
        return self._collect(MessageType.EVALUATE, contents, record, read)

    def _collect(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        record: Attendance,
        read: Callable[[int, RecordDict], Any],
        resend: Callable[[int, Problem], RecordDict] | None = None,
    ) -> dict[int, Any]:
        """Send clients their messages, and return what is read from the replies, until all have come or time is up.

        The record says who does not answer, and whose answer is refused: where `read` raises `Refused`. `resend` makes
        another message for a client that does not hold what its message relied on.
        """
        answers: dict[int, Any] = {}
        waiting: dict[str, int] = {}  # by message: the client
        resent: set[int] = set()

        def send(client: int, content: RecordDict, seconds: float) -> None:
            sent, why = self.mail.send(self.roster.nodes[client], content, kind, str(record.round), seconds)
            if sent is None:
                record.miss(client, why)
            else:
                waiting[sent], self._tokens[kind, client] = client, wire.token_of(content)

        def take(client: int, content: RecordDict) -> None:
            token = wire.entries_of(content, wire.ANSWER).get("to")
            content.pop(wire.ANSWER, None)
            if token != self._tokens[kind, client]:
                record.refuse(client, "its reply does not name the task it was sent: an old one again?")
                return
            problem = checks.read_problem(content)
            if problem is not None and problem.missing and resend is not None and client not in resent:
                resent.add(client)
                send(client, resend(client, problem), until - time.monotonic())
            elif problem is not None and problem.diverged is not None:
                record.diverged[client] = problem.diverged
                record.refuse(client, problem.text)
            elif problem is not None:
                record.fail(client, problem.text)
            else:
                try:
                    answers[client] = read(client, content)
                except Refused as error:
                    record.refuse(client, str(error))
                except Exception as error:  # nothing a node sends may end the run
                    record.refuse(client, wire.shorten(f"it cannot be read ({type(error).__name__}: {error})"))

        for client, content in contents.items():
            send(client, content, self.setup.deadline)
        until = time.monotonic() + self.setup.deadline  # what is sent once more does not prolong it
        while waiting:
            for sent, reply in self.mail.look(waiting, record).items():
                client = waiting.pop(sent)
                if isinstance(reply, NoReply):
                    (record.fail if reply.is_error else record.miss)(client, reply.why)
                else:
                    take(client, reply.content)
            if not waiting or time.monotonic() >= until:
                break
            if record.round == 1:  # later it is known how long a round takes
                self.roster.log_waiting(waiting.values(), "to answer")
            time.sleep(min(self.setup.poll, max(0.0, until - time.monotonic())))
        for sent, client in waiting.items():
            self.mail.give_up(sent)
            record.miss(client, late(self.setup.deadline))
        return dict(sorted(answers.items()))

    def _about_x(self, state: State, x: Tensor, clients: Iterable[int], number: int) -> dict[int, RecordDict]:
        """Return messages with nothing but x, the buffers and a task, by client."""
        arrays = {"x": wire.encode(x)}
        return {client: self._message(state, arrays, number, client) for client in clients}

    def _message(self, state: State, down: Mapping[str, Array], number: int, client: int, **more: Any) -> RecordDict:
        buffers = self.objective.shared_buffers(state.buffers)
        return write_message(self.setup.plan, self.app, self.memory, buffers, down, number, client, **more)


def write_message(
    plan: Plan, app: str, memory: Memory, buffers: Buffers, down: Mapping[str, Array], number: int, client: int,
    **more: Any,
) -> RecordDict:  # fmt: skip
    """Return a message of round `number` with the shared buffers; `more` are further entries of its task."""
    memory.last_task += 1
    more = {"base": memory.base.get(client, ""), "keep": [], "held": [], "held_digests": [], "gradient": ""} | more
    task = Task(
        run=memory.run,
        token=secrets.token_hex(8),
        app=app,
        number=memory.last_task,
        round=number,
        client=client,
        clients=plan.clients.count,
        participation=plan.published(number, len(plan.cohort(number)))["participation"],
        settings=json.dumps(plan.protocol.local_record(number)),
        **more,
    )
    arrays = {name: wire.encode(value) for name, value in wire.floating(buffers).items()}
    return wire.content_of({"down": down, "buffers": arrays, "task": task.model_dump()})
