"""A Flower `Grid` that calls the nodes' apps in this process: the adapter without processes, Ray or sockets.

Every message goes through Flower's protobuf form and back on each hop, as it would over a network.
"""

import functools
import tempfile
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from lamina.flower import wire
from lamina.flower.keys import make_server_keys
from lamina.flower.signing import load_key, sign


@functools.cache
def key_folder():
    """The folder of the keys, created on first use: a process that is killed does not remove it."""
    return tempfile.TemporaryDirectory(prefix="lamina-keys-")


@functools.cache
def signing_keys():
    """The keys of every federation in this process: the server's private one, the nodes' public one."""
    keys = make_server_keys(Path(key_folder().name))
    return str(keys.signing_key), str(keys.verifying_key)


def signed(message):
    """Sign a message again, as the server signs its own."""
    sign(message, load_key(Path(signing_keys()[0]), secret=True))
    return message


def over_the_wire(message):
    sent = message_from_proto(message_to_proto(message))
    sent.metadata.__dict__["_message_id"] = message.metadata.message_id
    return sent


class Expired(Exception):
    """What a SuperLink answers to a message whose time is over (HTTP 500 in Flower 1.41)."""


class LoopGrid(Grid):
    """Nodes by id. `on_send(grid, node, message)` and `on_reply(grid, node, message, reply)` may disturb the traffic:

    what they return is used instead; None loses it; a list is several replies.

    A message that has less than `least` seconds to live is refused by an exception, as a SuperLink refuses one that has
    expired; a reply comes `delay(node, message)` seconds after its message, and never after the message's ttl: then
    the message's place is taken by Flower's error 3, message unavailable.
    """

    def __init__(self, apps, node_configs, on_send=None, on_reply=None, run_config=None, delay=None, least=0.005):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps = apps if isinstance(apps, dict) else dict.fromkeys(node_configs, apps)
        listed = {node: config["partition-id"] for node, config in node_configs.items() if "partition-id" in config}
        self.contexts = {
            node: Context(
                1,
                node,
                {"server-key": signing_keys()[1], **config},
                RecordDict(),
                {"signing-key": signing_keys()[0], "nodes": listed, **(run_config or {})},
            )
            for node, config in node_configs.items()
        }
        self.offline = set()
        self.on_send, self.on_reply = on_send, on_reply
        self.delay, self.least = delay, least
        self.count, self.box, self.seen = 0, {}, []
        self.ready, self.expires = {}, {}  # by message id: time.monotonic() of its reply, and of its end
        self.messages = {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return [node for node in self.contexts if node not in self.offline]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            if message.metadata.ttl < self.least:
                raise Expired("Malformed PushMessages: Message TTL has expired")
            self.count += 1
            name = f"m{self.count}"
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            node = message.metadata.dst_node_id
            received = over_the_wire(message)
            self.seen.append((node, received))
            now = time.monotonic()
            self.messages[name], self.expires[name] = received, now + message.metadata.ttl
            if self.delay is not None:
                self.ready[name] = now + self.delay(node, received)
            if self.on_send is not None and self.on_send(self, node, received) is None:
                continue
            if node in self.offline:
                self.put(error_reply(received, 5))
                continue
            try:
                reply = self.apps[node](received, self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, f"Traceback\n{type(error).__name__}: {error}"), reply_to=received)
            replies = reply if self.on_reply is None else self.on_reply(self, node, received, reply)
            for one in replies if isinstance(replies, list) else [replies]:
                if one is not None:
                    if one.has_content():  # whoever makes up a reply knows what it is to answer
                        one.content.setdefault("answer", ConfigRecord({"to": wire.token_of(received.content)}))
                    self.put(one)
        return ids

    def put(self, reply, about=None):
        """Have a reply ready at the next look for the message it replies to, or for another one."""
        self.box.setdefault(about or reply.metadata.reply_to_message_id, []).append(over_the_wire(reply))

    def pull_messages(self, message_ids):
        now, found = time.monotonic(), []
        for one in message_ids:
            if now < self.ready.get(one, now):
                if now >= self.expires[one]:
                    found.append(error_reply(self.messages[one], 3, "Error: Message Unavailable - it may have expired"))
                    self.box.pop(one, None)
                    del self.ready[one]
                continue
            found += self.box.pop(one, [])
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found


def error_reply(message, code, reason=""):
    """An error reply as Flower makes it: it comes from node 1, the SuperLink."""
    reply = Message(Error(code, reason), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1
    return reply
