"""Messages to nodes and their replies, over Flower's Grid.

A reply is known by the message it replies to. Who sent it is known from that, never from what it contains. Flower's
SuperLink lets a node fetch only its own messages, but does not compare the sender that a reply names with the node that
hands it over; what keeps a node from answering for another is that it cannot know the other message's id, a hash over a
content that always holds a random token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from lamina.flower import wire
from lamina.flower.pull import Puller
from lamina.flower.records import Attendance
from lamina.flower.signing import Signer

ERRORS = {  # Flower's error codes, in words
    0: "an unknown error",
    1: "its app could not be loaded",
    2: "its app raised an exception",
    3: "the message was lost",
    4: "its reply was lost",
    5: "it went offline",
    6: "a mod of its app refused the message",
    7: "it refused the app",
    8: "its app crashed",
}
RAISED = (0, 2, 6)  # their reasons are texts of exceptions, which may quote a node's data: only the type is shown
EXCEPTION = re.compile(r"(?:<class ')?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning))\b")
EXPIRED = (3, 4)  # what Flower says of a message whose time is over, too
MOST_REMEMBERED = 10_000  # answers
LATE = "no reply within"  # how the reason begins for a node that needs longer than the deadline


@dataclass
class Traffic:
    """Bytes since the last reset: of the arrays alone, and of whole messages."""

    down: int = 0
    up: int = 0
    wire_down: int = 0
    wire_up: int = 0


class Sent(NamedTuple):
    """A message that is on its way."""

    node: int
    what: str
    at: float  # time.monotonic()
    ttl: float

    @property
    def over(self) -> bool:
        """Whether its time is up, give or take the difference of two clocks."""
        return time.monotonic() >= self.at + self.ttl - min(1.0, self.ttl / 10)


@dataclass
class Mail:
    """Sends the server's messages and collects the replies."""

    grid: Grid
    name: Callable[[int], str]  # a node, in words
    signer: Signer | None = None  # None: in a simulation, where nodes verify nothing
    traffic: Traffic = field(default_factory=Traffic)
    _sent: dict[str, Sent] = field(default_factory=dict)  # unanswered
    _late: set[str] = field(default_factory=set)  # of those, the ones nobody waits for any more
    _answered: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._puller = Puller(self.grid)

    def send(self, node: int, content: RecordDict, kind: str, group: str, ttl: float) -> tuple[str | None, str]:
        """Send one message; its id, or None and why it could not be sent. Never raises: only this node is concerned."""
        if ttl <= 0:
            return None, "no time was left to send it a message"
        began = time.monotonic()  # its time runs while it is handed over, too
        message = Message(content, node, kind, ttl=ttl, group_id=group)
        if self.signer is not None:
            self.signer.sign(message)
        try:
            ids = list(self.grid.push_messages([message]))
        except Exception as error:  # the SuperLink refuses it: expired on its way, too large, an unknown node
            return None, f"the message could not be sent ({wire.shorten(f'{type(error).__name__}: {error}')})"
        if len(ids) != 1 or not ids[0]:
            return None, "the message could not be sent"
        self.traffic.down += wire.payload_bytes(content)
        self.traffic.wire_down += wire.wire_bytes(content)
        what = f"{kind} of round {group}" if group else kind
        self._sent[ids[0]] = Sent(node, what, began, ttl)
        return str(ids[0]), ""

    def look(self, waiting: Mapping[str, int], record: Attendance) -> dict[str, Message | str]:
        """Return the replies to these messages (id to node): each a message or, in words, why there is none.

        Anything else that arrives is noted in the record and not used.
        """
        found: dict[str, Message | str] = {}
        self._drop_expired()
        # one at a time: a reply that cannot be read must not take others with it
        for wanted, pull in self._puller.look([*waiting, *self._late]).items():
            if pull.error is not None:
                error = pull.error
                if isinstance(error, httpx.TransportError):
                    raise error  # the connection, not the reply
                self._late.discard(wanted)
                if self._sent.pop(wanted, None) and wanted in waiting:
                    found[wanted] = f"its reply cannot be read ({wire.shorten(f'{type(error).__name__}: {error}')})"
            for reply in pull.replies:
                self._sort(reply, waiting, found, record)
        return found

    def _sort(
        self, reply: Message, waiting: Mapping[str, int], found: dict[str, Message | str], record: Attendance
    ) -> None:
        about, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        if reply.has_content():
            self.traffic.up += wire.payload_bytes(reply.content)
            self.traffic.wire_up += wire.wire_bytes(reply.content)
        if about in self._answered:
            node, what = self._answered[about]
            record.note(f"{self.name(node)} answered twice ({what}): only the first counts")
        elif about not in self._sent:
            record.note(f"node {sender} replied to a message that was not sent: ignored")
        elif reply.has_content() and sender != self._sent[about].node:
            record.note(f"node {sender} replied to a message to {self.name(self._sent[about].node)}: ignored")
        else:
            sent = self._sent.pop(about)
            node, what = sent.node, sent.what
            self._late.discard(about)
            self._answered[about] = (node, what)
            if about not in waiting:
                if reply.has_content():
                    record.note(f"{self.name(node)} answered too late ({what}): ignored")
            elif reply.has_error() and reply.error.code in EXPIRED and sent.over:
                found[about] = late(sent.ttl)
            elif reply.has_error():
                words = ERRORS.get(reply.error.code, f"error {reply.error.code}")
                reason = wire.shorten((reply.error.reason or "").strip().rpartition("\n")[2])
                if reply.error.code in RAISED:
                    raised = EXCEPTION.match(reason)
                    reason = raised[1] if raised else ""
                found[about] = f"{words}: {reason}" if reason else words
            else:
                found[about] = reply

    def give_up(self, message: str) -> bool:
        """Stop waiting for a reply, which is only noted if it comes later; return whether its upload has begun."""
        self._late.add(message)
        return self._puller.is_uploading(message)

    def _drop_expired(self) -> None:
        """Forget messages nobody can answer any more, and all but the newest answers."""
        now = time.monotonic()
        for old in [m for m in self._late if now > self._sent[m].at + self._sent[m].ttl + 60]:
            self._late.discard(old)
            del self._sent[old]
        while len(self._answered) > MOST_REMEMBERED:
            del self._answered[next(iter(self._answered))]


def late(seconds: float) -> str:
    """Return why a node is missing that did not answer in time.

    >>> late(600.2)
    'no reply within 600 s'
    """
    return f"{LATE} {seconds:.0f} s" if seconds >= 10 else f"{LATE} {seconds:.1f} s"
