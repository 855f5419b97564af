"""Sending and pulling messages: stalled uploads, errors in words, messages that cannot be sent."""

import threading
import time
from pathlib import Path

import httpx

from flower_grid import LoopGrid, error_reply, signing_keys
from flower_setup import (
    NODE,
    Setup,
    assert_like_the_simulation,
    assert_weights,
    client_of,
    is_train,
    nodes,
    reference,
)
from lamina.flower import mail, wire
from lamina.flower.mail import Mail
from lamina.flower.signing import load_key


class Stall:
    """Makes a grid's pull of some replies hang, as Flower's does while parts of a reply are missing."""

    def __init__(self, grid, stalls):
        self.grid, self.stalls, self.over = grid, stalls, threading.Event()
        self.pull = grid.pull_messages
        grid.pull_messages = self

    def __call__(self, message_ids):
        (wanted,) = list(message_ids)
        message = self.grid.messages[wanted]
        if self.stalls(message.metadata.dst_node_id, message):
            self.over.wait(60)
            return []
        return self.pull([wanted])


def test_a_stalled_upload_costs_only_its_own_node(tmp_path, monkeypatch):
    monkeypatch.setattr(mail, "PATIENCE_S", 0.05)
    setup = Setup(tmp_path, "scaffold", participation=1.0, rounds=3, more={"deadline": 1.0, "attempts": 1})
    grid = setup.grid()
    stall = Stall(grid, lambda node, message: is_train(message, 2) and client_of(node) == 0)
    started = time.monotonic()
    try:
        setup.run(grid)
    finally:
        stall.over.set()
    assert time.monotonic() - started < 20
    assert_weights(setup, reference(setup, absent={(2, 0)}))
    (missing,) = setup.journal[1]["missing"]
    assert missing["client"] == 0
    assert missing["why"] == "no reply within 1.0 s"
    assert len(setup.journal[1]["took_part"]) == 3


def test_a_slow_upload_that_is_completed_in_time_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(mail, "PATIENCE_S", 0.02)
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2)
    grid = setup.grid()
    whole, asked = grid.pull_messages, []

    def slow(message_ids):
        (wanted,) = message_ids
        if grid.messages[wanted].metadata.dst_node_id == NODE + 1 and is_train(grid.messages[wanted]):
            asked.append(wanted)
            time.sleep(0.2)
        return whole([wanted])

    grid.pull_messages = slow
    setup.run(grid)
    assert_like_the_simulation(setup)
    assert len(asked) == len(set(asked))  # never pulled a second time while the first pull runs


def test_more_stalled_uploads_than_pulls_at_once_block_nobody(monkeypatch):
    monkeypatch.setattr(mail, "PATIENCE_S", 0.05)
    over = threading.Event()

    class Grid:
        def pull_messages(self, message_ids):
            (wanted,) = message_ids
            if wanted.startswith("bad"):
                over.wait(60)
            return [wanted]

    wanted = [f"bad{i}" for i in range(3 * mail.AT_ONCE)] + ["good"]
    puller = mail.Puller(Grid())
    try:
        assert list(puller.look(wanted)) == ["good"]
        started = time.monotonic()
        assert puller.look(wanted[:-1]) == {}
        assert time.monotonic() - started < 1  # those that hang are not waited for again
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("pull "))
    finally:
        over.set()


def test_a_reply_the_superlink_cannot_hand_out_costs_only_its_node(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2)
    response = httpx.Response(500, request=httpx.Request("POST", "https://superlink/v1/runtime/pull-messages"))

    def on_reply(grid, node, message, reply):
        if is_train(message, 1) and client_of(node) == 1:
            grid.box[message.metadata.message_id] = [httpx.HTTPStatusError("500", request=response.request,
                                                                           response=response)]  # fmt: skip
            return None
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    (missing,) = setup.journal[0]["missing"]
    assert missing["client"] == 1
    assert missing["why"] == "its reply cannot be read (HTTPStatusError: 500)"
    assert_weights(setup, reference(setup, absent={(1, 1)}))


def test_errors_of_nodes_are_put_into_words(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0)

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            return error_reply(message, 5)
        if is_train(message, 2) and client_of(node) == 2:
            return error_reply(message, 8, "out\nof memory")
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    whys = {entry["client"]: entry["why"] for entry in setup.journal[1]["missing"]}
    assert whys == {1: "it went offline", 2: "its app crashed: of memory"}
    assert_weights(setup, reference(setup, absent={(2, 1), (2, 2)}))


def test_a_reply_that_cannot_be_unpacked_costs_only_itself(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0)

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            grid.box[message.metadata.message_id] = [ValueError("Unexpected set of `children`")]
            return None
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert_weights(setup, reference(setup, absent={(2, 1)}))
    assert "its reply cannot be read" in setup.journal[1]["missing"][0]["why"]


def test_what_has_no_time_left_is_not_sent():
    grid = LoopGrid(lambda message, context: message, nodes(1), least=10.0)
    mail = Mail(grid, load_key(Path(signing_keys()[0]), secret=True))
    content = wire.content_of({"task": {"round": 1}})
    assert mail.send(NODE, content, "train", "1", -0.5) == (None, "no time was left to send it a message")
    assert grid.seen == []
    sent, why = mail.send(NODE, content, "train", "1", 1.0)
    assert (sent, why.startswith("the message could not be sent (Expired")) == (None, True)
