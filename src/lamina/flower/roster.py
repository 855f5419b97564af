"""Which node is which client. Only the id that Flower gave a node when it authenticated identifies it.

Either the server has a list of nodes, or the first node that says it is client i is client i for the whole run.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import MessageType, RecordDict

from lamina.base.errors import is_whole
from lamina.flower import wire
from lamina.flower.checks import read_problem
from lamina.flower.mail import Mail
from lamina.flower.records import Attendance
from lamina.flower.setup import Setup

log = logging.getLogger(__name__)
FIRST_LINE_S, NEXT_LINE_S = 10.0, 60.0  # until a line says who is waited for, and until the next one
ASK_FOR_S = 60.0  # that a round waits for the name of a node that has just come
ANSWER_WITHIN_S = 600.0  # until a node is asked again that does not answer
ASK_AGAIN_S = 300.0  # until a node is asked again whose answer was of no use: it may have been restarted


@dataclass
class Contact:
    """A connected node that was asked who it is."""

    question: str | None = None  # the message, while it is not answered
    asked: float = 0.0  # time.monotonic() of the last question
    heard: float | None = None  # time.monotonic() of the last answer
    claim: int | None = None  # the client it says it is
    fault: str = ""  # why it cannot be a client


class Roster:
    """The clients and their nodes."""

    def __init__(self, setup: Setup, mail: Mail, fixed: Mapping[int, int] | None) -> None:
        self.mail, self.clients, self.deadline, self.poll = mail, setup.plan.clients.count, setup.deadline, setup.poll
        self.fixed = fixed  # node to client; nobody else takes part
        self.bound: dict[int, int] = {client: node for node, client in (fixed or {}).items()}
        self.online: set[int] = set()
        self._contacts: dict[int, Contact] = {}  # by node, in the order of their claims
        self._is_first_call = True
        self._next_line = 0.0  # time.monotonic() at which a line says who is waited for

    def is_online(self, client: int) -> bool:
        """Return whether the node of a client is connected."""
        return self.bound.get(client) in self.online

    def unlisted(self) -> list[int]:
        """Return the clients for which the list of nodes, if there is one, names no node."""
        return [] if self.fixed is None else [c for c in range(self.clients) if c not in self.bound]

    def call(self, cohort: list[int], needed: int, record: Attendance) -> list[int]:
        """Find out which nodes are connected, wait for the clients of a round, and return those that are connected.

        The first call, at the start of a run, waits for all clients until the deadline. A later one ends as soon as the
        `needed` clients of the cohort are connected, and nodes that have just connected have said who they are. The
        record takes notes of clients that are absent, and of nodes that are not a client.
        """
        wait_for_all, self._is_first_call = self._is_first_call, False
        unlisted = self.unlisted()
        possible = [c for c in (range(self.clients) if wait_for_all else cohort) if c not in unlisted]
        until = time.monotonic() + self.deadline
        self._next_line = time.monotonic() + FIRST_LINE_S
        while True:
            self.online = set(self.mail.grid.get_node_ids())
            if self.fixed is None:
                self._ask_nodes(record)
                self._bind_claims(record)
            absent = [client for client in possible if not self.is_online(client)]
            now = time.monotonic()
            asking = any(one.heard is None and now - one.asked < ASK_FOR_S for one in self._contacts.values())
            is_enough = len(possible) - len(absent) >= needed and not asking and not wait_for_all
            if not absent or now >= until or is_enough:
                break
            self.log_waiting(absent, "to connect")
            time.sleep(min(self.poll, max(0.0, until - now)))
        self._record_strangers(record)
        for client in cohort:
            if not self.is_online(client):
                record.miss(client, "no node is listed for it" if client in unlisted else "it is not connected")
        return [client for client in cohort if self.is_online(client)]

    def log_waiting(self, clients: Iterable[int], what: str) -> None:
        """Log now and then which clients the server is waiting for."""
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + NEXT_LINE_S
        names = sorted(clients)
        whom = f"client{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
        log.warning("waiting for %s %s (deadline: %g s)", whom, what, self.deadline)

    def _ask_nodes(self, record: Attendance) -> None:
        """Ask connected nodes that are not yet a client who they are, and take their answers."""
        now = time.monotonic()
        for node, contact in list(self._contacts.items()):
            is_gone = node not in self.online  # it may come back as another
            if contact.question is not None and (is_gone or now - contact.asked > ANSWER_WITHIN_S):
                self.mail.give_up(contact.question)
                contact.question = None
            if is_gone:
                del self._contacts[node]
        for node in sorted(self.online - set(self.bound.values())):
            contact = self._contacts.setdefault(node, Contact())
            is_settled = contact.heard is not None and now - contact.heard < ASK_AGAIN_S
            if contact.question is not None or is_settled:
                continue
            # the token makes the message's id one that nobody can guess, see mail.py
            content = wire.content_of({"question": {"who": True, "token": secrets.token_hex(8)}})
            contact.asked = now
            contact.question, why = self.mail.send(node, content, MessageType.QUERY, "", ANSWER_WITHIN_S)
            if contact.question is None:
                record.note(f"node {node} could not be asked who it is: {why}")
        asked = {one.question: node for node, one in self._contacts.items() if one.question is not None}
        for question, reply in self.mail.look(asked, record).items():
            node = asked[question]
            self._contacts[node].question = None
            if isinstance(reply, str):
                record.note(f"node {node} did not say who it is: {reply}")
            else:
                self._hear(node, reply.content)

    def _hear(self, node: int, content: RecordDict) -> None:
        problem = read_problem(content)
        client: Any = wire.entries_of(content, "who").get("client")
        contact = self._contacts[node]
        before, contact.claim, contact.heard, contact.fault = contact.claim, None, time.monotonic(), ""
        if problem is not None:
            contact.fault = problem.text
        elif not is_whole(client) or not 0 <= client < self.clients:
            number = wire.shorten(repr(client), 40)
            contact.fault = f"says it is client {number}, but they are numbered 0 to {self.clients - 1}"
        else:
            contact.claim = int(client)
        if contact.claim != before:  # a node that claims another client moves to the end of the queue
            self._contacts[node] = self._contacts.pop(node)

    def _bind_claims(self, record: Attendance) -> None:
        """Bind clients that have no node, or whose node has gone, to the first node that says it is theirs."""
        for node, contact in self._contacts.items():
            holder = None if contact.claim is None else self.bound.get(contact.claim)
            if contact.claim is None or holder == node or holder in self.online:
                continue
            self.bound[contact.claim] = node
            if holder is not None:
                record.note(f"client {contact.claim} was node {holder}, which has gone, and is node {node} now")

    def _record_strangers(self, record: Attendance) -> None:
        """Record the connected nodes that have no part in the run."""
        for node in sorted(self.online - set(self.bound.values())):
            contact = self._contacts.get(node)
            if contact is None:
                record.refuse_node(node, "it is not on the server's list of nodes")
            elif contact.fault:
                record.refuse_node(node, contact.fault)
            elif contact.claim is not None:
                holder = self.bound[contact.claim]
                record.refuse_node(node, f"says it is client {contact.claim}, and that is node {holder}")
