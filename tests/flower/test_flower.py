"""The Flower adapter in one process: the same numbers as a simulation, whatever nodes and networks do."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import lamina
from flower_grid import Expired, LoopGrid, error_reply, over_the_wire, signed
from flower_setup import (
    MIME,
    NODE,
    PARTS,
    Setup,
    altered,
    assert_like_the_simulation,
    assert_same_run,
    assert_weights,
    change,
    client_of,
    is_train,
    nodes,
    other_weights,
    part_of,
    reference,
    small_model,
    the_data,
)
from lamina.algorithms.contract import Displacement
from lamina.clients import Clients
from lamina.errors import BadInput, Diverged
from lamina.experiment import build as building
from lamina.experiment.config import parse
from lamina.experiment.records import read_record
from lamina.flower import Federation, Limits, Stopped, checks, outliers, wire
from lamina.flower.federation import read_nodes
from lamina.flower.mail import Mail
from lamina.flower.records import Journal
from lamina.plan import Plan
from lamina.protocol import Protocol
from lamina.report import build as report

# --- the same numbers as a simulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(lamina.algorithms.registry()))
def test_a_federation_is_its_simulation(algorithm, tmp_path):
    setup = Setup(tmp_path, algorithm)
    setup.run()
    assert_like_the_simulation(setup)


@pytest.mark.parametrize(
    "given",
    [
        {"weighting": "examples"},
        {"schedule": "exponential", "clip": 0.5},
        {"local_steps": 7},
        {"sampling": "bernoulli", "participation": 0.5},
        {"seed": 2**70 + 1},
        {"batch_size": 1000},
        {"batch_size": None},
    ],
    ids=str,
)
def test_every_setting_of_the_protocol_reaches_the_nodes(given, tmp_path):
    setup = Setup(tmp_path, "scaffold", **given)
    setup.run()
    assert_like_the_simulation(setup)


def test_the_servers_weights_count_not_the_nodes(tmp_path):
    setup = Setup(tmp_path, "fedlada", node_model=other_weights)
    setup.run()
    assert_like_the_simulation(setup)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_dropout_and_augmentation_follow_the_plan(tmp_path, engine):
    def images(context=None):
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(0, 256, (40, 1, 6, 6), generator=generator, dtype=torch.uint8)
        y = torch.arange(40) % 3
        own = slice(None) if context is None else slice(20 * (i := context.node_config["partition-id"]), 20 * (i + 1))
        return x[own], y[own]

    def model():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    protocol = {"batch_size": 8, "augmentation": lamina.data.feed.Augment(2), "seed": 1, "device": "cpu"}
    parts = [list(range(20)), list(range(20, 40))]
    simulation = lamina.Simulation(model(), images(), "fedams", clients=parts, engine=engine, **protocol)
    simulation.run(3)
    federation = Federation("fedams", model, images, clients=2, rounds=3, out=tmp_path / "run", poll=0.005,
                            state_dir=tmp_path / "state", **protocol)  # fmt: skip
    grid = LoopGrid(federation.client_app(), nodes(2))
    federation.server_app()(grid, grid.contexts[NODE])
    rows = list(read_record(tmp_path / "run").history)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert_same_run(rows, weights, simulation.history, simulation.model.state_dict())


def test_batch_norm_statistics_travel_with_the_model(tmp_path):
    setup = Setup(tmp_path, "fedavg", model=lambda: small_model(norm=True), batch_size=16)
    setup.run()
    assert_like_the_simulation(setup)
    assert not torch.equal(setup.weights()["1.running_mean"], torch.zeros(8))


def test_the_original_mime_needs_two_exchanges(tmp_path):
    setup = Setup(tmp_path, lamina.algorithms.create("mime", "mime"), weighting="examples")
    grid = setup.run()
    assert_like_the_simulation(setup, without=("bytes_up",))
    kinds = [message.metadata.message_type for _, message in grid.seen if message.metadata.group_id == "2"]
    assert kinds == ["train.gradient"] * 3 + ["train"] * 3
    # the nodes keep x of the first exchange, so only the gradient travels twice
    second = [set(message.content["down"]) for _, message in grid.seen if is_train(message, 2)]
    assert second == [{"v_hat", "m", "mean_gradient"}] * 3
    simulation = setup.simulation()
    simulation.run(1)
    model = simulation.objective.start.numel() * 4
    assert setup.rows[0]["bytes_up"] == simulation.history[0]["bytes_up"] + 3 * model


def test_an_experiment_file_is_a_federation(tmp_path):
    experiment = parse({
        "data": {"name": "digits", "clients": 5, "partition": {"name": "dirichlet", "alpha": 0.5}},
        "model": {"name": "mlp"}, "algorithm": {"name": "fedlamb", "sync_every": 2},
        "train": {"rounds": 3, "participation": 0.6, "seed": 3}, "run": {"device": "cpu", "engine": "loop"},
    })  # fmt: skip
    simulation = building.build(experiment)
    simulation.run(3)
    federation = Federation.from_experiment(experiment, out=tmp_path / "run", state_dir=tmp_path / "state", poll=0.005)
    grid = LoopGrid(federation.client_app(), nodes(5))
    federation.server_app()(grid, grid.contexts[NODE])
    rows = list(read_record(tmp_path / "run").history)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert_same_run(rows, weights, simulation.history, simulation.model.state_dict())
    config = read_record(tmp_path / "run").config
    assert config["data"]["partition"]["alpha"] == 0.5
    assert (config["run"]["engine"], config["federation"]) == ("flower", {"on": "flower"})


def test_flowers_simulation_can_hand_the_apps_to_its_workers():
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    federation = Federation.from_experiment(parse({"data": {"clients": 3}}))
    cloudpickle.loads(cloudpickle.dumps(federation.client_app()))


def test_a_partition_that_moves_is_refused():
    experiment = parse({"data": {"partition": {"name": "reallocate"}}})
    with pytest.raises(BadInput, match="'reallocate' gives clients other data in every round"):
        Federation.from_experiment(experiment)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch_size=st.none() | st.integers(1, 40),
    epochs=st.none() | st.integers(1, 3),
    local_steps=st.none() | st.integers(1, 9),
    seed=st.integers(-(2**70), 2**70),
    number=st.integers(1, 1000),
)
def test_a_client_that_knows_only_itself_plans_the_same_batches(sizes, batch_size, epochs, local_steps, seed, number):
    bounds = np.cumsum([0, *sizes])
    parts = [np.arange(a, b)[::-1] for a, b in itertools.pairwise(bounds)]
    epochs = None if local_steps else epochs
    settings = {"lr": 0.1, "batch_size": batch_size, "epochs": epochs, "local_steps": local_steps, "seed": seed}
    whole = Plan(Clients(parts, int(bounds[-1])), Protocol(**settings)).round(number)
    alone = Plan(Clients.elsewhere(len(sizes)), Protocol(**settings))
    for client, part in enumerate(parts):
        own = alone.round_of(number, np.array([client]), [np.arange(len(part))])
        assert own.steps[0] == whole.steps[client]
        assert own.streams[0] == whole.streams[client]
        for k in range(own.steps[0]):
            assert (part[own.batch(0, k)] == whole.batch(client, k)).all()
            assert (own.augment_keys(0, k) == whole.augment_keys(client, k)).all()


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fedlamb", "mimelamb"])
def test_lazy_synchronisation_saves_bytes_on_the_real_wire(algorithm, tmp_path):
    rounds = 7
    lazy = Setup(tmp_path / "lazy", lamina.algorithms.create(algorithm, sync_every=3), rounds=rounds)
    eager = Setup(tmp_path / "eager", algorithm, rounds=rounds)
    grid = lazy.run()
    eager.run()
    assert_like_the_simulation(lazy)  # bytes_down and bytes_up of every round are the ledger's
    assert sum(row["bytes_down"] for row in lazy.rows) < sum(row["bytes_down"] for row in eager.rows)
    sent = 0
    for _, message in grid.seen:
        sent += sum(len(array.data) for array in message.content.get("down", {}).values())
    assert sent == sum(row["bytes_down"] for row in lazy.rows)
    # a client that was absent when v_hat changed is sent it when it comes back; the others are not
    fields = {(message.metadata.group_id, client_of(node)): set(message.content["down"])
              for node, message in grid.seen if is_train(message)}  # fmt: skip
    held = {}
    for (number, client), names in fields.items():
        version = (int(number) - 1) // 3
        assert ("v_hat" in names) == (held.get(client) != version), (number, client)
        held[client] = version


def test_whole_messages_are_little_more_than_their_arrays(tmp_path):
    setup = Setup(tmp_path)
    setup.run()
    for row in setup.rows:
        assert 0 < row["wire_bytes_down"] - row["bytes_down"] < 4 * 1500
        assert 0 < row["wire_bytes_up"] - row["bytes_up"] < 4 * 1500


def test_counted_message_sizes_are_flowers():
    content = wire.content_of(
        {"up": {"delta": wire.encode(torch.randn(1000))}, "figures": {"examples": 3, "loss": 1.0}}
    )
    assert abs(wire.wire_bytes(content) - wire.recorddict_to_proto(content).ByteSize()) < 16


# --- faults ----------------------------------------------------------------------------------------------------------


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
def test_a_restarted_node_goes_on(algorithm, tmp_path):
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
    assert setup.journal[2]["notes"] == [f"client 1 (node {NODE + 1}) has lost its client state and begins anew"]
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


def test_late_double_and_foreign_replies_are_ignored_and_noted(tmp_path):
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
    assert any("client 1" in note and "too late (train of round 2)" in note for note in third), third
    assert any("client 0" in note and "answered twice" in note for note in third), third
    assert any(f"node {NODE + 2} replied to a message to client 3" in note for note in fourth), fourth
    assert any("was not sent" in note for note in fourth), fourth
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


def test_below_the_quorum_the_round_is_repeated_then_the_run_stops_and_can_go_on(tmp_path):
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
        Stopped, match=r"round 1: 0 of the 2 updates needed came, 1 times \(client 1: it is not connected"
    ):
        setup.run(grid)
    (attempt,) = setup.journal
    assert (attempt["complete"], len(attempt["missing"])) == (False, 3)
    setup.run()  # the folder stands in nobody's way
    assert_like_the_simulation(setup)


# --- deadlines -------------------------------------------------------------------------------------------------------


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
    mail = Mail(grid, str)
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
    monkeypatch.setattr("lamina.flower.exchange.FIRST_LINE_S", 0.05)
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


# --- the server is restarted -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(params=["scaffold", "lazy fedlamb", "mime"])
def restartable(request, tmp_path):
    algorithm = {
        "scaffold": "scaffold",
        "lazy fedlamb": lamina.algorithms.create("fedlamb", sync_every=2),
        "mime": lamina.algorithms.create("mime", "mime"),
    }[request.param]
    setup = Setup(tmp_path / "killed", algorithm, rounds=6)
    undisturbed = Setup(tmp_path / "undisturbed", algorithm, rounds=6)
    undisturbed.run()
    yield setup
    assert [e["round"] for e in setup.journal] == [1, 2, 3, 4, 5, 6]
    expected = undisturbed.weights()
    assert all(torch.equal(value, expected[name]) for name, value in setup.weights().items())
    for row, other in zip(setup.rows, undisturbed.rows, strict=True):
        for name in row.keys() - {
            "seconds",
            "evaluation_seconds",
            "wire_bytes_down",
            "wire_bytes_up",
            *setup.other_columns,
        }:
            assert row[name] == other[name], (row["round"], name)


def test_a_killed_server_goes_on_in_the_middle_of_a_round(restartable):
    def on_send(grid, node, message):
        if is_train(message, 4) and len([1 for _, m in grid.seen if is_train(m, 4)]) == 2:
            raise Killed
        return message

    with pytest.raises(Killed):
        restartable.run(restartable.grid(on_send))
    assert len(restartable.rows) == 3
    restartable.run()


def test_the_server_knows_the_sum_of_a_clients_changes_after_a_restart(tmp_path):
    """They are the client's control variate, which it keeps to itself."""
    setup = Setup(tmp_path, "scaffold", participation=1.0, rounds=4)

    def on_send(grid, node, message):
        if is_train(message, 3):
            raise Killed
        return message

    with pytest.raises(Killed):
        setup.run(setup.grid(on_send))
    setup.run()
    simulation = setup.simulation()
    simulation.run(setup.rounds)
    clients = simulation.state.clients
    (file,) = (setup.out / "checkpoints").glob("clients-000004-*.safetensors")
    totals = load_file(file)
    assert totals.keys() == {f"{client}/delta_c" for client in clients}
    for client, record in clients.items():
        torch.testing.assert_close(totals[f"{client}/delta_c"], record.c, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("moment", ["after the row", "after the attendance"])
def test_a_server_killed_between_two_writes_never_mixes_rounds(restartable, moment, monkeypatch):
    from lamina.experiment.folder import RunFolder
    from lamina.storage.checkpoint import Checkpoints

    with monkeypatch.context() as patch:
        cls, method = {"after the row": (Checkpoints, "save"), "after the attendance": (RunFolder, "record")}[moment]
        whole = getattr(cls, method)

        def dies(self, *args):
            state = args[0] if method == "save" else args[1].state
            if state.round == 4:
                raise Killed
            return whole(self, *args)

        patch.setattr(cls, method, dies)
        with pytest.raises(Killed):
            restartable.run()
    assert len(restartable.journal) == 4
    restartable.run()


def test_a_damaged_newest_checkpoint_costs_one_round(restartable):
    def on_send(grid, node, message):
        if is_train(message, 5) and len([1 for _, m in grid.seen if is_train(m, 5)]) == 3:
            raise Killed  # two nodes have trained round 5, and tidied up
        return message

    with pytest.raises(Killed):
        restartable.run(restartable.grid(on_send))
    (newest,) = (restartable.out / "checkpoints").glob("round-000004.json")
    newest.write_text("{}")
    restartable.run()  # from round 3: the nodes still have the states of that time, if not the cached fields
    restartable.other_columns = {"bytes_down"} if restartable.algorithm.down_versions(1) else set()


def test_other_nodes_after_a_restart_take_over_where_the_old_ones_have_gone(restartable):
    """Flower's simulation draws node ids anew in every run; the nodes' disks are the same."""

    def on_send(grid, node, message):
        if is_train(message, 4):
            raise Killed
        return message

    with pytest.raises(Killed):
        restartable.run(restartable.grid(on_send))
    grid = restartable.grid(configs={77 + i: {"partition-id": i} for i in range(4)})
    restartable.run(grid)
    assert f"client 0 was node {NODE}, which has gone, and is node 77 now" in restartable.journal[3]["notes"]


def test_a_finished_run_is_left_alone(tmp_path):
    setup = Setup(tmp_path, "fedavg")
    setup.run()
    grid = setup.run()
    assert grid.seen == []
    setup.rounds = 7
    setup.run()
    assert_like_the_simulation(setup)


def test_another_run_in_the_folder_is_refused(tmp_path):
    Setup(tmp_path, "fedavg").run()
    with pytest.raises(BadInput, match="holds another run"):
        Setup(tmp_path, "scaffold").run()


def test_nodes_keep_only_the_states_the_server_may_ask_for(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=8, participation=1.0)
    setup.run()
    for client in range(4):
        kept = sorted(path.name.split("-")[1] for path in (tmp_path / "state").glob(f"*/client-{client}/state-*"))
        assert kept == ["000006", "000007", "000008"]


def test_a_node_that_is_always_refused_keeps_no_more_states_than_others(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=8, participation=1.0)

    def on_reply(grid, node, message, reply):
        bad = is_train(message) and client_of(node) == 1 and not is_train(message, 1)
        spoil = with_delta(lambda d: put(d, float("nan")))
        return Message(spoil(reply.content), reply_to=message) if bad else reply

    setup.run(setup.grid(on_reply=on_reply))
    kept = sorted(path.name.split("-")[1] for path in (tmp_path / "state").glob("*/client-1/state-*"))
    assert kept == ["000001", "000008"]  # what the server goes on from, and the last that may be it


def test_a_nodes_state_is_for_its_owner_alone(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=1, participation=1.0)
    setup.run()
    folders = [tmp_path / "state", *(path for path in (tmp_path / "state").rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


# --- bad updates -----------------------------------------------------------------------------------------------------


def with_delta(make):
    def spoil(content):
        delta = torch.frombuffer(bytearray(content["up"]["delta"].data), dtype=torch.float32)
        return change(content, "up", delta=make(delta))

    return spoil


def put(delta, value):
    delta = delta.clone()
    delta[3] = value
    return wire.encode(delta)


def extra_record(content):
    made = RecordDict(dict(content.items()))
    made["more"] = ConfigRecord({"text": "hello"})
    return made


def without(name):
    return lambda content: RecordDict({key: value for key, value in content.items() if key != name})


HOSTILE_PICKLE = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (83,), }" + b" " * 58 + b"\ncos\n"
)

BAD = {
    "a NaN": (with_delta(lambda d: put(d, float("nan"))), "'delta' holds a NaN or an infinity"),
    "an infinity": (with_delta(lambda d: put(d, float("inf"))), "'delta' holds a NaN or an infinity"),
    "a shape": (with_delta(lambda d: wire.encode(d[:-1])), "'delta' has shape [82], not [83]"),
    "a dtype": (with_delta(lambda d: wire.encode(d.double())), "'delta' is float64, not float32"),
    "too few bytes": (
        with_delta(lambda d: Array("float32", (83,), wire.RAW, b"123")),
        "'delta' holds 3 bytes, not 332",
    ),
    "a lying shape": (
        with_delta(lambda d: Array("float32", (2**31 - 1, 2**31 - 1), wire.RAW, b"")),
        "'delta' has shape",
    ),
    "a pickle": (
        with_delta(lambda d: Array("object", (83,), "numpy.ndarray", HOSTILE_PICKLE)),
        "'delta' is encoded as 'numpy.ndarray'",
    ),
    "a missing field": (lambda c: change(c, "up", delta_c=None), "the field 'delta_c' is missing"),
    "an extra field": (
        lambda c: change(c, "up", more=wire.encode(torch.zeros(3))),
        "it has an unknown field 'more' in 'up'",
    ),
    "an extra record": (extra_record, "it has an unknown record 'more'"),
    "no arrays": (without("up"), "the record 'up' is missing"),
    "no figures": (without("figures"), "the record 'figures' is missing"),
    "nothing": (lambda c: RecordDict(), "the record 'up' is missing"),
    "the wrong kind of record": (
        lambda c: RecordDict({"up": ConfigRecord({"delta": 1}), "figures": c["figures"]}),
        "the record 'up' is missing",
    ),
    "buffers of no model": (
        lambda c: change(c, "buffers", mean=wire.encode(torch.zeros(3))),
        "it has an unknown field 'mean' in 'buffers'",
    ),
    "too large": (
        lambda c: change(c, "up", delta=Array("float32", (83,), wire.RAW, bytes(10**6))),
        "bytes, and the model explains",
    ),
    "a long text": (
        lambda c: change(c, "figures", **{"x" * 10**6: 1.0}),
        "bytes, and the model explains",
    ),
    "no examples": (lambda c: change(c, "figures", examples=0, steps=0), "says 0 examples"),
    "negative examples": (lambda c: change(c, "figures", examples=-5), "says -5 examples"),
    "absurdly many examples": (lambda c: change(c, "figures", examples=10**12, steps=10**12), "1000000000000 examples"),
    "examples as a text": (lambda c: change(c, "figures", examples=[1, 2]), "says [1, 2] examples"),
    "half an example": (lambda c: change(c, "figures", examples=0.5), "says 0.5 examples"),
    "a wrong number of steps": (lambda c: change(c, "figures", steps=1), "says 1 local steps, but 25 examples make 8"),
    "an infinite loss": (lambda c: change(c, "figures", loss=float("inf")), "its training loss is inf"),
    "no loss": (lambda c: change(c, "figures", loss=None), "its figures are not examples, steps and loss"),
    "an absurd norm": (
        with_delta(lambda d: wire.encode(d * 1e6)),
        "'delta_c' contradicts the other fields",
    ),
    "an absurd loss": (lambda c: change(c, "figures", loss=1.7e308), "its training loss is 1.7e+308"),
    "an absurd other field": (
        lambda c: change(c, "up", delta_c=wire.encode(torch.full((83,), 1e30))),
        "'delta_c' contradicts the other fields",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_refused_and_the_round_goes_on(kind, tmp_path):
    spoil, why = BAD[kind]
    setup = Setup(tmp_path, "scaffold", participation=1.0, rounds=3)

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            return Message(spoil(reply.content), reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    (refused,) = setup.journal[1]["refused"]
    assert (refused["client"], refused["node"]) == (1, str(NODE + 1))
    assert why in refused["why"]
    assert (setup.rows[1]["clients"], setup.rows[1]["refused"]) == (3, 1)
    assert f"client 1 (node {NODE + 1}): refused: " in (setup.out / "log.txt").read_text()
    assert_weights(setup, reference(setup, absent={(2, 1)}))  # the mean of the good ones, and no state run ahead


def test_negative_second_moments_are_refused(tmp_path):
    setup = Setup(tmp_path, "fedlada", participation=1.0, rounds=3)

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            return Message(change(reply.content, "up", v_hat=wire.encode(torch.full((83,), -1.0))), reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert "'v_hat' has negative entries" in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


@pytest.mark.parametrize(
    ("buffer", "value", "why"),
    [
        ("1.running_var", -1.0, "negative entries"),
        ("1.running_mean", float("nan"), "NaN"),
        ("1.running_mean", 1e30, "the buffer '1.running_mean' has entries more than 12.5 times as far"),
    ],
)
def test_bad_buffers_are_refused(buffer, value, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", model=lambda: small_model(norm=True), batch_size=16, participation=1.0, rounds=3)

    def on_reply(grid, node, message, reply):
        if is_train(message, 2) and client_of(node) == 1:
            spoiled = change(reply.content, "buffers", **{buffer: wire.encode(torch.full((8,), value))})
            return Message(spoiled, reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert why in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_bad_gradient_keeps_a_client_out_of_mimes_round(value, tmp_path):
    setup = Setup(tmp_path, lamina.algorithms.create("mime", "mime"), participation=1.0, rounds=3)

    def on_reply(grid, node, message, reply):
        if message.metadata.message_type == "train.gradient" and message.metadata.group_id == "2" and node == NODE + 1:
            return Message(
                change(reply.content, "up", gradient=wire.encode(torch.full((83,), value))), reply_to=message
            )
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert "'gradient' h" in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


def test_large_updates_can_be_scaled_down(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"limits": Limits(0.01, "clip")})
    deltas = []

    def on_reply(grid, node, message, reply):
        if is_train(message):
            deltas.append(torch.frombuffer(bytearray(reply.content["up"]["delta"].data), dtype=torch.float32))
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert all(delta.norm() > 0.01 for delta in deltas)
    mean = sum(0.01 * delta / delta.norm() for delta in deltas) / 4
    start = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    end = torch.cat([setup.weights()[n].flatten() for n, _ in small_model().named_parameters()])
    torch.testing.assert_close(end - start, mean, rtol=1e-3, atol=1e-6)
    assert all("scaled down to the limit" in note for note in setup.journal[0]["notes"])


def test_large_updates_can_be_refused(tmp_path):
    setup = Setup(tmp_path, "scaffold", participation=1.0, more={"limits": Limits({"delta_c": 1e-6}), "attempts": 1})
    with pytest.raises(Stopped, match="'delta_c' has norm"):
        setup.run()


def test_a_diverging_node_stops_nobody_else(tmp_path):
    """A node whose own training went wrong sends NaN, is refused, and goes on from its last good state."""
    setup = Setup(tmp_path, "scaffold", participation=1.0)
    broken = setup.federation()
    broken.data = lambda context: (part_of(context)[0] * 1e30, part_of(context)[1])
    good = setup.client_app()

    def on_send(grid, node, message):
        grid.apps[NODE + 1] = broken.client_app() if is_train(message, 3) else good
        return message

    setup.run(setup.grid(on_send))
    assert setup.journal[2]["refused"][0]["client"] == 1
    assert_weights(setup, reference(setup, absent={(3, 1)}))


def scramble(random, content):
    """A reply with a few things wrong at random."""
    values = [0, -1, 3.5, float("nan"), 2**62, [1, 2], [0.5], "text", b"bytes", True, [True], ["a"]]
    pick = lambda options: options[random.integers(len(options))]  # noqa: E731
    made = RecordDict(dict(content.items()))
    for _ in range(random.integers(1, 4)):
        record, key = (
            pick(["up", "figures", "buffers", "problem", "odd"]),
            pick(["delta", "delta_c", "examples", "loss"]),
        )
        array = Array(pick(["float32", "object", "", "int8"]), pick([(83,), (), (-1,), (2**31 - 1,), (0,)]),
                      pick([wire.RAW, "numpy.ndarray", ""]), pick([b"", bytes(332), HOSTILE_PICKLE]))  # fmt: skip
        try:
            made[record] = pick([ArrayRecord, MetricRecord, ConfigRecord])({key: pick([array, pick(values)])})
        except TypeError:
            made[record] = ArrayRecord({key: array})
    return made


def test_no_reply_makes_the_checks_fail():
    class Up(lamina.algorithms.scaffold.Up):
        pass

    up = Up(torch.ones(83), torch.ones(83))
    sound = wire.content_of({"up": wire.pack(up), "figures": {"examples": 5, "steps": 1, "loss": 0.5}})
    expected = checks.Expected(up, {}, lambda n: 1, Limits(), ("v",))
    gradient = checks.Expected(checks.FullGradient(up.delta), {}, None, Limits())
    assert checks.read_update(sound, expected).examples == 5
    random, refused = np.random.default_rng(0), 0
    for _ in range(500):
        content = scramble(random, sound)
        for read in (
            lambda c: checks.read_update(c, expected),
            lambda c: checks.read_update(c, gradient),
            lambda c: checks.read_evaluation(c, Limits()),
            checks.read_problem,
        ):
            try:
                read(content)
            except checks.Refused:
                refused += 1
    assert refused > 1000


def test_arrays_say_nothing_that_is_believed():
    like = torch.zeros(4)
    assert torch.equal(wire.decode(wire.encode(torch.arange(4.0)), like), torch.arange(4.0))
    assert wire.encode(torch.ones(1)).data == b"\x00\x00\x80\x3f"  # little-endian, nothing around it
    for array in (Array("float32", (4,), "numpy.ndarray", bytes(16)), Array("float32", (4,), wire.RAW, bytes(20))):
        with pytest.raises(wire.Unreadable):
            wire.decode(array, like)


def test_few_answers_have_no_median():
    known = outliers.Broadcast(lamina.Layers({"w": (2,)}), {}, lambda steps: {}, by_examples=False)

    def odd(limits, recent=()):
        sizes = outliers.sizes_of_updates(updates, known)
        earlier = outliers.judge_by_earlier_rounds(sizes, {"'delta' has norm": recent}, limits)
        return outliers.judge_updates(updates, known, limits) | earlier

    updates = {c: checks.Update(Displacement(torch.full((2,), 10.0**c)), {}, 1, 1, 0.0) for c in (0, 9)}
    assert odd(Limits()) == {}
    assert list(odd(Limits(), [1.0, 2.0, 1e9])) == [9]  # then those of the last rounds count
    assert outliers.medians(outliers.sizes_of_updates(updates, known), [0, 9]) == {}  # but not this one
    updates[1] = checks.Update(Displacement(torch.full((2,), 2.0)), {}, 1, 1, 0.0)
    assert list(odd(Limits())) == [9]
    assert list(odd(Limits(), [1e-9])) == [9]  # and only then
    assert odd(Limits(times_median=None)) == {}


def is_gradient(message):
    return message.metadata.message_type == "train.gradient"


@pytest.mark.parametrize(
    ("times", "figures", "why"),
    [
        (5000.0, {"examples": 10_000_000}, "its number of examples is 10000000"),
        (5000.0, {}, "'gradient' has norm"),
        (1.0, {"examples": 10_000_000}, "its number of examples is 10000000, more than 20 times the round's median"),
        (1.0, {"examples": 100}, "says 25 examples, and said 100 when it sent its gradient"),
    ],
)
def test_mimes_first_exchange_is_no_way_around_the_checks(times, figures, why, tmp_path):
    setup = Setup(tmp_path, MIME, rounds=2, participation=1.0, weighting="examples")

    def on_reply(grid, node, message, reply):
        return altered(message, reply, times, **figures) if is_gradient(message) and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    for entry in setup.journal:
        (refused,) = entry["refused"]
        assert refused["client"] == 1
        assert why in refused["why"]
    if figures.get("examples") != 100:  # which is refused only after it was in the mean of the gradients
        assert_weights(setup, reference(setup, absent={(1, 1), (2, 1)}))
    assert setup.rows[-1]["loss"] < 2


def test_a_gradient_may_have_a_limit(tmp_path):
    limits = Limits(max_norm={"gradient": 10.0, "delta": 10.0}, times_median=None)
    setup = Setup(tmp_path, MIME, rounds=2, participation=1.0, more={"limits": limits})

    def on_reply(grid, node, message, reply):
        return altered(message, reply, 9000.0) if is_gradient(message) and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    for entry in setup.journal:
        (refused,) = entry["refused"]
        assert refused["client"] == 1
        assert "over the limit of 10" in refused["why"]
    assert_weights(setup, reference(setup, absent={(1, 1), (2, 1)}))


def test_with_two_answers_the_last_rounds_tell_what_is_absurd(tmp_path):
    """Also after a restart: what is remembered is in the checkpoint."""
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more={"deadline": 0.2, "quorum": 1})
    setup.run()

    def on_send(grid, node, message):
        return None if is_train(message) and client_of(node) > 1 else message

    def on_reply(grid, node, message, reply):
        return altered(message, reply, 1e30) if is_train(message) and client_of(node) == 1 else reply

    setup.rounds = 3
    setup.run(setup.grid(on_send, on_reply))
    (refused,) = setup.journal[2]["refused"]
    assert refused["client"] == 1
    assert "times the median of the last rounds" in refused["why"]
    assert_weights(setup, reference(setup, absent={(3, 1), (3, 2), (3, 3)}))


@pytest.mark.parametrize(
    ("count", "first", "why"),
    [(150_000, 1, "more than 20 times the round's median"), (300, 2, "more than 10 times the 25 when it last")],
)
def test_a_number_of_examples_cannot_buy_the_mean(count, first, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=3, weighting="examples")
    steps = int(setup.federation().protocol.steps(np.array([count]))[0])

    def on_reply(grid, node, message, reply):
        lies = is_train(message) and client_of(node) == 1 and int(message.metadata.group_id) >= first
        return altered(message, reply, 60.0, examples=count, steps=steps) if lies else reply

    setup.run(setup.grid(on_reply=on_reply))
    for entry in setup.journal[first - 1 :]:
        (refused,) = entry["refused"]
        assert (refused["client"], why in refused["why"]) == (1, True), refused
    assert_weights(setup, reference(setup, absent={(number, 1) for number in range(first, 4)}))


@pytest.mark.parametrize("weight", ["own data", "test data"])
def test_an_evaluation_that_claims_too_much_is_not_used(weight, tmp_path):
    more = {"evaluate_on": "nodes"} | ({"node_test": part_of} if weight == "test data" else {})
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more=more)

    def on_reply(grid, node, message, reply):
        lies = message.metadata.message_type == "evaluate" and client_of(node) == 1
        return altered(message, reply, examples=10_000_000, loss=1e20, accuracy=1.0) if lies else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert setup.rows[0]["evaluating_nodes"] == 3
    assert setup.rows[0]["node_loss"] < 10
    (note,) = setup.journal[0]["notes"]
    assert note.startswith(f"evaluation: client 1 (node {NODE + 1}): refused: ")
    assert ("said it trains on 25" in note) == (weight == "own data")


def test_an_evaluation_loss_that_would_overflow_the_mean_is_not_used(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"evaluate_on": "nodes"})

    def on_reply(grid, node, message, reply):
        lies = message.metadata.message_type == "evaluate" and client_of(node) == 1
        return altered(message, reply, loss=1.7e308) if lies else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert "its evaluation loss is 1.7e+308" in setup.journal[0]["notes"][0]
    assert setup.rows[0]["node_loss"] < 10


def test_full_gradients_that_are_not_finite_are_divergence(tmp_path):
    def too_large():
        model = small_model()
        for parameter in model.parameters():
            parameter.data *= 1e25
        return model

    setup = Setup(tmp_path, MIME, model=too_large, participation=1.0)
    grid = setup.grid()
    with pytest.raises(Diverged, match="training went non-finite on 4 clients, on client 0 first in "):
        setup.run(grid)
    assert not any(is_train(message) for _, message in grid.seen)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
@pytest.mark.parametrize("lr", [1e12, 1e30])
def test_divergence_is_called_divergence(algorithm, lr, tmp_path):
    setup = Setup(tmp_path, MIME if algorithm == "mime" else "fedavg", participation=1.0, lr=lr)
    for _ in range(2):  # and the run has ended
        with pytest.raises(
            Diverged, match=r"round \d: training went non-finite on \d clients.*lower the learning rate"
        ):
            setup.run()
    assert (setup.out / "diverged.json").exists()


# --- who is who ------------------------------------------------------------------------------------------------------


def test_a_second_node_with_the_same_number_is_refused_and_named(tmp_path):
    setup = Setup(tmp_path, "scaffold", participation=1.0)
    rogue = NODE + 50
    grid = setup.run(setup.grid(configs={**nodes(), rogue: {"partition-id": 2}}))
    assert_like_the_simulation(setup)
    assert all(e["refused"] == [{"client": None, "node": str(rogue), "why": f"says it is client 2, and that is node "
               f"{NODE + 2}"}] for e in setup.journal)  # fmt: skip
    assert [message.metadata.message_type for node, message in grid.seen if node == rogue] == ["query"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"partition-id": 4}, "says it is client 4, but they are numbered 0 to 3"),
        ({"partition-id": -1}, "says it is client -1"),
        ({}, "this node has no number: start it with --node-config 'partition-id=0'"),
        ({"partition-id": "2"}, "this node has no number"),
    ],
)
def test_a_node_without_a_place_is_named(config, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", rounds=2)
    setup.run(setup.grid(configs={**nodes(), 5: config}))
    assert_like_the_simulation(setup)
    (refused,) = setup.journal[0]["refused"]
    assert refused["node"] == "5"
    assert why in refused["why"]


def test_a_node_whose_configuration_is_corrected_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("lamina.flower.roster.ASK_AGAIN", 0.0)
    configs = nodes()
    del configs[NODE + 3]["partition-id"]
    setup = Setup(tmp_path, "fedavg", rounds=4, participation=1.0, more={"deadline": 0.3})

    def on_send(grid, node, message):
        if is_train(message, 2):
            grid.contexts[NODE + 3].node_config["partition-id"] = 3  # restarted with the same key, so the same id
        return message

    setup.run(setup.grid(on_send, configs=configs))
    assert [len(entry["took_part"]) for entry in setup.journal] == [3, 3, 4, 4]
    assert ["this node has no number" in entry["refused"][0]["why"] for entry in setup.journal[:2]] == [True, True]
    assert setup.journal[2]["refused"] == []


def test_a_node_that_comes_back_is_asked_again(tmp_path):
    configs = nodes()
    configs[NODE + 3]["partition-id"] = 7
    setup = Setup(tmp_path, "fedavg", rounds=4, participation=1.0, more={"deadline": 0.3})

    def on_send(grid, node, message):
        if is_train(message, 2):
            grid.offline.add(NODE + 3)
        if is_train(message, 3) and NODE + 3 in grid.offline:
            grid.offline.discard(NODE + 3)
            grid.contexts[NODE + 3].node_config["partition-id"] = 3
        return message

    setup.run(setup.grid(on_send, configs=configs))
    assert [len(entry["took_part"]) for entry in setup.journal] == [3, 3, 3, 4]


def test_no_two_messages_are_the_same(tmp_path):
    """Flower's message ids are hashes of what a message holds: nobody may be able to compute another node's."""
    setup = Setup(tmp_path, MIME, rounds=2, more={"evaluate_on": "both"})
    grid = setup.run()
    tokens = {}
    for node, message in grid.seen:
        record = message.content["question" if message.metadata.message_type == "query" else "task"]
        tokens.setdefault((message.metadata.message_type, record["token"]), set()).add(node)
        assert len(record["token"]) == 16
    assert all(len(owners) == 1 for (kind, _), owners in tokens.items()), tokens


def test_a_node_that_is_another_client_by_its_own_configuration_says_so(tmp_path):
    listed = {NODE + i: i for i in range(4)}
    configs = {**nodes(), NODE + 1: {"partition-id": 2}}
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"nodes": listed})
    setup.run(setup.grid(configs=configs))
    (missing,) = setup.journal[0]["missing"]
    assert missing["client"] == 1
    assert "is client 1 for the server, and its own partition-id is 2" in missing["why"]


def test_only_listed_nodes_take_part(tmp_path):
    """The list decides, not what a node says of itself."""
    configs = {NODE + i: {"partition-id": i} for i in range(4)}
    listed = {NODE + i: i for i in range(4)}
    setup = Setup(tmp_path, "scaffold", more={"nodes": listed})
    liar = {"partition-id": 0}
    grid = setup.run(setup.grid(configs={99: liar, **configs}))
    assert_like_the_simulation(setup)
    assert setup.journal[0]["refused"] == [
        {"client": None, "node": "99", "why": "it is not on the server's list of nodes"}
    ]
    assert not any(node == 99 or message.metadata.message_type == "query" for node, message in grid.seen)


def test_a_silent_stranger_holds_nobody_up(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"deadline": 30.0})

    def on_send(grid, node, message):
        return None if node == 99 else message

    setup.run(setup.grid(on_send, configs={**nodes(), 99: {"partition-id": 1}}))
    assert_like_the_simulation(setup)
    assert max(row["seconds"] for row in setup.rows) < 5


def test_a_list_of_nodes_may_be_a_file(tmp_path):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({str(2**63 + 5): 1, "7": 0}))
    assert read_nodes(str(path), 2) == {2**63 + 5: 1, 7: 0}
    for text, why in (
        ('{"7": 2}', "numbered 0 to 1"),
        ('{"7": 0, "8": 0}', "two nodes are the same client"),
        ("[1]", "must be a table"),
        ("{", "not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=why):
            read_nodes(path, 2)
    with pytest.raises(BadInput, match="cannot read the list of nodes"):
        read_nodes(tmp_path / "none.json", 2)


def test_another_model_or_algorithm_on_a_node_is_said_in_words(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0)
    grid = setup.grid()
    grid.apps[NODE + 1] = Setup(tmp_path, "scaffold").client_app()
    grid.apps[NODE + 2] = setup.federation(
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    ).client_app()
    setup.run(grid)
    assert [e["client"] for e in setup.journal[0]["missing"]] == [1, 2]
    assert "run the same app on both sides" in setup.journal[0]["missing"][0]["why"]


def test_frozen_weights_must_be_the_same_on_both_sides(tmp_path):
    def frozen(value):
        def make():
            model = small_model()
            nn.init.constant_(model[0].weight, value).requires_grad_(False)
            return model

        return make

    Setup(tmp_path / "same", "fedavg", model=frozen(0.1)).run()
    other = Setup(tmp_path / "other", "fedavg", model=frozen(0.1), node_model=frozen(0.2), more={"attempts": 1})
    with pytest.raises(Stopped, match="frozen weights are not this node's"):
        other.run()


# --- evaluation and records ------------------------------------------------------------------------------------------


def test_evaluation_on_nodes_is_weighted_by_examples(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"evaluate_on": "both"})
    setup.run()
    x, y = the_data()
    held = [i for part in PARTS for i in part]
    model = setup.simulation()
    model.run(5)
    whole = lamina.metrics.evaluate(
        model.objective, model.state.server.x, model.state.buffers, lamina.data.dataset.as_dataset((x[held], y[held]))
    )
    last = setup.rows[-1]
    assert last["node_accuracy"] == pytest.approx(whole["accuracy"])
    assert last["node_loss"] == pytest.approx(whole["loss"], rel=1e-6)
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


def test_the_run_folder_is_that_of_a_simulation(tmp_path):
    setup = Setup(tmp_path, "fedlamb")
    setup.run()
    assert {path.name for path in setup.out.iterdir()} >= {
        "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "model.safetensors", "lock",
        "best.safetensors", "federation.jsonl",
    }  # fmt: skip
    made = report.build([setup.out])
    assert [curve.algorithm for curve in made.curves] == ["fedlamb"]
    assert made.tables()
    from lamina.cli.export import table

    assert "wire_bytes_down" in table([read_record(setup.out)]).splitlines()[0]


def test_a_torn_journal_is_mended(tmp_path):
    journal = Journal(tmp_path)
    lines = [{"round": 1, "complete": True}, {"round": 2, "complete": False}, {"round": 2, "complete": True}]
    journal.path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"round": 3, "com')
    journal.cut(1)
    assert journal.path.read_text() == "".join(json.dumps(line) + "\n" for line in lines[:2])


# --- what a user may get wrong ---------------------------------------------------------------------------------------


class Forgetful(lamina.FedAvg):
    """Its finish forgets the client's state."""

    def finish(self, local, down, client, info):
        return super().finish(local, down, client, info)[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": nn.Linear(2, 2)}, "model is a Linear: give a function"),
        ({"data": (1, 2)}, "data is a tuple: give a function"),
        ({"clients": 0}, "clients = 0 is not a whole number >= 1"),
        ({"rounds": 1.5}, "rounds = 1.5 is not a whole number"),
        ({"quorum": 1.5}, "quorum = 1.5 is neither a fraction"),
        ({"quorum": 0}, "quorum = 0 is not a number > 0"),
        ({"quorum": 3}, "quorum = 3 of 2 clients can never answer: give at most 2"),
        ({"deadline": -1}, "deadline = -1 is not a number > 0"),
        ({"evaluate_on": "node"}, "unknown evaluate_on 'node'; did you mean 'nodes'"),
        ({"weighting": "sample"}, "unknown weighting"),
        ({"loss": "hinge"}, "unknown loss"),
        ({"algorithm": "fedlam"}, "did you mean 'fedlamb'"),
        ({"algorithm": Forgetful()}, "breaks the contract: finish must return two things"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_wrong_settings_are_one_clear_line(given, why):
    settings = {"algorithm": "fedlamb", "model": small_model, "data": part_of, "clients": 2, **given}
    with pytest.raises(BadInput, match=why):
        Federation(**settings)


@pytest.mark.parametrize("given", [{"max_norm": -1}, {"on_large": "cut"}, {"times_median": 0}, {"max_examples": 0}])
def test_wrong_limits_are_one_clear_line(given):
    with pytest.raises(BadInput):
        Limits(**given)


@pytest.mark.parametrize(
    ("quorum", "cohort", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (1.0, 3, 3), (2, 5, 2), (9, 3, 3), (0.01, 3, 1)]
)
def test_the_quorum_is_a_fraction_or_a_number(quorum, cohort, needed):
    assert Federation("fedavg", small_model, part_of, clients=9, quorum=quorum).needed(cohort) == needed


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_lamina_does_not_need_flower():
    code = "import sys, lamina; assert not any(m.split('.')[0] == 'flwr' for m in sys.modules)"
    assert python(code).returncode == 0


def test_without_flower_one_line_says_what_to_install():
    code = "import sys; sys.modules['flwr'] = None\ntry: import lamina.flower\nexcept ImportError as e: print(e)"
    assert python(code).stdout == "lamina.flower needs Flower: pip install -e '.[flower]'\n"


def test_another_version_of_flower_is_named():
    code = "import importlib.metadata as m; m.version = lambda _: '9.9'; import lamina.flower"
    said = python(code)
    assert said.returncode == 0
    assert "was tested with Flower 1.41.0, and this is 9.9" in said.stderr


def test_a_nodes_state_folder_comes_from_its_own_configuration(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)
    configs = {node: {**config, "state-dir": str(tmp_path / f"disk{node}")} for node, config in nodes().items()}
    setup.run(setup.grid(configs=configs))
    assert not (tmp_path / "state").exists()
    assert len(list((tmp_path / f"disk{NODE}").rglob("state-*.safetensors"))) == 2


def test_a_server_cannot_make_a_node_write_elsewhere(tmp_path):
    from lamina.flower.store import Store

    for run in ("../../etc", "", "A" * 32):
        with pytest.raises(BadInput, match="not the name of a run"):
            Store(tmp_path, run, 0)
    with pytest.raises(BadInput, match="not the name of a run or an exchange"):
        Store(tmp_path, "0" * 32, 0).load_state("*", MIME.client_init(torch.zeros(1), None))
    with pytest.raises(ValueError, match="format code 'd'"):
        Store(tmp_path, "0" * 32, "0/../../../../elsewhere")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client", "0/../../../../elsewhere"),
        ("client", 4),
        ("client", -1),
        ("client", 1.0),
        ("round", 0),
        ("run", "../../elsewhere"),
        ("token", "*"),
        ("base", "../x"),
        ("keep", ["../x"]),
        ("held", ["../x"]),
        ("held", ["x"]),
        ("held_digests", "x"),
        ("app", ""),
        ("settings", 3),
        ("settings", "[]"),
        ("settings", "{"),
        ("settings", "[" * 5_000),
        ("settings", {"lr": float("nan")}),
        ("settings", {"seed": "1e5"}),
        ("settings", {"batch_size": -1}),
        ("settings", {"local_steps": 2**60}),
        ("settings", {"augmentation": {"pad": 4, "flip": 1}}),
        ("settings", {"augmentation": {"pad": 4}}),
        ("settings", {"another": 1}),
    ],
)
def test_a_task_that_makes_no_sense_is_not_begun(name, value, tmp_path):
    setup = Setup(tmp_path / "here", "scaffold", rounds=1, participation=1.0)

    def on_send(grid, node, message):
        if is_train(message) and client_of(node) == 1:
            task = dict(message.content["task"])
            task[name] = json.dumps({**json.loads(task[name]), **value}) if isinstance(value, dict) else value
            message.content["task"] = ConfigRecord(task)
            signed(message)
        return message

    def on_reply(grid, node, message, reply):
        if is_train(message) and client_of(node) == 1:
            assert reply.content["problem"]["text"].startswith("the server's message ")
        return reply

    setup.run(setup.grid(on_send, on_reply))
    assert [one["client"] for one in setup.journal[0]["took_part"]] == [0, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not list((tmp_path / "here" / "state").glob("*/client-1"))
