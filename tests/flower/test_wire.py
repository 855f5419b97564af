"""Messages of a federation: their bytes, their arrays, and tasks that make no sense."""

import copy
import json

import pytest
import torch
from flwr.app import Array, ConfigRecord

import lamina
from flower_grid import over_the_wire, signed
from flower_setup import MIME, NODE, Setup, as_sent, assert_like_the_simulation, client_of, is_train
from lamina.flower import internals, wire
from lamina.flower.checks import Limits


@pytest.mark.parametrize("algorithm", ["fedlamb", pytest.param("mimelamb", marks=pytest.mark.long)])
def test_lazy_synchronisation_saves_bytes_on_the_real_wire(algorithm, tmp_path):
    rounds = 7
    lazy = Setup(tmp_path / "lazy", lamina.algorithms.create(algorithm, sync_every=3), rounds=rounds)
    eager = Setup(tmp_path / "eager", algorithm).simulation().run(rounds)
    grid = lazy.run()
    assert_like_the_simulation(lazy)  # bytes_down and bytes_up of every round are the ledger's
    assert sum(row["bytes_down"] for row in lazy.rows) < sum(row["bytes_down"] for row in eager)
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


def test_fednova_sends_its_normalised_displacement_and_one_number(tmp_path):
    """The displacement, d a, is not sent, and the limit of its norm acts on it."""
    sent, most = [], []

    def on_reply(grid, node, message, reply):
        if is_train(message):
            sent.append({name: list(array.shape) for name, array in reply.content["up"].items()})
            d, a = (wire.decode(reply.content["up"][name], torch.zeros(n)) for name, n in (("d", 83), ("a", 1)))
            most.append(float((d * a).norm()))
        return reply

    setup = Setup(tmp_path / "one", lamina.FedNova(momentum=0.5), rounds=2)
    setup.run(setup.grid(on_reply=on_reply))
    assert_like_the_simulation(setup)
    assert all(shapes == {"d": [83], "a": [1]} for shapes in sent)
    limits = {"limits": Limits(max_norm=0.999 * max(most[:3])), "attempts": 1, "quorum": 1}
    limited = Setup(tmp_path / "other", lamina.FedNova(momentum=0.5), rounds=1, more=limits)
    limited.run()
    (refused,) = limited.journal[0]["refused"]
    assert f"'delta' has norm {max(most[:3]):.4g}, over the limit" in refused["why"]


def test_whole_messages_are_little_more_than_their_arrays(tmp_path):
    setup = Setup(tmp_path, rounds=2)
    setup.run()
    for row in setup.rows:
        assert 0 < row["wire_bytes_down"] - row["bytes_down"] < 4 * 1500
        assert 0 < row["wire_bytes_up"] - row["bytes_up"] < 4 * 1500


def test_counted_message_sizes_are_flowers():
    content = wire.content_of(
        {"up": {"delta": wire.encode(torch.randn(1000))}, "figures": {"examples": 3, "loss": 1.0}}
    )
    assert abs(wire.wire_bytes(content) - internals.serialised_bytes(content)) < 16


def test_arrays_say_nothing_that_is_believed():
    like = torch.zeros(4)
    assert torch.equal(wire.decode(wire.encode(torch.arange(4.0)), like), torch.arange(4.0))
    assert wire.encode(torch.ones(1)).data == b"\x00\x00\x80\x3f"  # little-endian, nothing around it
    for array in (Array("float32", (4,), "numpy.ndarray", bytes(16)), Array("float32", (4,), wire.RAW, bytes(20))):
        with pytest.raises(wire.Unreadable):
            wire.decode(array, like)


def test_no_two_messages_are_the_same(tmp_path):
    """Flower's message ids are hashes of what a message holds: nobody may be able to compute another node's."""
    setup = Setup(tmp_path, MIME, rounds=2, more={"evaluate_on": "both"})
    grid = setup.run()
    tokens = {}
    for node, message in grid.seen:
        record = message.content["task"]
        tokens.setdefault((message.metadata.message_type, record["token"]), set()).add(node)
        assert len(record["token"]) == 16
    assert all(len(owners) == 1 for (kind, _), owners in tokens.items()), tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client", "0/../../../../elsewhere"),
        ("client", 4),
        ("client", -1),
        ("client", 1.0),
        ("round", 0),
        ("run", "../../elsewhere"),
        ("run", ""),
        ("run", "A" * 32),
        ("token", "*"),
        ("base", "../x"),
        ("keep", ["../x"]),
        ("held", ["../x"]),
        ("held", ["x"]),
        ("held_digests", "x"),
        ("held_digests", ["../x"]),
        ("gradient", "../x"),
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
def test_a_task_that_makes_no_sense_is_not_begun(name, value, a_run, tmp_path):
    setup, grid = a_run
    node = NODE + 1
    message = over_the_wire(as_sent(grid.seen)[node][0])
    task = dict(message.content["task"])
    task[name] = json.dumps({**json.loads(task[name]), **value}) if isinstance(value, dict) else value
    message.content["task"] = ConfigRecord(task)
    context = copy.copy(grid.contexts[node])
    context.node_config = {**context.node_config, "state-dir": str(tmp_path / "node" / "state")}
    reply = setup.client_app()(signed(message), context)
    assert reply.content["problem"]["text"].startswith("the server's message ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("run"), "scaffold", rounds=1, participation=1.0)
    return setup, setup.run()


def test_a_task_that_makes_no_sense_costs_only_its_node(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=1, participation=1.0)

    def on_send(grid, node, message):
        if is_train(message) and client_of(node) == 1:
            message.content["task"] = ConfigRecord({**message.content["task"], "run": "../../elsewhere"})
            signed(message)
        return message

    setup.run(setup.grid(on_send))
    assert [one["client"] for one in setup.journal[0]["took_part"]] == [0, 2, 3]
