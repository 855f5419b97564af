"""The federation under attack: stalled uploads, forged and replayed tasks, old updates, malformed messages, leaks."""

import copy
import itertools
import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as FlowerMessage
from flwr.proto.message_pb2 import Metadata as FlowerMetadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from torch import nn

import lamina
from flower_grid import over_the_wire, signed
from flower_setup import (
    NODE,
    Setup,
    altered,
    assert_like_the_simulation,
    assert_weights,
    client_of,
    is_train,
    nodes,
    reference,
    small_model,
)
from lamina.errors import BadInput
from lamina.flower import Stopped, keys, pull, signing, wire
from lamina.flower.outliers import absurd_losses


def files(folder):
    """Every file under a folder with its content."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def recorded(setup, **options):
    """The train messages of a short run, by node, as they were sent."""
    grid = setup.run(**options)
    sent = {}
    for node, message in grid.seen:
        if is_train(message):
            sent.setdefault(node, []).append(message)
    return grid, sent


def problem(reply):
    text = reply.content["problem"]["text"]
    assert "\n" not in text
    return text


# --- stalled uploads -------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(pull, "PATIENCE_S", 0.05)
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
    assert missing["why"] == "no reply within 1.0 s (it began to send one, and did not complete it)"
    assert len(setup.journal[1]["took_part"]) == 3


def test_a_slow_upload_that_is_completed_in_time_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(pull, "PATIENCE_S", 0.02)
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
    assert len(asked) == len(set(asked))  # never pulled a second time while the first pull is going on


def test_more_stalled_uploads_than_pulls_at_once_block_nobody(monkeypatch):
    monkeypatch.setattr(pull, "PATIENCE_S", 0.05)
    over = threading.Event()

    class Grid:
        def pull_messages(self, message_ids):
            (wanted,) = message_ids
            if wanted.startswith("bad"):
                over.wait(60)
            return [wanted]

    wanted = [f"bad{i}" for i in range(3 * pull.AT_ONCE)] + ["good"]
    puller = pull.Puller(Grid())
    try:
        assert list(puller.look(wanted)) == ["good"]
        assert all(map(puller.is_uploading, wanted[:-1]))
        started = time.monotonic()
        assert puller.look(wanted[:-1]) == {}
        assert time.monotonic() - started < 1  # those that hang are not waited for again
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("pull "))
    finally:
        over.set()


class HttpGrid:
    """As much of Flower's Grid as `take_replies_only` knows: a client that hands out messages of the SuperLink."""

    def __init__(self, *sent):
        messages = [FlowerMessage(metadata=FlowerMetadata(message_id=f"r{i}", reply_to_message_id=about))
                    for i, about in enumerate(sent)]  # fmt: skip
        trees = [ObjectTree(object_id=message.metadata.message_id) for message in messages]
        response = PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)
        self._runtime_client = SimpleNamespace(PullMessages=lambda request: response)

    def pulled(self, *wanted):
        response = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
        trees = [tree.object_id for tree in response.message_object_trees]
        assert trees == [message.metadata.message_id for message in response.messages_list]
        return [message.metadata.reply_to_message_id for message in response.messages_list]


def test_messages_to_the_server_that_are_no_replies_are_not_waited_for():
    """Flower's SuperLink adds them to any pull, and its Grid would wait for their parts before it returns."""
    grid = HttpGrid("m2", "", "m1", "m9", "")
    assert grid.pulled("m1", "m2") == ["m2", "", "m1", "m9", ""]
    pull.Puller(grid)
    assert grid.pulled("m1", "m2") == ["m2", "m1"]
    assert grid.pulled() == []


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


# --- forged and replayed tasks ---------------------------------------------------------------------------------------


def forged_by(make):
    """Messages as a registered node could send them, made of the server's own."""
    return pytest.param(make, id=make.__name__)


def fresh(message):
    """A task of the server's that its node has not had yet."""
    made = over_the_wire(message)
    issued = made.content["task"]["issued"] + 10**9
    made.content["task"] = ConfigRecord({**made.content["task"], "issued": issued, "token": "1" * 16})
    return signed(made)


def without_signature(messages, victim):
    made = fresh(messages[victim][-1])
    del made.content["signature"]
    return made


def with_another_task(messages, victim):
    made = fresh(messages[victim][-1])
    task = dict(made.content["task"])
    made.content["task"] = ConfigRecord({**task, "token": "0" * 16, "base": "", "keep": [], "issued": 2**52})
    return made


def with_another_model(messages, victim):
    made = fresh(messages[victim][-1])
    x = torch.zeros(len(made.content["down"]["x"].data) // 4)
    made.content["down"] = ArrayRecord({**made.content["down"], "x": wire.encode(x)})
    return made


def with_another_type(messages, victim):
    made = fresh(messages[victim][-1])
    made.metadata.message_type = "evaluate"
    return made


def meant_for_another_node(messages, victim):
    other = next(node for node in messages if node != victim)
    made = fresh(messages[other][-1])
    return made


def meant_for_another_node_with_a_new_address(messages, victim):
    made = meant_for_another_node(messages, victim)
    made.metadata.__dict__["_dst_node_id"] = victim
    return made


def of_another_run(messages, victim):
    made = fresh(messages[victim][-1])
    made.metadata.__dict__["_run_id"] = 2
    return signed(made)


def signed_with_another_key(messages, victim):
    made = fresh(messages[victim][-1])
    other = signing.Ed25519PrivateKey.generate()
    made.content["signature"] = ConfigRecord({"ed25519": other.sign(signing._statement(made))})
    return made


def with_a_signature_of_another_kind(messages, victim):
    made = fresh(messages[victim][-1])
    made.content["signature"] = ConfigRecord({"ed25519": "text"})
    return made


def sent_a_second_time(messages, victim):
    return over_the_wire(messages[victim][-1])


def sent_again_after_newer_ones(messages, victim):
    return over_the_wire(messages[victim][0])


@pytest.mark.parametrize(
    "forge",
    [
        forged_by(make)
        for make in (
            without_signature,
            with_another_task,
            with_another_model,
            with_another_type,
            meant_for_another_node,
            meant_for_another_node_with_a_new_address,
            of_another_run,
            signed_with_another_key,
            with_a_signature_of_another_kind,
            sent_a_second_time,
            sent_again_after_newer_ones,
        )
    ],
)
def test_a_task_that_is_not_the_servers_is_refused_and_changes_nothing(forge, tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)
    grid, sent = recorded(setup)
    victim = NODE + 1
    before = files(tmp_path / "state")
    assert any("client-1" in str(path) for path in before)
    reply = setup.client_app()(forge(sent, victim), grid.contexts[victim])
    text = problem(reply)
    assert text.startswith("refused a ")
    assert text.endswith("it is a replay") == forge.__name__.startswith("sent_")
    assert files(tmp_path / "state") == before
    assert "problem" not in setup.client_app()(fresh(sent[victim][-1]), grid.contexts[victim]).content


def test_the_servers_own_next_task_is_accepted_after_all_that(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)

    def on_send(grid, node, message):
        if is_train(message, 2) and client_of(node) == 1:
            forged = over_the_wire(message)
            forged.content["task"] = ConfigRecord({**message.content["task"], "issued": 2**53, "keep": []})
            assert "forged" in problem(grid.apps[node](forged, grid.contexts[node]))
        return message

    setup.run(setup.grid(on_send))
    assert_like_the_simulation(setup)


def test_a_node_without_the_servers_key_refuses_and_says_how_to_get_it(tmp_path):
    configs = {**nodes(), NODE + 1: {**nodes()[NODE + 1], "server-key": ""}}
    setup = Setup(tmp_path, "scaffold", rounds=1, participation=1.0, more={"nodes": {NODE + i: i for i in range(4)}})
    setup.run(setup.grid(configs=configs))
    (missing,) = setup.journal[0]["missing"]
    assert missing["client"] == 1
    assert "no public key of its server" in missing["why"]
    assert "server-key=" in missing["why"]
    assert not list((tmp_path / "state").glob("*/client-1"))


def test_a_server_without_a_key_does_not_start(tmp_path):
    setup = Setup(tmp_path, "fedavg", rounds=1)
    grid = setup.grid()
    for context in grid.contexts.values():
        del context.run_config["signing-key"]
    with pytest.raises(BadInput, match=r"no key to sign tasks with.*`lamina flower keys`"):
        setup.run(grid)
    assert grid.seen == []


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_signing_key_that_others_can_read_is_refused(tmp_path, mode):
    private, public = keys.make_signing_key(tmp_path / "keys")
    assert [path.stat().st_mode & 0o777 for path in (private, public)] == [0o600, 0o644]
    signing.Signer(private)
    private.chmod(mode)
    with pytest.raises(BadInput, match="can be read by others: chmod 600"):
        signing.Signer(private)


def test_keys_that_are_none_are_one_line(tmp_path):
    private, public = keys.make_signing_key(tmp_path / "keys")
    assert signing.is_pair(private, public)
    other = keys.make_signing_key(tmp_path / "other")
    assert not signing.is_pair(private, other[1])
    with pytest.raises(BadInput, match="cannot read the signing key"):
        signing.Signer(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(BadInput, match="is not a signing key"):
        signing.Signer(tmp_path / "text")
    with pytest.raises(BadInput, match="a key is never replaced"):
        keys.make_signing_key(tmp_path / "keys")


def test_a_server_that_goes_back_a_round_is_not_taken_for_a_replay(tmp_path):
    """Its clock may have been set back, too: the last task's number is in the checkpoint."""
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)
    setup.run()
    setup.rounds = 3
    real = time.time_ns
    try:
        time.time_ns = lambda: real() - 10**15
        setup.run()
    finally:
        time.time_ns = real
    assert_like_the_simulation(setup)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"epochs": 10**6}, None),
        ({"local_steps": 10**7, "epochs": None, "batch_size": 10**9}, "local steps of 25 samples"),
        ({"epochs": 10**8}, "local steps of"),
        ({"local_steps": 10**9, "epochs": None}, "local_steps"),
        ({"batch_size": 10**16}, "batch_size"),
        ({"participation": 0.0}, "participation"),
        ({"participation": 2.0}, "participation"),
        ({"clip": -1.0}, "clip"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"lr": 1e300}, "lr = 1e+300 is more than a float32 can hold"),
        ({"augmentation": {"pad": 2000, "flip": True}}, "pad"),
    ],
)
def test_what_a_task_may_ask_for_is_bounded(asked, why, tmp_path, monkeypatch):
    setup = Setup(tmp_path, "fedavg", rounds=1, participation=1.0)
    grid, sent = recorded(setup)
    message = over_the_wire(sent[NODE + 1][0])
    task = {**message.content["task"], "issued": message.content["task"]["issued"] + 10**9}
    settings = {**json.loads(task["settings"]), **{name: value for name, value in asked.items() if name not in task}}
    task |= {name: value for name, value in asked.items() if name in task} | {"settings": json.dumps(settings)}
    message.content["task"] = ConfigRecord(task)
    if why is None:  # as much as a node does; it is not really done here
        monkeypatch.setattr("lamina.flower.node.MAX_SAMPLES_PER_ROUND", 10**7)
        why = "local steps of"
    started = time.monotonic()
    assert why in problem(setup.client_app()(signed(message), grid.contexts[NODE + 1]))
    assert time.monotonic() - started < 5


# --- replies ---------------------------------------------------------------------------------------------------------


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

    def on_reply(grid, node, message, reply):
        return altered(message, reply, loss=loss) if is_train(message, 2) and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert 0 < setup.rows[1]["train_loss"] < 10
    (note,) = setup.journal[1]["notes"]
    assert note == f"client 1 (node {NODE + 1}): its training loss {loss:.3g} is out of all proportion: not recorded"
    assert_weights(setup, reference(setup))  # the update itself is sound


def test_an_absurd_evaluation_loss_is_not_recorded(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"evaluate_on": "nodes"})

    def on_reply(grid, node, message, reply):
        lies = message.metadata.message_type == "evaluate" and client_of(node) == 1
        return altered(message, reply, loss=9e29) if lies else reply

    setup.run(setup.grid(on_reply=on_reply))
    assert setup.rows[0]["node_loss"] < 10
    assert "its evaluation loss 9e+29 is out of all proportion" in setup.journal[0]["notes"][0]


def test_which_losses_are_out_of_all_proportion():
    assert absurd_losses({}, None) == (0.0, [])
    assert absurd_losses({3: 9e29}, None) == (0.0, [])  # nothing to compare it with
    assert absurd_losses({3: 9e29}, 2.0) == (2.0, [3])
    assert absurd_losses({0: 9e29, 3: 2.0}, None) == (2.0, [0])
    assert absurd_losses({0: 1e-9, 1: 1e-9, 2: 5.0}, None)[1] == []  # who has not fitted yet may say so
    assert absurd_losses({0: 1e9, 1: 2e9, 2: 5e9}, 1.0)[1] == []  # squares of large targets


# --- what leaves a node ----------------------------------------------------------------------------------------------

CELL = "Jane Doe 1962-03-04"


def raises_value_error(context):
    return float(CELL), None


def raises_bad_input(context):
    try:
        float(CELL)
    except ValueError as error:
        raise BadInput(f"cannot read the table ({error})") from error


def quotes_in_other_words(context):
    try:
        raise KeyError(f"{CELL}  of\nthe table\x1b[2J")
    except KeyError as error:
        raise BadInput(f"no such column ({error.args[0]}), {' '.join(error.args[0].split())}") from error


def gives_text(context):
    return [[CELL, CELL]], [0]


def gives_a_secret_label(context):
    return torch.randn(3, 6), torch.tensor([0, 1, -19620304])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (raises_value_error, "its app raised ValueError; the node's own log says more"),
        (raises_bad_input, "cannot read the table (ValueError)"),
        (quotes_in_other_words, "no such column (KeyError), KeyError"),
        (gives_text, "x holds text"),
        (gives_a_secret_label, "the label of sample 2 is not one of"),
    ],
)
def test_no_cell_of_a_nodes_data_reaches_the_server(data, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1)
    broken = setup.federation()
    broken.data = data
    grid = setup.grid()
    grid.apps[NODE + 1] = broken.client_app()
    replies = []
    grid.on_reply = lambda grid, node, message, reply: replies.append(str(reply.content)) or reply
    setup.run(grid)
    (missing,) = setup.journal[0]["missing"]
    assert missing["client"] == 1
    assert why in missing["why"]
    sent = " ".join(replies) + json.dumps(setup.journal)
    assert "Jane" not in sent
    assert "19620304" not in sent


class Tokens(nn.Module):
    """Reads tokens; as `broken`, its forward does what the simulation refuses."""

    def __init__(self, broken=""):
        super().__init__()
        self.broken = broken
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        if self.broken == "writes":
            self.head.bias.add_(1)
        if self.broken == "raises":
            raise ValueError(f"cannot read {CELL}")
        return self.head(self.table(tokens).mean(1))


def tokens(most=7, labels=3):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 7, (12, 5), generator=random)
    x[3, 2] = most - 1
    y = torch.randint(0, 3, (12,), generator=random)
    y[5] = labels - 1
    return x, y


@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (Tokens(), (19620304, 3), "hold a token id that has no row in the model: layer 'table' (Embedding) has a "
         "vocabulary of 7 ids, 0 to 6"),
        (Tokens(), (-19620304, 3), "hold a token id that has no row in the model"),
        (Tokens(), (7, 19620304), "outputs have shape (3,) a sample, but the train data have more classes"),
        (Tokens("writes"), (7, 3), "the model's forward pass writes into the parameter 'head.bias'"),
        (Tokens("raises"), (7, 3), "the model cannot take the train data, samples of shape (5,): ValueError"),
    ],
)  # fmt: skip
def test_a_node_refuses_what_a_simulation_refuses(model, data, why, tmp_path, caplog):
    """In one line, on the node's side too, and without a value of its data."""
    with pytest.raises(BadInput):
        lamina.Simulation(copy.deepcopy(model), tokens(*data), "fedavg", clients=2, engine="loop")
    setup = Setup(tmp_path, "fedavg", model=Tokens, participation=1.0, rounds=1, more={"evaluate_on": "nodes"})
    honest = setup.federation()
    honest.data = lambda context: tokens()
    broken = setup.federation(lambda: copy.deepcopy(model))
    broken.data = lambda context: tokens(*data)
    grid = setup.grid()
    grid.apps |= {node: honest.client_app() for node in grid.apps} | {NODE + 1: broken.client_app()}
    replies = []
    grid.on_reply = lambda grid, node, message, reply: replies.append(str(reply.content)) or reply
    setup.run(grid)
    (missing,) = setup.journal[0]["missing"]
    assert missing["client"] == 1
    assert why in missing["why"]
    assert setup.rows[0]["evaluating_nodes"] == 3
    assert not any(record.exc_info for record in caplog.records)
    sent = " ".join(replies) + json.dumps(setup.journal)
    assert "19620304" not in sent
    assert "19620303" not in sent
    assert "Jane" not in sent


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (
            f"<class 'ValueError'>:<'could not convert string to float: {CELL}'>",
            "its app raised an exception: ValueError",
        ),
        (f"Traceback\nKeyError: '{CELL}'", "its app raised an exception: KeyError"),
        (CELL, "its app raised an exception"),
    ],
)
def test_the_text_of_an_exception_that_flower_sends_is_not_recorded(reason, why, tmp_path):
    from flower_grid import error_reply

    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1)

    def on_reply(grid, node, message, reply):
        return error_reply(message, 2, reason) if is_train(message) and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    (missing,) = setup.journal[0]["missing"]
    assert missing["why"] == why
    assert "Jane" not in (setup.out / "log.txt").read_text()


# --- malformed messages ----------------------------------------------------------------------------------------------

VALUES = [0, -1, 1, 3.5, float("nan"), float("inf"), 2**62, -(2**62), 10**9, [1, 2], [0.5], "", "text", "0" * 16, b"x",
          True, [True], ["a"], [], "../../x", "9" * 999]  # fmt: skip
SHAPES = [(83,), (), (1,), (0,), (-1,), (2**31 - 1,), (2**31 - 1, 2**31 - 1), (8,), (82, 1)]
DATA = [b"", b"x", bytes(332), bytes(32), bytes(4), b"\x7f" * 332, b"\xff" * 332]


def mangle(random, content):
    """A message with a few things wrong at random; the signature is made afterwards."""
    pick = lambda options: options[random.integers(len(options))]  # noqa: E731
    made = RecordDict(dict(content.items()))
    made.pop("signature", None)
    for _ in range(random.integers(1, 4)):
        what = random.integers(6)
        name = pick(["task", "down", "buffers", "question", "odd", ""])
        array = Array(pick(["float32", "float64", "object", "", "int8"]), pick(SHAPES), pick([wire.RAW, RAW_ARRAY, ""]),
                      pick(DATA))  # fmt: skip
        if what == 0:
            made.pop(name, None)
        elif what == 1 and "task" in made and isinstance(made["task"], ConfigRecord):
            made["task"] = ConfigRecord({**made["task"], pick([*made["task"], "odd"]): pick(VALUES)})
        elif what == 2 and "task" in made and isinstance(made["task"], ConfigRecord):
            made["task"] = ConfigRecord({key: v for key, v in made["task"].items() if random.random() < 0.9})
        elif what == 3:
            name = pick(["down", "down", "buffers", "odd"])
            key = pick([*made[name], "odd"] if isinstance(made.get(name), ArrayRecord) else ["x"])
            old = dict(made[name].items()) if isinstance(made.get(name), ArrayRecord) else {}
            made[name] = ArrayRecord({**old, key: array})
        elif what == 4:
            old = dict(made["down"].items()) if isinstance(made.get("down"), ArrayRecord) else {}
            made["down"] = ArrayRecord({key: v for key, v in old.items() if random.random() < 0.5})
        else:
            made[name] = pick(
                [ConfigRecord({"token": pick(VALUES)}), MetricRecord({"x": 1.0}), ArrayRecord({"x": array})]
            )
    return made


RAW_ARRAY = "numpy.ndarray"


@pytest.mark.parametrize("seed", range(4))
def test_a_malformed_message_gets_one_line_and_no_traceback(seed, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    algorithm = [
        lamina.algorithms.create("fedlamb", sync_every=2),
        "scaffold",
        lamina.algorithms.create("mime", "mime"),
        "fedlada",
    ][seed]
    setup = Setup(tmp_path, algorithm, model=lambda: small_model(norm=True), batch_size=16, rounds=2, participation=1.0,
                  more={"evaluate_on": "nodes"})  # fmt: skip
    grid = setup.run()
    templates = {message.metadata.message_type: message for node, message in grid.seen if node == NODE + 1}
    templates["query"] = next(message for _, message in grid.seen if message.metadata.message_type == "query")
    templates["query"].metadata.__dict__["_dst_node_id"] = NODE + 1
    random, app, context = np.random.default_rng(seed), setup.client_app(), grid.contexts[NODE + 1]
    issued, said, raised = itertools.count(2**52), 0, []
    for _ in range(100):
        kind = list(templates)[random.integers(len(templates))]
        message = over_the_wire(templates[kind])
        message.content = mangle(random, message.content)
        task = message.content.get("task")
        if isinstance(task, ConfigRecord) and isinstance(task.get("issued"), int):
            message.content["task"] = ConfigRecord({**task, "issued": next(issued)})
        if random.random() < 0.95:
            signed(message)
        reply = over_the_wire(app(over_the_wire(message), context))
        if "problem" in reply.content:
            text = problem(reply)
            assert 0 < len(text) <= 1000
            said += 1
            raised += [text] if text.startswith("its app raised") else []
    assert said > 50
    assert raised == []  # every one has words of its own


@pytest.mark.parametrize("kind", ["train.odd", "query.gradient", "evaluate.x"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_message_of_an_unknown_type_gets_one_line(kind, is_signed, tmp_path, caplog):
    setup = Setup(tmp_path, "fedavg", rounds=1)
    grid = setup.run()
    message = over_the_wire(next(message for _, message in grid.seen if is_train(message)))
    message.metadata.__dict__["_message_type"] = kind
    if is_signed:
        signed(message)
    text = problem(setup.client_app()(message, grid.contexts[message.metadata.dst_node_id]))
    assert text.startswith("refused a message of an unknown type" if is_signed else "refused a message whose signature")
    assert not any(record.exc_info for record in caplog.records)


def test_a_message_that_is_an_error_gets_one_line(tmp_path):
    from flwr.app import Error
    from flwr.app.message import make_message

    setup = Setup(tmp_path, "fedavg", rounds=1)
    grid = setup.run()
    message = next(message for _, message in grid.seen if is_train(message))
    broken = make_message(metadata=message.metadata, error=Error(1, "odd"))
    assert "raised" in problem(setup.client_app()(broken, grid.contexts[message.metadata.dst_node_id]))


# --- the server stops ------------------------------------------------------------------------------------------------


def test_the_reason_for_a_stop_is_in_the_log(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"deadline": 0.05, "attempts": 1})
    grid = setup.grid()
    grid.offline.update(grid.contexts)
    with pytest.raises(Stopped) as stopped:
        setup.run(grid)
    assert f"ERROR the run stopped: {stopped.value}\n" in (setup.out / "log.txt").read_text()


def test_the_simulation_engine_of_flower_needs_no_keys():
    """Where nodes are Ray's actors, and the server's Grid is Flower's own in memory."""

    class InMemoryGrid:
        pass

    assert signing.read_signer("", InMemoryGrid()) is None
    assert not signing.is_simulated()
