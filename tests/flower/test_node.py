"""What leaves a node: no data in error messages, one line for every malformed message."""

import copy
import itertools
import json
import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import nn

import lamina
from flower_grid import error_reply, over_the_wire, signed
from flower_setup import NODE, Setup, client_of, is_train, problem, small_model
from lamina.base.errors import BadInput
from lamina.flower import wire

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
        (Tokens(), (19620304, 3), "layer 'table' (Embedding) gets an id from the train data that it has no row "
         "for: its rows are 0 to 6"),
        (Tokens(), (-19620304, 3), "gets an id from the train data that it has no row for"),
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


@pytest.mark.parametrize("reason", [f"<class 'ValueError'>:<'not a float: {CELL}'>", f"Traceback\nKeyError: '{CELL}'"])
def test_the_text_of_an_exception_that_flower_sends_is_not_recorded(reason, tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1)

    def on_reply(grid, node, message, reply):
        return error_reply(message, 2, reason) if is_train(message) and client_of(node) == 1 else reply

    setup.run(setup.grid(on_reply=on_reply))
    (missing,) = setup.journal[0]["missing"]
    assert missing["why"] == "its app raised an exception"
    assert "Jane" not in (setup.out / "log.txt").read_text()


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
        name = pick(["task", "down", "buffers", "odd", ""])
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


@pytest.mark.parametrize("seed", range(2))
def test_a_malformed_message_gets_one_line_and_no_traceback(seed, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    algorithm = [
        lamina.algorithms.create("fedlamb", sync_every=2),
        lamina.algorithms.create("mime", "mime"),
    ][seed]
    setup = Setup(tmp_path, algorithm, model=lambda: small_model(norm=True), batch_size=16, rounds=2, participation=1.0,
                  more={"evaluate_on": "nodes"})  # fmt: skip
    grid = setup.run()
    templates = {message.metadata.message_type: message for node, message in grid.seen if node == NODE + 1}
    random, app, context = np.random.default_rng(seed), setup.client_app(), grid.contexts[NODE + 1]
    numbers, said, raised = itertools.count(2**62), 0, []
    for _ in range(50):
        kind = list(templates)[random.integers(len(templates))]
        message = over_the_wire(templates[kind])
        message.content = mangle(random, message.content)
        task = message.content.get("task")
        if isinstance(task, ConfigRecord) and isinstance(task.get("number"), int):
            message.content["task"] = ConfigRecord({**task, "number": next(numbers)})
        if random.random() < 0.95:
            signed(message)
        reply = over_the_wire(app(over_the_wire(message), context))
        if "problem" in reply.content:
            text = problem(reply)
            assert 0 < len(text) <= 1000
            said += 1
            raised += [text] if text.startswith("its app raised") else []
    assert said > 25
    assert raised == []  # every one has words of its own


@pytest.mark.parametrize("kind", ["train.odd", "query"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_message_of_an_unknown_type_gets_one_line(kind, is_signed, tmp_path, caplog):
    setup = Setup(tmp_path, "fedavg", rounds=1)
    grid = setup.run()
    message = over_the_wire(next(message for _, message in grid.seen if is_train(message)))
    message.metadata.__dict__["_message_type"] = kind
    if is_signed:
        signed(message)
    text = problem(setup.client_app()(message, grid.contexts[message.metadata.dst_node_id]))
    assert text.startswith("refused a message of an unknown type" if is_signed else "refused a message that the server")
    assert not any(record.exc_info for record in caplog.records)


def test_a_message_that_is_an_error_gets_one_line(tmp_path):
    from flwr.app import Error
    from flwr.app.message import make_message

    setup = Setup(tmp_path, "fedavg", rounds=1)
    grid = setup.run()
    message = next(message for _, message in grid.seen if is_train(message))
    broken = make_message(metadata=message.metadata, error=Error(1, "odd"))
    assert "raised" in problem(setup.client_app()(broken, grid.contexts[message.metadata.dst_node_id]))


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
