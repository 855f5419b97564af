"""Updates that were sent before, and sizes and losses far from the median of the round, are not used."""

import pytest
import torch
from flwr.app import Message, RecordDict

from flower_grid import over_the_wire
from flower_setup import NODE, Setup, altered, assert_weights, client_of, is_train, reference, spoiled
from lamina.algorithms.scaffold import Up
from lamina.flower.checks import Update
from lamina.flower.judge import LEAST_MEDIAN, sizes_of, stand_out
from lamina.training.metrics import Metric, mean


@pytest.mark.parametrize("how", ["the whole reply", "only its arrays"])
def test_an_old_update_is_not_accepted_again(how, tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=4)  # no field that contradicts an old one
    old = {}

    def on_reply(grid, node, message, reply):
        if not is_train(message) or client_of(node) != 1:
            return reply
        if is_train(message, 1):
            old["content"] = over_the_wire(reply).content
        if is_train(message, 3):
            content = RecordDict(dict(old["content"]))
            if how == "only its arrays":
                content["answer"] = reply.content["answer"]
            return Message(content, reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    (refused,) = setup.journal[2]["refused"]
    assert refused["client"] == 1
    why = {"the whole reply": "does not name the task it was sent", "only its arrays": "it has sent before"}[how]
    assert why in refused["why"]
    assert_weights(setup, reference(setup, absent={(3, 1)}))


def test_an_old_update_is_not_accepted_after_a_restart_either(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2)
    old = {}

    def keep(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            old["content"] = over_the_wire(reply).content
        return reply

    def replay(grid, node, message, reply):
        if is_train(message, 3) and client_of(node) == 1:
            content = RecordDict({**old["content"], "answer": reply.content["answer"]})
            return Message(content, reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=keep))
    setup.rounds = 3
    setup.run(setup.grid(on_reply=replay))
    assert "sent before" in setup.journal[2]["refused"][0]["why"]


def test_clients_that_do_not_move_are_not_taken_for_a_replay(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=3, lr=1e-45)
    setup.run()
    assert [len(entry["took_part"]) for entry in setup.journal] == [4, 4, 4]


@pytest.mark.parametrize("loss", [9e29, -9e29, 1e4])
def test_an_absurd_training_loss_is_not_recorded(loss, tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2)
    setup.run(setup.grid(on_reply=spoiled(altered(loss=loss), [2])))
    assert 0 < setup.rows[1]["train_loss"] < 10
    (note,) = setup.journal[1]["notes"]
    assert note.startswith(
        f"client 1 (node {NODE + 1}): its training loss is {loss:.6g}, more than 100 times the round's"
    )
    assert note.endswith(": not recorded")
    assert_weights(setup, reference(setup))  # the update itself is sound


@pytest.mark.parametrize("name", ["loss", "margin"])
def test_an_absurd_evaluation_is_not_recorded(name, tmp_path):
    margin = Metric("margin", mean, keep=lambda batch: (batch.outputs.amax(1),))
    more = {"evaluate_on": "nodes"} | ({} if name == "loss" else {"metrics": [margin]})
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more=more)
    setup.run(setup.grid(on_reply=spoiled(altered(**{name: 9e29}), kind="evaluate")))
    assert setup.rows[0][f"node_{name}"] < 10
    assert f"its evaluation {name} is 9e+29, more than 100 times" in setup.journal[0]["notes"][0]


def test_an_evaluation_that_claims_too_many_labels_is_not_used(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"evaluate_on": "nodes"})
    setup.run(setup.grid(on_reply=spoiled(altered(**{"accuracy/weight": 1000.0}), kind="evaluate")))
    assert "its number of labels of 'accuracy' is 25000, more than 100 times" in setup.journal[0]["notes"][0]
    assert setup.rows[0]["evaluating_nodes"] == 3


def test_a_size_is_compared_with_the_median_of_the_round():
    sizes = {c: 1.0 + c for c in range(9)} | {9: 501.0}
    assert stand_out({"it": sizes}, 100.0) == {}
    sizes[9] += 50
    assert stand_out({"it": sizes}, 100.0) == {
        9: "it is 551, more than 100 times the round's median, 5.5 (limits: times_median)"
    }
    assert stand_out({"it": sizes}, 101.0) == stand_out({"it": sizes}, None) == {}


def test_few_answers_have_no_median():
    assert stand_out({"it": {0: 1.0, 1: 9.0}}, 1.5) == {}
    assert list(stand_out({"it": {0: 1.0, 1: 9.0, 2: 2.0}}, 1.5)) == [1]


def test_a_median_of_zero_refuses_nobody():
    assert stand_out({"it": {0: 0.0, 1: 3.0, 2: 0.0}}, 100.0) == {}


def test_a_client_that_fits_badly_is_not_absurd_where_the_others_fit_perfectly():
    losses = {"its training loss": {0: 1e-9, 1: 1e-9, 2: -5.0}}
    assert stand_out(losses, 100.0, LEAST_MEDIAN) == {}
    assert list(stand_out(losses, 100.0)) == [2]


def test_fields_that_are_not_sent_are_not_measured():
    up = Up(torch.tensor([3.0, 4.0]), None)
    assert sizes_of({7: Update(up, {"b": torch.tensor([2.0])}, 20, 2, 1.0)}) == {
        "the norm of 'delta'": {7: 5.0},
        "the norm of the buffer 'b'": {7: 2.0},
        "its number of examples": {7: 20},
    }
