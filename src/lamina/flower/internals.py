"""What lamina uses of Flower beyond its public interface, tested with Flower 1.41.0 and 1.42.0.

No other module of lamina imports a private module of Flower or reaches into its objects. Look here first when a new
version of Flower is to be supported.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click
from flwr.app import RecordDict
from flwr.common.config import parse_config_args
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from lamina.base.errors import BadInput, short_repr


def parse_node_config(text: str) -> dict[str, Any]:
    """Return the settings in a SuperNode's ``--node-config``.

    >>> parse_node_config('partition-id=0 data="/path/to/data"')
    {'partition-id': 0, 'data': '/path/to/data'}
    """
    try:
        return dict(parse_config_args([text]))
    except click.ClickException as error:
        raise BadInput(f"cannot read the node's configuration {short_repr(text)}: {error.message}") from error


def serialised_bytes(content: RecordDict) -> int:
    """Return how many bytes a message's content has as Flower serialises it."""
    return int(recorddict_to_proto(content).ByteSize())


@contextlib.contextmanager
def offline_task() -> Iterator[None]:
    """Let this process create messages that no SuperLink sends, as a strategy does, and leave out its log lines."""
    names = ("_task_id", "_run_id", "_node_id")
    before, flowers_log = [getattr(TaskIdentity, name) for name in names], logging.getLogger("flwr")
    level = flowers_log.level
    try:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        flowers_log.setLevel(logging.WARNING)
        yield
    finally:
        flowers_log.setLevel(level)
        for name, value in zip(names, before, strict=True):
            setattr(TaskIdentity, name, value)


def take_replies_only(grid: Grid) -> None:
    """Have a Grid leave out everything but replies to the messages it is asked for, before it reads their contents.

    A node can also send the server a message that is not a reply. Flower hands it out together with the next reply that
    is pulled, from whatever node, and waits for its parts as well. Flower's `HttpGrid` has no setting for it. Other
    Grids are left alone.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        return
    pull = client.PullMessages

    def replies_only(request: Any) -> Any:
        response, wanted = pull(request), set(request.message_ids)
        pairs = zip(response.messages_list, response.message_object_trees, strict=True)
        kept = [(reply, tree) for reply, tree in pairs if reply.metadata.reply_to_message_id in wanted]
        return type(response)(
            messages_list=[reply for reply, _ in kept], message_object_trees=[tree for _, tree in kept]
        )

    client.PullMessages = replies_only
