"""A registered node that speaks Flower's protocol itself: forged tasks, and messages that are never completed."""

import time

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from federation.harness import Job, experiment, simulated
from lamina.flower.keys import make_node_key
from lamina.flower.local.processes import HOST

SERVER = 1  # its node id in Flower
VICTIM, PLACE = 0, 2  # clients: whose node is sent a forged task, and whose place the hostile node takes


class HostileNode:
    """One connection to the SuperLink with a registered node's key, made by Flower's own client code."""

    def __init__(self, federation, key):
        private = load_ssh_private_key(key.read_bytes(), None)
        self._connection = http_request_response(
            f"{HOST}:{federation.port}",
            insecure=False,
            root_certificates=str(federation.keys.certificate),
            authentication_keys=(private, private.public_key()),
        )

    def __enter__(self):
        self.id, self._receive, self._send, _, _, self._pull, self._push, _ = self._connection.__enter__()
        return self

    def __exit__(self, *error):
        return self._connection.__exit__(*error)

    def task(self):
        """Wait for a task of the server's and return it whole."""
        while (received := self._receive()) is None:
            time.sleep(0.2)
        message, tree = received
        wanted = [node.object_id for node in iterate_object_tree(tree)]
        run, name = message.metadata.run_id, message.metadata.message_id
        whole = inflate_object_from_contents(name, pull_objects(wanted, lambda one: self._pull(run, one)))
        whole.metadata.__dict__["_message_id"] = name
        return whole

    def send(self, content, about, *, source, to, reply_to="", seconds=None, complete=True):
        """Send any content in anybody's name; an incomplete message is announced, and its parts never follow."""
        metadata = Metadata(
            run_id=about.run_id,
            message_id="",
            src_node_id=source,
            dst_node_id=to,
            reply_to_message_id=reply_to,
            group_id=about.group_id,
            created_at=time.time(),
            ttl=seconds or about.created_at + about.ttl - time.time(),
            message_type=about.message_type,
        )
        message = make_message(metadata=metadata, content=content)
        metadata.__dict__["_message_id"] = message.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        missing, session = self._send(message, get_object_tree(message), 0.0)
        assert missing  # the SuperLink has taken it, and waits for its parts
        for name in missing if complete else ():
            self._push(about.run_id, session, name, parts[name])


@pytest.mark.seconds(900)
def test_forged_tasks_and_incomplete_messages_cost_only_their_sender(federation, tmp_path):
    spec = experiment("scaffold", 2)
    key, _ = make_node_key(tmp_path / "hostile")
    started = time.monotonic()
    number = federation.register(key)
    # The first round takes the whole deadline. A busy machine needs a longer one: as long as it needs for a command.
    deadline = max(25, round(8 * (time.monotonic() - started)))
    ids = {client: node for node, client in federation.node_ids.items()} | {PLACE: number}
    victim = federation.nodes[VICTIM]

    with HostileNode(federation, key) as hostile:
        assert hostile.id == number
        nodes = {node: client for client, node in ids.items()}
        job = Job(federation, spec, tmp_path, nodes=nodes, quorum=2, deadline=deadline)
        task = hostile.task()
        about = task.metadata

        # a task for another node, made of the own one: it would delete the client's state
        forged = {**task.content["task"], "client": VICTIM, "token": "0" * 16, "base": "", "keep": []}
        content = RecordDict({**task.content, "task": ConfigRecord(forged)})
        hostile.send(content, about, source=SERVER, to=ids[VICTIM])

        # a reply that is never completed
        reply = RecordDict({"up": task.content["down"]})
        hostile.send(reply, about, source=number, to=SERVER, reply_to=about.message_id, complete=False)

        # messages to the server that are no replies and are never completed: Flower hands them out with any reply
        while not job.rows():
            noise = RecordDict({"noise": ConfigRecord({"now": time.time_ns()})})
            hostile.send(noise, about, source=SERVER, to=SERVER, seconds=60, complete=False)
            time.sleep(0.3)

    job.wait()
    attempts = job.attempts()
    ended = f"no reply within {deadline} s"
    assert [(one["client"], one["node"], one["why"]) for one in attempts[0]["missing"] if one["client"] == PLACE] == [
        (PLACE, str(number), ended)
    ]
    assert job.absent() == {1: {PLACE}, 2: {PLACE}}
    assert "refused a message that the server has not signed" in victim.output()
    job.assert_same(simulated(spec, job.absent()))
