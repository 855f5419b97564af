"""One hostile node of ten in a federation with the default settings costs little; honest nodes are never refused."""

import functools
import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

from flower_grid import LoopGrid
from lamina.data import load, partitions
from lamina.experiment.records import read_record
from lamina.flower import Federation, wire

NODES, HOSTILE, ROUNDS = 10, 3, 12
RATES = {"fedlamb": 0.03, "fedams": 3e-3, "fedavg": 0.3, "scaffold": 0.3, "mime": 3e-3, "localadam": 0.01}


@functools.cache
def digits():
    return load("digits")


@functools.cache
def parts(kind):
    train = digits().train
    return partitions.split_dataset(partitions.make(kind), train, NODES, 0)


def model(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        middle = [nn.BatchNorm1d(24)] if norm else []
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), *middle, nn.ReLU(), nn.Linear(24, 10))


def federation(folder, algorithm, spoil=None, *, norm=False, rounds=ROUNDS, kind="iid", **more):
    """The accuracy of a federation of ten nodes, and the records of its rounds."""

    def part_of(context):
        return digits().train.subset(parts(kind)[context.node_config["partition-id"]])

    made = Federation(
        algorithm, lambda: model(norm), part_of, clients=NODES, rounds=rounds, out=folder / "run",
        test=lambda: digits().test,
        batch_size=48, epochs=2, lr=RATES[algorithm], device="cpu", poll=0.002, state_dir=folder / "state",
        evaluate_every=rounds, **more,
    )  # fmt: skip
    sent = {}  # of the round: the second moments that the others have sent

    def on_reply(grid, node, message, reply):
        if spoil is None or message.metadata.message_type != "train":
            return reply
        if node - 1 != HOSTILE:
            return reply
        return Message(spoil(reply.content, int(message.metadata.group_id), made), reply_to=message)

    grid = LoopGrid(made.client_app(), {1 + i: {"partition-id": i} for i in range(NODES)}, on_reply=on_reply)
    made.server_app()(grid, grid.contexts[1])
    assert not sent
    journal = [json.loads(line) for line in (folder / "run" / "federation.jsonl").read_text().splitlines()]
    return list(read_record(folder / "run").history)[-1]["accuracy"], journal


def edit(content, record, changes):
    """A reply with some arrays of a record replaced by functions of themselves."""
    arrays = dict(content[record].items())
    for name, change in changes.items():
        old = torch.frombuffer(bytearray(arrays[name].data), dtype=torch.float32).reshape(arrays[name].shape)
        arrays[name] = wire.encode(change(old).to(torch.float32))
    made = RecordDict(dict(content.items()))
    made[record] = ArrayRecord(arrays)
    return made


def times(factor, *fields):
    return lambda content, *_: edit(content, "up", {name: lambda value: factor * value for name in fields})


def many_examples(content, number, federation):
    figures = dict(content["figures"].items())
    figures["examples"] *= 7
    figures["steps"] = int(federation.plan.steps(np.array([figures["examples"]]))[0])
    made = edit(content, "up", {"delta": lambda value: -value})
    made["figures"] = MetricRecord(figures)
    return made


def poisoned_statistics(content, *_):
    return edit(content, "buffers", {name: lambda value: value + 80 for name in content["buffers"]})


ATTACKS = {
    "sign flip": ("fedavg", times(-1.0, "delta"), {}),
    "x -10": ("fedavg", times(-10.0, "delta"), {}),
    "x -50": ("fedlamb", times(-50.0, "delta"), {}),
    "example count": ("fedavg", many_examples, {"weighting": "examples"}),
    "second moments": ("fedlamb", times(1e3, "v"), {}),
    "second moments of one layer": (
        "fedams", lambda content, *_: edit(content, "up", {"v": lambda v: torch.cat([v[:-250], 500 * v[-250:]])}), {},
    ),
    "running maximum": ("localadam", times(3e3, "v_hat"), {}),
    "statistics": ("fedavg", poisoned_statistics, {"norm": True}),
    "control variate": ("scaffold", times(-30.0, "delta_c"), {}),
    "gradient": ("mime", times(50.0, "gradient"), {}),
}  # fmt: skip


@functools.cache
def honest(algorithm, *more):
    raise AssertionError("filled by the fixture")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """The accuracy of the honest federation, computed once for each algorithm and settings."""
    known = {}

    def accuracy(algorithm, more):
        key = (algorithm, str(more))
        if key not in known:
            known[key], journal = federation(tmp_path_factory.mktemp("honest"), algorithm, **more)
            assert not any(entry["refused"] for entry in journal)
        return known[key]

    return accuracy


@pytest.mark.parametrize("name", ATTACKS)
def test_one_hostile_node_of_ten_costs_little(name, baseline, tmp_path):
    algorithm, spoil, more = ATTACKS[name]
    accuracy, journal = federation(tmp_path, algorithm, spoil, **more)
    assert accuracy >= baseline(algorithm, more) - 0.02
    assert {one["client"] for entry in journal for one in entry["refused"]} <= {HOSTILE}
