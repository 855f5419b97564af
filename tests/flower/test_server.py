"""Rounds of the server: quorum, attempts, deadlines, evaluation, and why a run stops."""

from datetime import timedelta

import pytest
import torch
from flwr.app import Message
from torch import nn

import lamina
from flower_grid import error_reply
from flower_setup import (
    MIME,
    NODE,
    PARTS,
    Setup,
    assert_like_the_simulation,
    assert_weights,
    change,
    client_of,
    is_train,
    part_of,
    reference,
    small_model,
    the_data,
)
from lamina.base.errors import Diverged
from lamina.flower import Stopped, keys


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
    assert "2 finished rounds are kept" in text
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
        Stopped, match=r"round 1: 0 of the 2 updates needed came, 1 times \(client \d \(node \d+\): it is not connected"
    ):
        setup.run(grid)
    (attempt,) = setup.journal
    assert (attempt["complete"], len(attempt["missing"])) == (False, 3)
    setup.run()  # the folder stands in nobody's way
    assert_like_the_simulation(setup)


def test_below_the_quorum_after_mimes_first_exchange_nobody_trains(tmp_path):
    setup = Setup(tmp_path, MIME, rounds=1, participation=1.0, more={"deadline": 0.2, "attempts": 1, "quorum": 3})

    def on_send(grid, node, message):
        return None if client_of(node) > 1 and message.metadata.message_type == "train.gradient" else message

    grid = setup.grid(on_send)
    with pytest.raises(Stopped, match="0 of the 3 updates needed came"):
        setup.run(grid)
    assert not any(is_train(message) for _, message in grid.seen)


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


def with_nan(context):
    x, y = part_of(context)
    x[3] = float("nan")
    return x, y


def nan_at_step_two(context):
    """Finite data on which training overflows."""
    x, y = part_of(context)
    return 1e30 * x, y


def a_broken_node(setup, data, **changed):
    """A grid on which the node of client 1 has these data."""
    grid, broken = setup.grid(), setup.federation(**changed)
    broken.data = data
    grid.apps[NODE + 1] = broken.client_app()
    return grid


@pytest.mark.parametrize(
    ("data", "why"),
    [(with_nan, "data: sample 3 of x holds nan; clean or drop it"), (nan_at_step_two, "non-finite")],
)
def test_an_error_that_repeats_is_final_and_the_last_line_names_it(data, why, tmp_path):
    more = {"attempts": 9, "quorum": 1.0, "deadline": 0.5}
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more=more, lr=100.0)
    with pytest.raises(Stopped) as stopped:
        setup.run(a_broken_node(setup, data))
    text = str(stopped.value)
    assert "\n" not in text
    assert f"client 1 (node {NODE + 1}): " in text
    assert why in text
    assert "3 of the 4 updates needed came" in text
    assert "deadline" not in text
    assert "quorum" not in text
    assert [entry["attempt"] for entry in setup.journal] == [1, 2]
    last = (setup.out / "log.txt").read_text().splitlines()[-1]
    assert last.endswith(f"the run stopped: {text}")
    setup.run()  # the node's operator has corrected it
    assert [entry["round"] for entry in setup.journal if entry["complete"]] == [1, 2]


def test_an_error_that_repeats_does_not_stop_a_run_that_has_a_quorum_without_it(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"attempts": 3, "quorum": 3, "deadline": 0.3})
    grid, lost = a_broken_node(setup, with_nan), []

    def on_reply(grid, node, message, reply):
        if is_train(message) and client_of(node) == 2 and len(lost) < 2:
            lost.append(node)
            return None
        return reply

    grid.on_reply = on_reply
    setup.run(grid)
    assert [(entry["attempt"], entry["complete"]) for entry in setup.journal] == [(1, False), (2, False), (3, True)]
    assert [one["client"] for one in setup.journal[-1]["took_part"]] == [0, 2, 3]


def test_a_method_that_needs_all_clients_warns_once_if_one_is_missing(tmp_path, caplog):
    setup = Setup(tmp_path, "scaffnew", participation=1.0, rounds=4, more={"deadline": 0.2, "quorum": 2})

    def on_reply(grid, node, message, reply):
        return None if is_train(message) and message.metadata.group_id in "24" and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    text = "Scaffnew needs all clients in every round: with smaller cohorts it diverges, or converges to a model that"
    assert [m.partition(": ")[0] for m in caplog.messages if text in m] == ["round 2"]
    assert [len(entry["missing"]) for entry in setup.journal] == [0, 1, 0, 1]
    assert ["set quorum = 1.0, " in "".join(entry["notes"]) for entry in setup.journal] == [False, True, False, False]


def test_errors_that_differ_are_tried_again(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"attempts": 3, "quorum": 1.0})
    codes = [2, 8]  # the app raised an exception, the app crashed

    def on_reply(grid, node, message, reply):
        return error_reply(message, codes.pop(0)) if codes and is_train(message) and node == NODE else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert [entry["complete"] for entry in setup.journal] == [False, False, True]


def test_certificates_that_end_soon_are_noted_once_a_day(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(keys, "VALID_FOR", timedelta(days=3, minutes=1))
        made = keys.make_server_keys(tmp_path / "keys")
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more={"signing_key": made.signing_key})
    grid = setup.grid()
    for context in grid.contexts.values():
        context.node_config["server-key"] = str(made.verifying_key)
    setup.run(grid)
    for entry in setup.journal:
        assert "server.pem' ends on " in entry["notes"][0]
    log = (setup.out / "log.txt").read_text()
    assert log.count("in 3 days: renew it on the server") == 1


def test_evaluation_on_nodes_is_weighted_by_examples(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"evaluate_on": "both"})
    setup.run()
    x, y = the_data()
    held = [i for part in PARTS for i in part]
    model = setup.simulation()
    model.run(5)
    with torch.no_grad():
        outputs, targets = model.model(x[held]), y[held]
    last = setup.rows[-1]
    assert last["node_accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).double().mean()))
    assert last["node_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), rel=1e-6)
    assert last["evaluating_nodes"] == 4
    assert_like_the_simulation(setup)


def test_evaluation_on_nodes_alone_and_of_bad_answers(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"evaluate_on": "nodes", "evaluate_every": 2, "node_test": part_of})

    def on_reply(grid, node, message, reply):
        if message.metadata.message_type == "evaluate" and node == NODE:
            return Message(change(reply.content, "figures", accuracy=7.0), reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert [("node_accuracy" in row, "accuracy" in row) for row in setup.rows] == [
        (False, False), (True, False), (False, False), (True, False), (True, False)
    ]  # fmt: skip
    assert setup.rows[1]["evaluating_nodes"] == 3
    assert "its accuracy is 7.0" in setup.journal[1]["notes"][0]
    assert setup.journal[1]["refused"] == []


def test_the_servers_folder_is_loaded_like_that_of_a_run(tmp_path):
    setup = Setup(tmp_path, rounds=2, private=["2.*"])
    setup.run()
    (x, y), simulation = the_data(), setup.simulation()
    simulation.run(2)
    run = lamina.load(setup.out)
    torch.testing.assert_close(run.predict(x).outputs, simulation.model(x))
    assert run.predict(x).probabilities.shape == (len(x), 3)
    assert run.evaluate((x, y))["accuracy"] == pytest.approx(setup.rows[-1]["accuracy"])
    with pytest.raises(lamina.BadInput, match="is a federation, whose clients' parts never leave their nodes"):
        run.client(1)


def test_a_server_that_evaluates_nothing_does_not_know_what_samples_look_like(tmp_path):
    setup = Setup(tmp_path, rounds=1, more={"test": None})
    setup.run()
    with pytest.raises(lamina.BadInput, match=r"no model.json, .*a federation whose server evaluates nothing"):
        lamina.load(setup.out)


def test_the_server_evaluates_all_named_test_sets(tmp_path):
    def named():
        x, y = the_data()
        few = lamina.Dataset(x[:7].flip(0), y[:7].flip(0), classes=3)
        return lamina.Dataset(x, y, classes=3, more_tests={"few": few})

    setup = Setup(tmp_path, rounds=1, more={"test": named})
    setup.run()
    expected = lamina.load(setup.out).evaluate((the_data()[0][:7], the_data()[1][:7]))
    assert setup.rows[-1]["accuracy@few"] == pytest.approx(expected["accuracy"])
    assert setup.rows[-1]["loss@few"] == pytest.approx(expected["loss"])
