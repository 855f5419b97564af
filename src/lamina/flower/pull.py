"""Pull replies from Flower's Grid in threads, so that a node that never completes its upload delays only itself.

A node announces a reply first and uploads its parts afterwards. ``Grid.pull_messages`` waits for parts that are
missing, for minutes or hours if the node wants, and cannot be interrupted.

A node can also send the server a message that is no reply. Flower hands it out together with the next reply that is
pulled, whoever's that is, and waits for its parts as well. `take_replies_only` has Flower drop such messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid

AT_ONCE = 8  # pulls that are waited for at the same time
PATIENCE_S = 1.0  # the wait for a pull; a slower one continues in its thread, and a later look finds its reply


def take_replies_only(grid: Grid) -> None:
    """Have a Grid leave out everything but replies to the messages it is asked for, before it reads their contents.

    This reaches into Flower's `HttpGrid` (1.41), which has no setting for it; other Grids are left alone.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        return
    pull = client.PullMessages

    def replies_only(request: Any) -> Any:
        response, wanted = pull(request), set(request.message_ids)
        pairs = zip(response.messages_list, response.message_object_trees, strict=True)
        kept = [(reply, tree) for reply, tree in pairs if reply.metadata.reply_to_message_id in wanted]
        return PullAppMessagesResponse(
            messages_list=[reply for reply, _ in kept], message_object_trees=[tree for _, tree in kept]
        )

    client.PullMessages = replies_only


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
    """Looks for replies. Used from one thread; only the pulls themselves run in others."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        take_replies_only(grid)
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

    def is_uploading(self, message: str) -> bool:
        """Return whether the reply to a message was announced and is not complete."""
        return message in self._pulls

    def _wait_for_all_but(self, most: int) -> None:
        """Wait until at most `most` pulls run that are still worth waiting for."""
        while True:
            now = time.monotonic()
            pending = [pull for pull in self._pulls.values() if pull.is_alive() and now < pull.patience_ends]
            if len(pending) <= most:
                return
            pending[0].join(pending[0].patience_ends - now)
