"""Messages to nodes and their replies, over Flower's Grid: who answered, who did not in time, who answered oddly.

A reply is known by the message it replies to. Who sent it is known from that, never from what it contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from lamina.flower import wire
from lamina.flower.records import Attendance

ERRORS = {  # Flower's error codes, in words
    0: "an unknown error",
    1: "its app could not be loaded",
    2: "its app raised an exception",
    3: "the message was lost or expired",
    4: "its reply was lost or expired",
    5: "it went offline",
    6: "a mod of its app refused the message",
    7: "it refused the app",
    8: "its app crashed",
}
MOST_REMEMBERED = 10_000  # answers


@dataclass
class Traffic:
    """Bytes since the last reset: of the arrays alone, and of whole messages."""

    down: int = 0
    up: int = 0
    wire_down: int = 0
    wire_up: int = 0


@dataclass
class Mail:
    """The server's post office."""

    grid: Grid
    poll: float  # seconds between two looks for replies
    name: Callable[[int], str]  # a node, in words
    traffic: Traffic = field(default_factory=Traffic)
    _sent: dict[str, tuple[int, str, float]] = field(default_factory=dict)  # unanswered: node, what, when it expires
    _late: set[str] = field(default_factory=set)  # of those, the ones nobody waits for any more
    _answered: dict[str, tuple[int, str]] = field(default_factory=dict)

    def send(self, node: int, content: RecordDict, kind: str, group: str, ttl: float) -> str | None:
        """Send one message; its id, or None if it could not be sent."""
        message = Message(content, node, kind, ttl=max(ttl, 1e-3), group_id=group)
        ids = list(self.grid.push_messages([message]))
        if len(ids) != 1 or not ids[0]:
            return None
        self.traffic.down += wire.payload_bytes(content)
        self.traffic.wire_down += wire.wire_bytes(content)
        what = f"{kind} of round {group}" if group else kind
        self._sent[ids[0]] = (node, what, time.monotonic() + ttl)
        return str(ids[0])

    def look(self, waiting: Mapping[str, int], record: Attendance) -> dict[str, Message | str]:
        """The replies that have come to these messages (id to node), each a message or, in words, why there is none.

        Anything else that comes is put down in the record and not used.
        """
        found: dict[str, Message | str] = {}
        self._drop_expired()
        # one at a time: a reply that cannot be read must not take others with it
        for wanted in [*waiting, *self._late]:
            try:
                replies = list(self.grid.pull_messages([wanted]))
            except Exception as error:
                if type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
                    raise  # the connection, not the reply
                self._late.discard(wanted)
                if self._sent.pop(wanted, None) and wanted in waiting:
                    found[wanted] = f"its reply cannot be read ({wire.shorten(f'{type(error).__name__}: {error}')})"
                continue
            for reply in replies:
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
        elif reply.has_content() and sender != self._sent[about][0]:
            record.note(f"node {sender} replied to a message to {self.name(self._sent[about][0])}: ignored")
        else:
            node, what, _ = self._sent.pop(about)
            self._late.discard(about)
            self._answered[about] = (node, what)
            if about not in waiting:
                if reply.has_content():
                    record.note(f"{self.name(node)} answered too late ({what}): ignored")
            elif reply.has_error():
                words = ERRORS.get(reply.error.code, f"error {reply.error.code}")
                reason = wire.shorten((reply.error.reason or "").strip().rpartition("\n")[2])
                found[about] = f"{words}: {reason}" if reason else words
            else:
                found[about] = reply

    def give_up(self, messages: Iterable[str]) -> None:
        """Wait for these no longer; if a reply comes in spite of that, the record will say so."""
        self._late.update(messages)

    def _drop_expired(self) -> None:
        """Forget messages nobody can answer any more, and all but the newest answers."""
        now = time.monotonic()
        for old in [m for m in self._late if now > self._sent[m][2] + 60]:
            self._late.discard(old)
            del self._sent[old]
        while len(self._answered) > MOST_REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def exchange(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        until: float,
        record: Attendance,
        answer: Callable[[int, RecordDict], RecordDict | None],
    ) -> dict[int, str]:
        """Send every node its message and hand its reply to `answer`, until all have replied or the time is up.

        Args:
            contents: what each node is sent.
            kind: Flower's message type.
            group: the round.
            until: `time.monotonic()` of the deadline.
            record: where odd replies are put down.
            answer: is given a node and its reply; what it returns is sent to the same node once more.

        Returns:
            The nodes that did not reply, and why.
        """
        failed: dict[int, str] = {}
        waiting: dict[str, int] = {}
        began = time.monotonic()

        def send(node: int, content: RecordDict) -> None:
            sent = self.send(node, content, kind, group, until - time.monotonic())
            if sent is None:
                failed[node] = "the message could not be sent"
            else:
                waiting[sent] = node

        for node, content in contents.items():
            send(node, content)
        while waiting:
            for about, reply in self.look(waiting, record).items():
                node = waiting.pop(about)
                if isinstance(reply, str):
                    failed[node] = reply
                    continue
                again = answer(node, reply.content)
                if again is not None:
                    send(node, again)
            if not waiting or time.monotonic() >= until:
                break
            time.sleep(min(self.poll, max(0.0, until - time.monotonic())))
        self.give_up(waiting)
        failed |= dict.fromkeys(waiting.values(), f"no reply within {time.monotonic() - began:.0f} s")
        return failed
