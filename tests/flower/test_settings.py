"""Evaluation, the run folder, and settings that a user may get wrong."""

import runpy
import sys

import pytest
import torch
from flwr.app import Message
from torch import nn

import lamina
from flower_grid import LoopGrid
from flower_setup import NODE, PARTS, Setup, assert_like_the_simulation, change, nodes, part_of, small_model, the_data
from lamina.api.describe import describe
from lamina.base.errors import BadInput
from lamina.flower import Federation, Limits
from lamina.report import build as report


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


def test_the_test_data_of_a_node_are_matched_to_its_training_data(tmp_path):
    pandas = pytest.importorskip("pandas")

    def table_of(context):
        x, y = part_of(context)
        return pandas.DataFrame(x.numpy(), columns=list("abcdef")), y

    def turned(context):
        x, y = table_of(context)
        return x[list("fedcba")], y

    losses = []
    for node_test in (table_of, turned):
        setup = Setup(tmp_path / node_test.__name__, "fedavg", rounds=1, more={"evaluate_on": "nodes"})
        made = Federation("fedavg", small_model, table_of, clients=4, rounds=1, out=setup.out, device="cpu",
                          state_dir=tmp_path, node_test=node_test, **setup.protocol, **setup.more)  # fmt: skip
        grid = LoopGrid(made.client_app(), nodes())
        made.server_app()(grid, next(iter(grid.contexts.values())))
        losses.append(setup.rows[-1]["node_loss"])
    assert losses[0] == losses[1]


def test_the_run_folder_is_that_of_a_simulation(tmp_path):
    setup = Setup(tmp_path, "fedlamb", rounds=2)
    setup.run()
    assert {path.name for path in setup.out.iterdir()} >= {
        "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "model.safetensors", "lock",
        "best.safetensors", "federation.jsonl",
    }  # fmt: skip
    made = report.build([setup.out])
    assert [curve.records[0].algorithm for curve in made.curves] == ["fedlamb"]
    assert made.tables()
    from lamina.cli.export import table_parts

    assert b"wire_bytes_down" in next(table_parts([setup.out]))


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


@pytest.mark.parametrize("name", ["times_against", "times_examples"])
def test_a_removed_limit_is_refused_with_what_to_do(name):
    with pytest.raises(BadInput, match=f"limits: {name} was removed.*aggregation='trimmed_mean' or 'median'"):
        Limits(**{name: 2.0})


@pytest.mark.parametrize("given", [{"max_norm": -1}, {"on_large": "cut"}, {"times_median": 0}, {"max_examples": 0}])
def test_wrong_limits_are_one_clear_line(given):
    with pytest.raises(BadInput):
        Limits(**given)


@pytest.mark.parametrize(
    ("quorum", "cohort", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (1.0, 3, 3), (2, 5, 2), (9, 3, 3), (0.01, 3, 1)]
)
def test_the_quorum_is_a_fraction_or_a_number(quorum, cohort, needed):
    assert Federation("fedavg", small_model, part_of, clients=9, quorum=quorum).needed(cohort) == needed


def test_without_flower_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ImportError, match=r"^lamina\.flower needs Flower: pip install -e '\.\[flower\]'$"):
        runpy.run_path(lamina.flower.__file__)


def test_another_version_of_flower_is_named(monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    runpy.run_path(lamina.flower.__file__)
    assert "was tested with Flower 1.41.0, and this is 9.9" in caplog.text


@pytest.mark.parametrize("augmentation", [None, lamina.data.Augment(2, fill="mean")])
def test_the_run_folder_tells_the_augmentation_as_a_simulations_does(augmentation):
    federation = Federation("fedavg", small_model, part_of, clients=4, rounds=1, augmentation=augmentation)
    file = describe("mlp", "digits", "fedavg", settings={"augmentation": augmentation}).model_dump(exclude_unset=True)
    keys = {key: value for key, value in federation.config()["data"].items() if key.startswith("augment")}
    assert keys == {key: value for key, value in file["data"].items() if key.startswith("augment")}
    assert bool(keys) == (augmentation is not None)
