"""Lost, late, repeated and foreign replies, and nodes that have lost what the server relies on."""

import shutil

import pytest
from flwr.app import Message

import lamina
from flower_grid import Expired, over_the_wire
from flower_setup import (
    MIME,
    NODE,
    Setup,
    assert_like_the_simulation,
    assert_weights,
    client_of,
    is_train,
    reference,
)
from lamina.flower import wire


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["scaffold", "fedlamb"])
def test_a_lost_reply_does_not_let_the_clients_state_run_ahead(algorithm, tmp_path):
    setup = Setup(tmp_path, algorithm, participation=1.0, more={"deadline": 0.2})
    lose = {(2, 1), (3, 1), (4, 0)}

    def on_reply(grid, node, message, reply):
        return None if is_train(message) and (int(message.metadata.group_id), client_of(node)) in lose else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert_weights(setup, reference(setup, absent=lose))
    for entry in setup.journal[1:3]:
        (missing,) = entry["missing"]
        assert (missing["client"], missing["node"]) == (1, str(NODE + 1))
        assert missing["why"].startswith("no reply within")
    assert [(row["clients"], row["asked"], row["missing"]) for row in setup.rows[:3]] == [
        (4, 4, 0),
        (3, 4, 1),
        (3, 4, 1),
    ]


@pytest.mark.parametrize("algorithm", ["scaffold", "fedlamb"])
def test_a_restarted_node_continues(algorithm, tmp_path):
    setup = Setup(tmp_path, algorithm)

    def on_send(grid, node, message):
        grid.apps[node] = setup.client_app()  # every message meets a new process, as Flower has it
        return message

    setup.run(setup.grid(on_send))
    assert_like_the_simulation(setup)


def test_a_node_that_lost_its_disk_begins_anew(tmp_path):
    setup = Setup(tmp_path, lamina.algorithms.create("fedlamb", sync_every=3), participation=1.0)

    def on_send(grid, node, message):
        if is_train(message, 3) and client_of(node) == 1:
            for folder in (tmp_path / "state").glob("*/client-1"):
                shutil.rmtree(folder)
        return message

    grid = setup.run(setup.grid(on_send))
    assert_weights(setup, reference(setup, lost={(3, 1)}))
    assert setup.journal[2]["notes"] == [f"client 1 (node {NODE + 1}) has lost its client state and starts again"]
    assert len(setup.journal[2]["took_part"]) == 4
    assert sum(is_train(message, 3) and client_of(node) == 1 for node, message in grid.seen) == 2


def test_a_node_that_lost_a_cached_field_is_sent_it_again(tmp_path):
    setup = Setup(tmp_path, lamina.algorithms.create("fedlamb", sync_every=3), participation=1.0)

    def on_send(grid, node, message):
        if is_train(message, 3) and client_of(node) == 1:
            for path in (tmp_path / "state").glob("*/client-1/held-*"):
                path.write_bytes(b"damaged")
        return message

    setup.run(setup.grid(on_send))
    assert_like_the_simulation(setup, without=("bytes_down",))
    assert "does not hold v_hat" in setup.journal[2]["notes"][0]
    ledger = setup.simulation().run(3)
    model = 6 * 8 + 8 + 8 * 3 + 3
    assert setup.rows[2]["bytes_down"] == ledger[2]["bytes_down"] + 2 * model * 4  # x and v_hat once more


def test_late_double_and_foreign_replies_are_ignored(tmp_path):
    """Those that Flower lets through are noted."""
    setup = Setup(tmp_path, "scaffold", participation=1.0, more={"deadline": 0.2})
    kept = {}

    def on_reply(grid, node, message, reply):
        if not is_train(message):
            return reply
        number, client = int(message.metadata.group_id), client_of(node)
        if (number, client) == (2, 1):
            kept["late"] = reply
            return None
        if (number, client) == (3, 0):
            grid.put(kept["late"])  # round 2's answer, in round 3
            return [reply, reply]
        if (number, client) == (4, 2):  # pretends to answer for client 3, whose own answer is on its way
            grid.put(reply)
            stolen = over_the_wire(reply)
            stolen.metadata.__dict__["_reply_to_message_id"] = f"m{grid.count + 1}"
            grid.put(stolen)
            unknown = over_the_wire(reply)
            unknown.metadata.__dict__["_reply_to_message_id"] = "m99999"
            grid.put(unknown, about=reply.metadata.reply_to_message_id)
            return []
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert_weights(setup, reference(setup, absent={(2, 1)}))
    third, fourth = setup.journal[2]["notes"], setup.journal[3]["notes"]
    ignored = "sent a reply that it was not asked for, or a second one: ignored"
    assert third == [f"node {NODE} {ignored}"]
    assert fourth == [f"node {NODE + 2} {ignored}"]
    assert len(setup.journal[3]["took_part"]) == 4


def test_a_reply_for_an_old_round_is_not_taken_for_the_new_one(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, more={"deadline": 0.2})
    old = {}

    def on_reply(grid, node, message, reply):
        if is_train(message) and client_of(node) == 1:
            if is_train(message, 1):
                old["reply"] = reply
            if is_train(message, 3):  # the content of round 1 with nothing but its own old address
                grid.put(old["reply"], about=message.metadata.message_id)
                return None
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert_weights(setup, reference(setup, absent={(3, 1)}))


@pytest.mark.long
def test_a_node_that_is_silent_in_mimes_first_exchange_is_only_missing(tmp_path):
    """Each exchange has a deadline of its own: the second is not sent in the last moments of the first."""
    setup = Setup(tmp_path, MIME, rounds=2, participation=1.0, more={"deadline": 0.8, "attempts": 1})

    def on_send(grid, node, message):
        return None if client_of(node) == 3 and message.metadata.message_type == "train.gradient" else message

    setup.run(setup.grid(on_send, delay=lambda node, message: 0.1))
    assert_weights(setup, reference(setup, absent={(1, 3), (2, 3)}))
    for entry in setup.journal:
        (missing,) = entry["missing"]
        assert (missing["client"], missing["why"]) == (3, "no reply within 0.8 s")
        assert len(entry["took_part"]) == 3


def test_a_node_that_answers_only_mimes_first_exchange_is_not_in_the_mean(tmp_path):
    setup = Setup(tmp_path, MIME, rounds=2, participation=1.0, more={"deadline": 0.3, "attempts": 1})
    setup.run(setup.grid(lambda grid, node, message: None if is_train(message) and node == NODE + 3 else message))
    assert [[one["client"] for one in entry["took_part"]] for entry in setup.journal] == [[0, 1, 2]] * 2
    assert [[one["client"] for one in entry["missing"]] for entry in setup.journal] == [[3]] * 2


def test_a_message_that_cannot_be_sent_costs_one_node(tmp_path):
    """A node that says it has lost something is sent all again; if that cannot be done, it is missing."""
    setup = Setup(tmp_path, lamina.algorithms.create("fedlamb", sync_every=3), participation=1.0, rounds=3,
                  more={"attempts": 1})  # fmt: skip

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            lost = wire.content_of({"problem": {"text": "does not hold v_hat", "missing": ["v_hat"]}})
            return Message(lost, reply_to=message)
        return reply

    grid = setup.grid(on_reply=on_reply)
    push, asked = grid.push_messages, []

    def push_once(messages):
        if is_train(messages[0], 2) and messages[0].metadata.dst_node_id == NODE + 1:
            asked.append(1)
            if len(asked) == 2:
                raise Expired("Server error '500 Internal Server Error'")
        return push(messages)

    grid.push_messages = push_once
    setup.run(grid)
    (missing,) = setup.journal[1]["missing"]
    assert missing["client"] == 1
    assert missing["why"].startswith("the message could not be sent (Expired: Server error '500")
    assert [entry["complete"] for entry in setup.journal] == [True] * 3
    assert_weights(setup, reference(setup, absent={(2, 1)}))
