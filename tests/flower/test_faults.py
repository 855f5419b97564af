"""Lost, late and broken replies, nodes that come and go, quorum and deadlines."""

import re
import shutil

import pytest
import torch
from flwr.app import Message

import lamina
from flower_grid import Expired, LoopGrid, error_reply, over_the_wire
from flower_setup import (
    MIME,
    NODE,
    Setup,
    assert_like_the_simulation,
    assert_weights,
    client_of,
    is_train,
    nodes,
    reference,
    small_model,
)
from lamina.base.errors import BadInput, Diverged
from lamina.flower import Stopped, wire
from lamina.flower.mail import Mail


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


def test_an_exception_in_the_users_data_is_named(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0)
    broken = setup.federation()

    def data(context):
        raise BadInput("no file 'patients.csv'")

    broken.data = data
    grid = setup.grid()
    grid.apps[NODE + 1] = broken.client_app()
    setup.run(grid)
    assert setup.journal[0]["missing"] == [{"client": 1, "node": str(NODE + 1), "why": "no file 'patients.csv'"}]


def test_a_new_node_is_picked_up(tmp_path):
    setup = Setup(tmp_path, "scaffold", participation=1.0, more={"deadline": 0.2})

    def on_send(grid, node, message):
        if is_train(message, 2):
            grid.offline.discard(NODE + 3)
        return message

    grid = setup.grid(on_send)
    grid.offline.add(NODE + 3)
    setup.run(grid)
    assert_weights(setup, reference(setup, absent={(1, 3), (2, 3)}))
    assert setup.journal[0]["missing"] == [{"client": 3, "node": None, "why": "it is not connected"}]
    assert setup.journal[2]["missing"] == []


def test_below_the_quorum_the_round_is_repeated_then_the_run_stops_and_can_resume(tmp_path):
    setup = Setup(tmp_path, "scaffold", participation=1.0, more={"deadline": 0.2, "quorum": 3})
    tries = []

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 0:
            tries.append(node)
        fails = {2: 1, 3: 2}.get(int(message.metadata.group_id or 0), 0)  # of two attempts
        if is_train(message) and client_of(node) in (1, 2) and len(failed[int(message.metadata.group_id)]) < 2 * fails:
            failed[int(message.metadata.group_id)].append(node)
            return None
        return reply

    failed = {number: [] for number in range(1, 6)}
    with pytest.raises(Stopped) as stopped:
        setup.run(setup.grid(on_reply=on_reply))
    text = str(stopped.value)
    assert "\n" not in text
    assert "round 3: 2 of the 3 updates needed came, 2 times" in text
    assert f"client 1 (node {NODE + 1}): no reply" in text
    assert "the 2 finished rounds are kept" in text
    assert len(tries) == 2
    assert [(e["round"], e["attempt"], e["complete"]) for e in setup.journal] == [
        (1, 1, True), (2, 1, False), (2, 2, True), (3, 1, False), (3, 2, False)
    ]  # fmt: skip
    setup.run()
    assert_like_the_simulation(
        setup, without=("bytes_down", "bytes_up")
    )  # attempts that came to nothing cost bytes, too
    assert [e["round"] for e in setup.journal if e["complete"]] == [1, 2, 3, 4, 5]


def test_attempts_before_the_first_finished_round_are_recorded_too(tmp_path):
    setup = Setup(tmp_path, "scaffold", participation=1.0, rounds=2, more={"deadline": 0.2, "quorum": 1.0})
    lost = []

    def on_reply(grid, node, message, reply):
        if is_train(message, 1) and not lost:
            lost.append(node)
            return None
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert [(e["round"], e["attempt"], e["complete"]) for e in setup.journal] == [
        (1, 1, False), (1, 2, True), (2, 1, True)
    ]  # fmt: skip
    assert_weights(setup, reference(setup))


def test_a_run_whose_test_loss_is_infinite_has_ended(tmp_path):
    too_large = 3.4e38 * torch.sign(small_model()[0].weight.detach())  # its products with the weights overflow
    setup = Setup(tmp_path, "fedavg", more={"test": lambda: (too_large, torch.arange(8) % 3)})
    for _ in range(2):  # and is not taken up again
        with pytest.raises(Diverged, match="round 1: the test loss of the new model is"):
            setup.run()
    assert len(setup.rows) == 1


def test_nobody_there_is_one_clear_line(tmp_path):
    setup = Setup(tmp_path, more={"deadline": 0.05, "attempts": 1})
    grid = setup.grid()
    grid.offline.update(grid.contexts)
    with pytest.raises(
        Stopped, match=r"round 1: 0 of the 2 updates needed came, 1 times \(client \d: it is not connected"
    ):
        setup.run(grid)
    (attempt,) = setup.journal
    assert (attempt["complete"], len(attempt["missing"])) == (False, 3)
    setup.run()  # the folder stands in nobody's way
    assert_like_the_simulation(setup)


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


def test_below_the_quorum_after_mimes_first_exchange_nobody_trains(tmp_path):
    setup = Setup(tmp_path, MIME, rounds=1, participation=1.0, more={"deadline": 0.2, "attempts": 1, "quorum": 3})

    def on_send(grid, node, message):
        return None if client_of(node) > 1 and message.metadata.message_type == "train.gradient" else message

    grid = setup.grid(on_send)
    with pytest.raises(Stopped, match="0 of the 3 updates needed came"):
        setup.run(grid)
    assert not any(is_train(message) for _, message in grid.seen)


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


def test_what_has_no_time_left_is_not_sent():
    grid = LoopGrid(lambda message, context: message, nodes(1), least=10.0)
    mail = Mail(grid)
    content = wire.content_of({"question": {"who": True}})
    assert mail.send(NODE, content, "query", "", -0.5) == (None, "no time was left to send it a message")
    assert grid.seen == []
    sent, why = mail.send(NODE, content, "query", "", 1.0)
    assert (sent, why.startswith("the message could not be sent (Expired")) == (None, True)


def test_a_late_node_is_called_late_and_the_advice_is_the_deadline(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"deadline": 0.2, "attempts": 2})
    slow = lambda node, message: 60.0 if is_train(message) else 0.0  # noqa: E731
    with pytest.raises(Stopped) as stopped:
        setup.run(setup.grid(delay=slow))
    text = str(stopped.value)
    assert "expired" not in text
    assert "no reply within 0.2 s" in text
    assert "raise deadline (now 0.2 s)" in text
    assert "lower quorum" not in text
    assert [entry["attempt"] for entry in setup.journal] == [1, 2]


def test_who_is_waited_for_is_said_while_it_is_waited(tmp_path, monkeypatch):
    monkeypatch.setattr("lamina.flower.roster.FIRST_LINE_S", 0.05)
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"deadline": 0.4, "attempts": 1})
    grid = setup.grid(delay=lambda node, message: 0.2 if is_train(message) else 0)
    grid.offline.update((NODE + 2, NODE + 3))
    setup.run(grid)
    log = (setup.out / "log.txt").read_text()
    assert "WARNING waiting for clients 2, 3 to connect (deadline: 0.4 s)" in log

    other = Setup(tmp_path / "other", "fedavg", participation=1.0, rounds=1, more={"deadline": 5.0})
    other.run(other.grid(delay=lambda node, message: 0.2 if is_train(message) and node == NODE + 1 else 0))
    log = (other.out / "log.txt").read_text()  # on a slow machine it may be waiting for others, too
    assert re.search(r"WARNING waiting for clients? (0, )?1(, 2)?(, 3)? to answer \(deadline: 5 s\)", log), log


def test_nobody_waits_for_a_client_without_a_listed_node(tmp_path):
    listed = {NODE + i: i for i in range(3)}
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more={"deadline": 30.0, "nodes": listed})
    setup.run()
    assert max(row["seconds"] for row in setup.rows) < 10
    assert setup.journal[0]["missing"] == [{"client": 3, "node": None, "why": "no node is listed for it"}]
    assert "WARNING no node is listed for client 3: it takes no part" in (setup.out / "log.txt").read_text()
