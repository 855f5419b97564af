"""Which node is which client. Only the id that Flower gave a node when it authenticated identifies it.

Either the server has a list of nodes, or the first node that says it is client i is client i for the whole run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, MessageType, RecordDict

from lamina.errors import is_whole
from lamina.flower import wire
from lamina.flower.checks import read_problem
from lamina.flower.mail import Mail
from lamina.flower.records import Attendance, name_of

ASK_FOR = 60.0  # seconds a round waits for the name of a node that has just come
ANSWER_WITHIN = 600.0  # seconds until it is asked again
ASK_AGAIN = 300.0  # seconds until a node is asked again whose answer was of no use: it may have been restarted


class Roster:
    """The clients and their nodes."""

    def __init__(self, mail: Mail, clients: int, fixed: Mapping[int, int] | None, poll: float) -> None:
        self.mail, self.clients, self.poll = mail, clients, poll
        self.fixed = fixed  # node to client; nobody else takes part
        self.bound: dict[int, int] = {client: node for node, client in (fixed or {}).items()}
        self.online: set[int] = set()
        self._claims: dict[int, int] = {}  # what nodes say they are, in the order they said so
        self._unusable: dict[int, str] = {}  # nodes that cannot say who they are, and why
        self._asked: dict[str, tuple[int, float]] = {}  # unanswered questions: node, when
        self._heard: dict[int, float] = {}  # when nodes last said who they are

    def is_online(self, client: int) -> bool:
        """Return whether the node of a client is connected."""
        return self.bound.get(client) in self.online

    def name(self, node: int) -> str:
        """Return a node, and its client, in words."""
        return name_of(next((client for client, bound in self.bound.items() if bound == node), None), node)

    def unlisted(self) -> list[int]:
        """Return the clients for which the list of nodes, if there is one, names no node."""
        return [] if self.fixed is None else [c for c in range(self.clients) if c not in self.bound]

    def why_absent(self, client: int) -> str:
        """Return why a client has no connected node."""
        return "no node is listed for it" if client in self.unlisted() else "it is not connected"

    def call(
        self,
        wanted: list[int],
        needed: int,
        until: float,
        record: Attendance,
        *,
        all_of_them: bool,
        waits: Callable[[Iterable[int]], None] = lambda clients: None,
    ) -> None:
        """Find out which nodes are connected, and wait for the clients of a round.

        Args:
            wanted: the clients.
            needed: how many of them there must be before the wait may end early.
            until: `time.monotonic()` at which it ends in any case.
            record: takes notes of nodes that do not say who they are.
            all_of_them: wait for all clients (at the start of a run), not only for nodes that have just connected.
            waits: called at every look with the clients that are absent.
        """
        possible = [client for client in wanted if client not in self.unlisted()]
        while True:
            self._look(record)
            absent = [client for client in possible if not self.is_online(client)]
            present = len(possible) - len(absent)
            now = time.monotonic()
            asking = any(n not in self._heard and now - since < ASK_FOR for n, since in self._asked.values())
            if not absent or now >= until or (present >= needed and not asking and not all_of_them):
                break
            waits(absent)
            time.sleep(min(self.poll, max(0.0, until - now)))
        self._record_strangers(record)

    def _look(self, record: Attendance) -> None:
        self.online = set(self.mail.grid.get_node_ids())
        if self.fixed is not None:
            return
        now = time.monotonic()
        for node in [node for node in self._heard if node not in self.online]:  # it may come back as another
            for table in (self._heard, self._claims, self._unusable):
                table.pop(node, None)
        fresh = {node for node, when in self._heard.items() if now - when < ASK_AGAIN}
        known = {*self.bound.values(), *fresh, *(node for node, _ in self._asked.values())}
        for node in sorted(self.online - known):
            # the token makes the message's id one that nobody can guess, see mail.py
            content = wire.content_of({"question": {"who": True, "token": secrets.token_hex(8)}})
            asked, why = self.mail.send(node, content, MessageType.QUERY, "", ANSWER_WITHIN)
            if asked is None:
                record.note(f"node {node} could not be asked who it is: {why}")
            else:
                self._asked[asked] = (node, now)
        for message, reply in self.mail.look(self._asked, record).items():
            node, _ = self._asked.pop(message)
            if isinstance(reply, str):
                record.note(f"node {node} did not say who it is: {reply}")
            else:
                self._hear(node, reply.content)
        for message in [message for message, (_, since) in self._asked.items() if now - since > ANSWER_WITHIN]:
            self.mail.give_up(message)
            del self._asked[message]  # it will be asked again
        self._settle(record)

    def _hear(self, node: int, content: RecordDict) -> None:
        self._heard[node] = time.monotonic()
        self._unusable.pop(node, None)
        problem, who = read_problem(content), content.get("who")
        entries: dict[str, Any] = dict(who) if isinstance(who, ConfigRecord) else {}
        claim: Any = entries.get("client")
        if problem is not None:
            self._unusable[node] = problem.text
        elif not is_whole(claim) or not 0 <= claim < self.clients:
            self._unusable[node] = (
                f"says it is client {wire.shorten(repr(claim), 40)}, but they are numbered 0 to {self.clients - 1}"
            )
        elif self._claims.get(node) != claim:
            self._claims.pop(node, None)  # who changes its mind queues up anew
            self._claims[node] = int(claim)
        if node in self._unusable:
            self._claims.pop(node, None)

    def _settle(self, record: Attendance) -> None:
        """Bind clients that have no node, or whose node has gone, to the first node that says it is theirs."""
        for node, client in self._claims.items():
            holder = self.bound.get(client)
            if node not in self.online or holder == node or holder in self.online:
                continue
            self.bound[client] = node
            if holder is not None:
                record.note(f"client {client} was node {holder}, which has gone, and is node {node} now")

    def _record_strangers(self, record: Attendance) -> None:
        """Record the connected nodes that have no part in the run."""
        if self.fixed is not None:
            for node in sorted(self.online - self.fixed.keys()):
                record.refuse_node(node, "it is not on the server's list of nodes")
            return
        for node in sorted(self.online - set(self.bound.values())):
            if node in self._unusable:
                record.refuse_node(node, self._unusable[node])
            elif node in self._claims:
                client = self._claims[node]
                record.refuse_node(node, f"says it is client {client}, and that is node {self.bound[client]}")
