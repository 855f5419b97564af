"""Messages to nodes and their replies, over Flower's Grid.

A reply is known by the message it replies to. Who sent it is known from that, never from what it contains. Flower's
SuperLink lets a node fetch only its own messages, but does not compare the sender that a reply names with the node that
hands it over; what keeps a node from answering for another is that it cannot know the other message's id, a hash over a
content that always holds a random token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from lamina.flower import internals, wire
from lamina.flower.records import Attendance
from lamina.flower.signing import sign

ERRORS = {  # what Flower's error codes mean
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
RAISED = (0, 2, 6)  # their reasons are texts of exceptions, which may quote a node's data, and are not shown
EXPIRED = (3, 4)  # Flower also gives a message that has expired one of these
OF_THE_APP = (1, 2, 6, 7, 8)  # the others are of the connection
LATE = "no reply within"  # how the reason begins for a node that needs longer than the deadline
AT_ONCE = 8  # pulls that are waited for at the same time
PATIENCE_S = 1.0  # the wait for a pull; a slower one continues in its thread, and a later look finds its reply


@dataclass
class Traffic:
    """Bytes since the last reset: of the arrays alone, and of whole messages."""

    down: int = 0
    up: int = 0
    wire_down: int = 0
    wire_up: int = 0


class Sent(NamedTuple):
    """A message to a node that has not been answered."""

    node: int
    expires: float  # time.monotonic()
    ttl: float


class NoReply(NamedTuple):
    """Why a node has sent no reply that can be used."""

    why: str
    is_error: bool  # of its app or its reply, which will likely happen again; False: it was late or out of reach


class Mail:
    """Sends the server's messages, signed, and collects the replies."""

    def __init__(self, grid: Grid, signing_key: Ed25519PrivateKey) -> None:
        self.grid, self.signing_key, self.traffic = grid, signing_key, Traffic()
        self._puller = Puller(grid)
        self._sent: dict[str, Sent] = {}

    def send(self, node: int, content: RecordDict, kind: str, group: str, ttl: float) -> tuple[str | None, str]:
        """Send one message; its id, or None and why it could not be sent. Never raises: only this node is concerned."""
        if ttl <= 0:
            return None, "no time was left to send it a message"
        expires = time.monotonic() + ttl  # handing it over takes part of its time
        message = Message(content, node, kind, ttl=ttl, group_id=group)
        sign(message, self.signing_key)
        try:
            ids = list(self.grid.push_messages([message]))
        except Exception as error:  # the SuperLink refuses it: expired on its way, too large, an unknown node
            return None, f"the message could not be sent ({wire.shorten(f'{type(error).__name__}: {error}')})"
        if len(ids) != 1 or not ids[0]:
            return None, "the message could not be sent"
        self.traffic.down += wire.payload_bytes(content)
        self.traffic.wire_down += wire.wire_bytes(content)
        self._sent[ids[0]] = Sent(node, expires, ttl)
        return str(ids[0]), ""

    def give_up(self, message: str) -> None:
        """Stop waiting for a reply, which counts no more."""
        del self._sent[message]

    def look(self, waiting: Iterable[str], record: Attendance) -> dict[str, Message | NoReply]:
        """Return the replies to these messages: each a message, or the reason why there is none.

        Anything else that arrives is noted in the record and not used.
        """
        replies: dict[str, Message | NoReply] = {}
        # one at a time: a reply that cannot be read must not take others with it
        for message, pull in self._puller.look(waiting).items():
            if isinstance(pull.error, httpx.TransportError):
                raise pull.error  # the connection, not the reply
            if pull.error is not None:
                text = wire.shorten(f"{type(pull.error).__name__}: {pull.error}")
                replies[message] = NoReply(f"its reply cannot be read ({text})", is_error=True)
            for reply in pull.replies:
                sender, about = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
                if reply.has_content():
                    self.traffic.up += wire.payload_bytes(reply.content)
                    self.traffic.wire_up += wire.wire_bytes(reply.content)
                is_sent_by_it = reply.has_error() or sender == self._sent[message].node
                if about != message or message in replies or not is_sent_by_it:
                    record.note(f"node {sender} sent a reply that it was not asked for, or a second one: ignored")
                else:
                    replies[message] = _why(reply, self._sent[message]) if reply.has_error() else reply
        for message in replies:
            del self._sent[message]
        return replies


def _why(reply: Message, sent: Sent) -> NoReply:
    """Return what Flower's error means."""
    code = reply.error.code
    difference_of_clocks = min(1.0, sent.ttl / 10)
    if code in EXPIRED and time.monotonic() >= sent.expires - difference_of_clocks:
        return NoReply(late(sent.ttl), is_error=False)
    reason = "" if code in RAISED else wire.shorten((reply.error.reason or "").strip().rpartition("\n")[2])
    why = ERRORS.get(code, f"error {code}") + (f": {reason}" if reason else "")
    return NoReply(why, is_error=code in OF_THE_APP)


def late(seconds: float) -> str:
    """Return why a node is missing that did not answer in time.

    >>> late(600.2)
    'no reply within 600 s'
    """
    return f"{LATE} {seconds:.0f} s" if seconds >= 10 else f"{LATE} {seconds:.1f} s"


class Pull(threading.Thread):
    """One attempt to pull the reply to a message. A daemon: a pull that hangs does not keep the process alive."""

    def __init__(self, grid: Grid, message: str) -> None:
        super().__init__(name=f"pull {message[:12]}", daemon=True)
        self.replies: list[Message] = []
        self.error: Exception | None = None
        self.patience_ends = time.monotonic() + PATIENCE_S
        self._grid, self._message = grid, message

    def run(self) -> None:
        """Pull; what comes of it is in `replies` or `error`."""
        try:
            self.replies = list(self._grid.pull_messages([self._message]))
        except Exception as error:
            self.error = error


class Puller:
    """Looks for replies, in threads, so that a node that never completes its upload delays only itself.

    A node announces a reply first and uploads its parts afterwards. ``Grid.pull_messages`` waits for parts that are
    missing, for minutes or hours if the node wants, and cannot be interrupted. Only the pulls run in other threads.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        internals.take_replies_only(grid)
        self._pulls: dict[str, Pull] = {}  # by message, those that are not finished

    def look(self, messages: Iterable[str]) -> dict[str, Pull]:
        """Return the finished pulls of these messages, in this order; any other message is forgotten.

        A message whose pull still runs since an earlier look is not pulled a second time.
        """
        before, self._pulls = self._pulls, {}
        for message in messages:
            if message in before:
                self._pulls[message] = before[message]
                continue
            self._wait_for_all_but(AT_ONCE - 1)
            self._pulls[message] = Pull(self._grid, message)
            self._pulls[message].start()
        self._wait_for_all_but(0)
        finished = {message: pull for message, pull in self._pulls.items() if not pull.is_alive()}
        self._pulls = {message: pull for message, pull in self._pulls.items() if message not in finished}
        return finished

    def _wait_for_all_but(self, most: int) -> None:
        """Wait until at most `most` pulls run that are still worth waiting for."""
        while True:
            now = time.monotonic()
            pending = [pull for pull in self._pulls.values() if pull.is_alive() and now < pull.patience_ends]
            if len(pending) <= most:
                return
            pending[0].join(pending[0].patience_ends - now)
