"""Forged and replayed tasks are refused, keys are checked, and what a task may ask for is bounded."""

import copy
import json
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from flower_grid import over_the_wire, signed
from flower_setup import NODE, Setup, as_sent, assert_like_the_simulation, client_of, is_train, nodes, problem
from lamina.base.errors import BadInput
from lamina.flower import keys, signing, wire


def files(folder):
    """Every file under a folder with its content."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two rounds: its set-up, its grid and the tasks to train, by node."""
    setup = Setup(tmp_path_factory.mktemp("run"), "scaffold", rounds=2, participation=1.0)
    grid = setup.run()
    return setup, grid, as_sent(grid.seen)


@pytest.fixture
def victim(run, tmp_path):
    """Answer a message as client 1 would after that run; what it writes goes into a folder of the test."""
    setup, grid, _ = run
    shutil.copytree(setup.folder / "state", tmp_path / "state")
    context = copy.copy(grid.contexts[NODE + 1])
    context.node_config = {**context.node_config, "state-dir": str(tmp_path / "state")}
    return lambda message: setup.client_app()(message, context)


def forged_by(make):
    """Messages as a registered node could send them, made of the server's own."""
    return pytest.param(make, id=make.__name__)


def fresh(message):
    """A task of the server's that its node has not had yet."""
    made = over_the_wire(message)
    number = made.content["task"]["number"] + 10**9
    made.content["task"] = ConfigRecord({**made.content["task"], "number": number, "token": "1" * 16})
    return signed(made)


def without_signature(messages, victim):
    made = fresh(messages[victim][-1])
    del made.content["signature"]
    return made


def with_another_task(messages, victim):
    made = fresh(messages[victim][-1])
    task = dict(made.content["task"])
    made.content["task"] = ConfigRecord({**task, "token": "0" * 16, "base": "", "keep": [], "number": 2**62})
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
    with tempfile.TemporaryDirectory() as folder:
        private = keys.make_server_keys(Path(folder) / "keys").signing_key
        made = fresh(messages[victim][-1])
        signing.sign(made, signing.load_key(private, secret=True))
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
def test_a_task_that_is_not_the_servers_is_refused_and_changes_nothing(forge, run, victim, tmp_path):
    sent, before = run[2], files(tmp_path / "state")
    assert any("client-1" in str(path) for path in before)
    text = problem(victim(forge(sent, NODE + 1)))
    assert text.startswith("refused a ")
    assert ("it is a replay" in text) == forge.__name__.startswith("sent_")
    assert files(tmp_path / "state") == before
    assert "problem" not in victim(fresh(sent[NODE + 1][-1])).content


def test_the_servers_own_next_task_is_accepted_after_all_that(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)

    def on_send(grid, node, message):
        if is_train(message, 2) and client_of(node) == 1:
            forged = over_the_wire(message)
            forged.content["task"] = ConfigRecord({**message.content["task"], "number": 2**62, "keep": []})
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
    made = keys.make_server_keys(tmp_path / "keys")
    private, public = made.signing_key, made.verifying_key
    assert [path.stat().st_mode & 0o777 for path in (private, public)] == [0o600, 0o644]
    signing.load_key(private, secret=True)
    private.chmod(mode)
    with pytest.raises(BadInput, match="can be read by others: chmod 600"):
        signing.load_key(private, secret=True)


def test_keys_that_are_none_are_one_line(tmp_path):
    with pytest.raises(BadInput, match="cannot read the signing key"):
        signing.load_key(tmp_path / "none", secret=True)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(BadInput, match="is not a signing key"):
        signing.load_key(tmp_path / "text", secret=True)


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
def test_what_a_task_may_ask_for_is_bounded(asked, why, run, victim, monkeypatch):
    message = over_the_wire(run[2][NODE + 1][0])
    task = {**message.content["task"], "number": message.content["task"]["number"] + 10**9}
    settings = {**json.loads(task["settings"]), **{name: value for name, value in asked.items() if name not in task}}
    task |= {name: value for name, value in asked.items() if name in task} | {"settings": json.dumps(settings)}
    message.content["task"] = ConfigRecord(task)
    if why is None:  # as much as a node does; it is not really done here
        monkeypatch.setattr("lamina.flower.node.MAX_SAMPLES_PER_ROUND", 10**7)
        why = "local steps of"
    started = time.monotonic()
    assert why in problem(victim(signed(message)))
    assert time.monotonic() - started < 5
