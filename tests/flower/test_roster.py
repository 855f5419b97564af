"""Which node is which client."""

import re

import pytest
from torch import nn

from flower_setup import (
    NODE,
    Setup,
    assert_like_the_simulation,
    assert_weights,
    is_train,
    nodes,
    reference,
    small_model,
)
from lamina.flower import Stopped


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
    assert all(
        entry["notes"] == ["node 99 is not on the server's list of nodes, and takes no part"] for entry in setup.journal
    )
    assert not any(node == 99 for node, _ in grid.seen)


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
    with pytest.raises(
        Stopped, match="its frozen weights or the initial values of its private parts are not this node's"
    ):
        other.run()


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
    assert setup.journal[0]["missing"] == [{"client": 3, "node": str(NODE + 3), "why": "it is not connected"}]
    assert setup.journal[2]["missing"] == []


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
