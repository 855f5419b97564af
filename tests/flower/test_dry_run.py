"""A dry run on a node: what it reports, and which problems it finds before the node joins."""

import sys

import pytest

import helpers
from flower_grid import signing_keys
from flower_setup import MIME, NODE, Setup, small_model
from lamina.base.limits import in_bytes
from lamina.flower import wire

PROJECT = """
[project]
name = "tried"
[tool.flwr.app.components]
clientapp = "{module}:client"
[tool.flwr.app.config]
out = ""
"""
APP = """
import torch
from flower_setup import MIME, part_of, small_model
from lamina.flower import Federation, Limits

def broken_labels(context):
    x, y = part_of(context)
    return x, y + 1

def with_nan(context):
    x, y = part_of(context)
    x[3] = float("nan")
    return x, y

def huge(context):
    x, y = part_of(context)
    return 1e20 * x, y

def no_file(context):
    return open(context.node_config["data"])

federation = Federation({algorithm}, {model}, {data}, clients=4, device="cpu", {settings})
client = federation.client_app()
"""


@pytest.fixture
def tried(empty_folder, capsys):
    """Writes an app, tries it, and returns the exit code, the report and the problems."""
    (empty_folder / "state").mkdir()

    def check(config="partition-id=1", *, algorithm="fedavg", model="small_model", data="part_of", settings=""):
        algorithm = repr(algorithm) if algorithm != "MIME" else algorithm
        text = APP.format(algorithm=algorithm, model=model, data=data, settings=settings)
        (empty_folder / "tried.py").write_text(text)
        (empty_folder / "pyproject.toml").write_text(PROJECT.format(module="tried"))
        config = f'{config} state-dir="{empty_folder / "state"}" server-key="{signing_keys()[1]}"'
        try:
            code = helpers.call("flower", "check-node", ".", "--node-config", config)
        finally:
            sys.modules.pop("tried", None)
        shown = capsys.readouterr()
        assert list((empty_folder / "state").iterdir()) == []
        return code, shown.out, shown.err.splitlines()

    return check


@pytest.mark.parametrize("algorithm", ["fedlamb", "scaffold", "MIME"])
def test_a_sound_node_learns_what_it_would_send(algorithm, tried, tmp_path):
    """As much as a node of a federation really sends in its first round, whomever the clock leaves out."""
    options = {"algorithm": algorithm, "model": "lambda: small_model(norm=True)"}
    settings = "epochs=2, evaluate_on='both', batch_size=16, clock={'step_seconds': 1, 'deadline': 2}"
    code, report, problems = tried(settings=settings, **options)
    assert (code, problems) == (0, [])
    assert report.endswith("ready to join\n")
    assert "data: Dataset('data', 25 samples of [6] torch.float32, 3 classes)" in report
    assert "a round has 4 local steps" in report  # 25 samples in batches of 16, twice
    assert "evaluation: would send loss" in report
    made = MIME if algorithm == "MIME" else algorithm
    setup = Setup(tmp_path, made, model=lambda: small_model(norm=True), participation=1.0, rounds=1, batch_size=16)
    sent = []

    def on_reply(grid, node, message, reply):
        if node == NODE + 1 and message.metadata.message_type in ("train.gradient", "train"):
            sent.append(reply.content)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    (line,) = (line for line in report.splitlines() if line.startswith("would send: "))
    for content in sent:
        del content["answer"]  # to the task, which the dry run does not have
    fields = [", ".join(f"{name} {list(each.shape)} float32" for name, each in one["up"].items()) for one in sent]
    assert f"would send: {', then '.join(fields)}, 2 buffers of the model" in line
    assert len(sent) == (2 if algorithm == "MIME" else 1)
    assert f": {in_bytes(sum(map(wire.wire_bytes, sent)))} a round" in line


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"config": "num-partitions=4"}, "this node has no number: start it with --node-config 'partition-id=0'"),
        ({"config": "partition-id=4"}, "partition-id = 4, but the clients are numbered 0 to 3"),
        ({"data": "with_nan"}, "data: sample 3 of x holds nan"),
        ({"data": "broken_labels"}, "the train labels go up to 3: it needs 4"),
        ({"data": "no_file"}, "reads 'data', which this node's configuration does not have"),
        ({"data": "no_file"}, ": start the node with --node-config '… data=…'"),
        ({"config": 'partition-id=1 data="gone.csv"', "data": "no_file"}, "FileNotFoundError"),
        ({"model": "lambda: torch.nn.Linear(7, 3)"}, "the model cannot take the train data"),
        ({"data": "huge", "settings": "lr=1e30"}, "client 1 (local step 1 of 1) went non-finite"),
        ({"model": "lambda: small_model(norm=True)", "settings": "batch_size=8"}, "one sample"),
        ({"settings": "limits=Limits(max_norm=1e-9)"}, "the server would refuse what this node sends: 'delta'"),
        ({"settings": "limits=Limits(max_examples=3)"}, "says 25 examples; at least 1 and at most 3 are allowed"),
        ({"settings": "local_steps=10**8, deadline=1"}, "take longer than the 1 s that the server waits"),
    ],
)
def test_every_problem_is_one_line(options, why, tried):
    code, report, (problem,) = tried(**options)
    assert code == 2
    assert problem.startswith("error: ")
    assert why in problem
    assert "ready" not in report


def test_several_problems_are_several_lines(tried, empty_folder, capsys):
    tried()  # writes the app
    assert helpers.call("flower", "check-node", ".", "--node-config", 'partition-id=9 state-dir="/proc/x"') == 2
    lines = capsys.readouterr().err.splitlines()
    for line, why in zip(lines, ("without server-key", "cannot write to the folder '/proc/x'", "= 9"), strict=True):
        assert why in line
    sys.modules.pop("tried", None)


def test_a_configuration_that_cannot_be_read_is_one_line(tried, capsys):
    tried()
    assert helpers.call("flower", "check-node", ".", "--node-config", "partition-id=zero") == 2
    assert "cannot read the node's configuration 'partition-id=zero'" in capsys.readouterr().err
