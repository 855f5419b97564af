"""A node with absurd values is refused; a robust mean holds a hostile node that the limits let pass."""

import importlib.util
import itertools
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
from lamina.flower import Federation, Limits, wire

NODES, HOSTILE, ROUNDS = 10, 3, 2


# --- whole federations -----------------------------------------------------------------------------------------------


def model(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        middle = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3))


def part_of(context):
    """Data of two classes of three, in other numbers and on another scale on every node."""
    i = context.node_config["partition-id"]
    generator = torch.Generator().manual_seed(i)
    y = (i + torch.randint(0, 2, (16 + 8 * i,), generator=generator)) % 3
    x = (1 + 0.1 * i) * torch.randn(len(y), 6, generator=generator)
    x[torch.arange(len(y)), y] += 2
    return x, y


def federation(folder, algorithm, spoil=None, *, norm=False, rounds=ROUNDS, **more):
    """Run ten nodes, one of which sends spoiled updates; return the records of the rounds."""
    made = Federation(
        algorithm, lambda: model(norm), part_of, clients=NODES, rounds=rounds, out=folder / "run", batch_size=16,
        device="cpu", poll=0.002, state_dir=folder / "state", **more,
    )  # fmt: skip

    def on_reply(grid, node, message, reply):
        if spoil is None or message.metadata.message_type != "train" or node - 1 != HOSTILE:
            return reply
        return Message(spoil(reply.content, made), reply_to=message)

    grid = LoopGrid(made.client_app(), {1 + i: {"partition-id": i} for i in range(NODES)}, on_reply=on_reply)
    made.server_app()(grid, grid.contexts[1])
    return [json.loads(line) for line in (folder / "run" / "federation.jsonl").read_text().splitlines()]


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
    return lambda content, _: edit(content, "up", {name: lambda value: factor * value for name in fields})


def heavy(content, federation):
    """A thousand times the examples."""
    figures = dict(content["figures"].items())
    figures["examples"] *= 1000
    figures["steps"] = int(federation.protocol.steps(np.array([figures["examples"]]))[0])
    made = RecordDict(dict(content.items()))
    made["figures"] = MetricRecord(figures)
    return made


ABSURD = {
    "step": ("fedavg", times(-1e3, "delta"), {}, "the norm of 'delta' is"),
    "examples": ("fedavg", heavy, {"weighting": "examples"}, "its number of examples is 40000"),
    "second moments": ("fedlamb", times(1e3, "v"), {}, "the norm of 'v' is"),
    "running maximum": ("localadam", times(1e3, "v_hat"), {}, "the norm of 'v_hat' is"),
    "BatchNorm statistics": (
        "fedavg", lambda c, _: edit(c, "buffers", {n: lambda b: b + 1e3 for n in c["buffers"]}), {"norm": True},
        "the norm of the buffer '1.running_mean' is",
    ),
    "control variate": ("scaffold", times(1e3, "delta_c"), {}, "the norm of 'delta_c' is"),
    "gradient": ("mime", times(1e3, "gradient"), {}, "the norm of 'gradient' is"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ABSURD)
def test_a_node_with_absurd_values_is_refused_in_every_round(name, tmp_path):
    algorithm, spoil, more, why = ABSURD[name]
    for entry in federation(tmp_path, algorithm, spoil, **more):
        (refused,) = entry["refused"]
        assert refused["client"] == HOSTILE
        assert refused["why"].startswith(why)
        assert refused["why"].endswith("(limits: times_median)")


def test_the_comparison_can_be_switched_off(tmp_path):
    algorithm, spoil, more, _ = ABSURD["step"]
    for entry in federation(tmp_path, algorithm, spoil, limits=Limits(times_median=None), **more):
        assert entry["refused"] == []


def test_a_federation_may_use_a_robust_mean(tmp_path):
    """The same trajectory as a simulation with the same aggregation."""
    settings = {"batch_size": 16, "device": "cpu", "aggregation": "trimmed_mean", "weighting": "examples"}
    pieces = [part_of(type("Context", (), {"node_config": {"partition-id": i}})) for i in range(NODES)]
    x, y = torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
    ends = np.cumsum([0, *(len(p[1]) for p in pieces)])
    owned = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    simulation = lamina.Simulation(model(True), (x, y), "fedlada", clients=owned, engine="loop", **settings)
    simulation.run(ROUNDS)
    made = Federation(
        "fedlada", lambda: model(True), part_of, clients=NODES, rounds=ROUNDS, out=tmp_path / "run", poll=0.002,
        state_dir=tmp_path / "state", **settings,
    )  # fmt: skip
    grid = LoopGrid(made.client_app(), {1 + i: {"partition-id": i} for i in range(NODES)})
    made.server_app()(grid, grid.contexts[1])
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["aggregation"] == {"name": "trimmed_mean", "share": 0.2}


# --- what attacks cost -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attacks():
    path = Path(__file__).parents[2] / "benchmarks" / "attacks.py"
    spec = importlib.util.spec_from_file_location("attacks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_robust_mean_holds_an_attack_that_passes_the_limits(attacks):
    """The node uses only its own data; no limit refuses it, and with the plain mean it ruins the model."""
    attack = attacks.CASES["raise the loss of its own data"].attack
    honest = attacks.run("fedlamb")[0]
    accuracy, refused, _ = attacks.run("fedlamb", attack)
    assert refused == {}
    assert accuracy < honest - 20
    for aggregation in ("trimmed_mean", "median"):
        assert attacks.run("fedlamb", attack, aggregation=aggregation)[0] >= honest - 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["mime", "fedlamb", "scaffold"])
def test_nobody_honest_is_refused_while_a_class_is_suppressed(name, attacks):
    attack, settings, _ = attacks.CASES["suppress that class"]
    _, refused, _ = attacks.run(name, attack, aggregation="trimmed_mean", **settings)
    assert refused == {}


@pytest.mark.long
@pytest.mark.parametrize("case", ["BatchNorm statistics × 87", "second moments × 97", "noise × 97"])
def test_an_attack_of_the_table_is_not_refused_and_a_median_holds_it(case, attacks):
    attack, settings, algorithms = attacks.CASES[case]
    settings = {**settings, "aggregation": "median"}
    assert "fedlamb" in algorithms
    accuracy, refused, ratios = attacks.run("fedlamb", attack, **settings)
    assert refused == {}
    assert max(ratios.values()) > 80
    assert accuracy >= attacks.run("fedlamb", **settings)[0] - 2
