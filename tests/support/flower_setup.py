"""A small federation in one process, and the simulation it must agree with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from torch import nn

import lamina
from flower_grid import LoopGrid
from lamina.experiment.runs.records import read_record
from lamina.flower import Federation, wire

SAMPLES = 60


PARTS = [list(range(0, 10)), list(range(10, 35)), list(range(35, 57)), [57, 58, 59]]  # ragged


NODE = 2**63 + 1000  # node ids do not fit a signed 64-bit word


def nodes(count=4):
    return {NODE + i: {"partition-id": i, "num-partitions": count} for i in range(count)}


def the_data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)


def part_of(context):
    x, y = the_data()
    own = PARTS[context.node_config["partition-id"]]
    return x[own], y[own]


def small_model(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
        return nn.Sequential(*layers)


def other_weights():
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


MIME = lamina.algorithms.create("mime", "mime")  # the original, of two exchanges


PROTOCOL = {"participation": 0.75, "batch_size": 8, "epochs": 1, "seed": 5}


class Setup:
    """A federation in a folder, and the simulation it must agree with."""

    def __init__(
        self, folder, algorithm="fedlamb", *, model=small_model, node_model=None, rounds=5, more=None, **given
    ):
        self.folder = Path(folder)
        self.algorithm = lamina.algorithms.create(algorithm) if isinstance(algorithm, str) else algorithm
        self.model, self.rounds = model, rounds
        self.protocol = {**PROTOCOL, **given}
        if "local_steps" in given:
            del self.protocol["epochs"]
        self.more = {"poll": 0.005, "deadline": 5.0, "attempts": 2, **(more or {})}
        self.node_model = node_model or model
        self.other_columns = set()

    @property
    def out(self):
        return self.folder / "run"

    def federation(self, model=None, **changed):
        settings = {
            "clients": 4, "rounds": self.rounds, "test": the_data, "out": self.out, "device": "cpu",
            "state_dir": self.folder / "state", **self.protocol, **self.more, **changed,
        }  # fmt: skip
        return Federation(self.algorithm, model or self.model, part_of, **settings)

    def client_app(self):
        return self.federation(self.node_model).client_app()

    def grid(self, on_send=None, on_reply=None, configs=None, delay=None):
        return LoopGrid(self.client_app(), configs or nodes(), on_send, on_reply, delay=delay)

    def run(self, grid=None, **changed):
        grid = grid or self.grid()
        context = next(iter(grid.contexts.values()))
        self.federation(**changed).server_app()(grid, context)
        return grid

    def simulation(self):
        return lamina.Simulation(
            self.model(), the_data(), self.algorithm, test=the_data(), clients=PARTS, engine="loop", device="cpu",
            **self.protocol,
        )  # fmt: skip

    @property
    def rows(self):
        return list(read_record(self.out).history)

    @property
    def journal(self):
        return [json.loads(line) for line in (self.out / "federation.jsonl").read_text().splitlines()]

    def weights(self):
        return load_file(self.out / "model.safetensors")


def assert_same_run(rows, weights, expected_rows, expected_weights, without=()):
    ignored = {"seconds", "evaluation_seconds", *without}
    assert len(rows) == len(expected_rows)
    for row, expected in zip(rows, expected_rows, strict=True):
        for name in expected.keys() - ignored:
            assert row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), (row["round"], name)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-8)


def assert_like_the_simulation(setup, without=()):
    simulation = setup.simulation()
    simulation.run(setup.rounds)
    assert_same_run(setup.rows, setup.weights(), simulation.history, simulation.model.state_dict(), without)


def reference(setup, absent=(), lost=()):
    """The weights a simulation gets in which clients are absent in some rounds, or lose their state before them.

    `absent` and `lost` hold (round, client).
    """
    simulation = setup.simulation()
    for number in range(1, setup.rounds + 1):
        cohort = [c for c in simulation.plan.cohort(number).tolist() if (number, c) not in absent]
        plan = simulation.plan.round_of(number, np.array(cohort), [np.array(PARTS[c]) for c in cohort])
        for client in [c for r, c in lost if r == number]:
            simulation.state.clients.pop(client)
        simulation.state, _ = simulation.engine.run_round(simulation.state, plan)
    return simulation.model.state_dict()


def assert_weights(setup, expected):
    for name, value in expected.items():
        torch.testing.assert_close(setup.weights()[name], value, rtol=1e-6, atol=1e-8)


def is_train(message, number=None):
    """Whether a message asks for the update of a round."""
    return message.metadata.message_type == "train" and number in (None, int(message.metadata.group_id))


def problem(reply):
    """The line in which a node says why it cannot do a task."""
    text = reply.content["problem"]["text"]
    assert "\n" not in text
    return text


def client_of(node):
    return node - NODE


def as_sent(messages, kind="train"):
    """Messages that a grid has seen, of one type, by node."""
    sent = {}
    for node, message in messages:
        if message.metadata.message_type == kind:
            sent.setdefault(node, []).append(message)
    return sent


def altered(times=1.0, **figures):
    """A function that returns a reply with vectors times a number, and other figures."""

    def spoil(content):
        for name in {"delta", "gradient"} & content.get("up", {}).keys():
            value = torch.frombuffer(bytearray(content["up"][name].data), dtype=torch.float32)
            content = change(content, "up", **{name: wire.encode(value * times)})
        return change(content, "figures", **figures) if figures else content

    return spoil


def spoiled(spoil, rounds=None, kind="train"):
    """An `on_reply` that changes the content of client 1's replies to messages of one type, in some rounds or all."""

    def on_reply(grid, node, message, reply):
        is_meant = message.metadata.message_type == kind and client_of(node) == 1
        if is_meant and (rounds is None or int(message.metadata.group_id) in rounds):
            return Message(spoil(reply.content), reply_to=message)
        return reply

    return on_reply


def with_delta(make):
    """A function that returns a reply with another delta."""

    def spoil(content):
        delta = torch.frombuffer(bytearray(content["up"]["delta"].data), dtype=torch.float32)
        return change(content, "up", delta=make(delta))

    return spoil


def put(delta, value):
    """A delta with another value in one place, encoded."""
    delta = delta.clone()
    delta[3] = value
    return wire.encode(delta)


def change(content, record, **entries):
    """A reply with other entries in one record; None removes an entry."""
    made = RecordDict(dict(content.items()))
    old = dict(content[record].items()) if record in content else {}
    kept = {name: value for name, value in {**old, **entries}.items() if value is not None}
    made[record] = (MetricRecord if record == "figures" else ArrayRecord)(kept)
    return made
