"""One node of ten with a crude attack is refused or costs little; a robust mean also holds what the limits let pass."""

import dataclasses
import functools
import importlib.util
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from torch import nn

import lamina
from flower_grid import LoopGrid
from lamina.algorithms.contract import ClientInfo, Displacement, ServerInfo
from lamina.algorithms.scaffold import Up
from lamina.base.errors import BadInput
from lamina.engines.state import State
from lamina.flower import Federation, Limits, outliers, wire
from lamina.flower.checks import Update
from lamina.flower.judge import Judge
from lamina.flower.records import Attendance, Memory
from lamina.objective.objective import Objective

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
    """Seven times the examples, and twice the opposite step."""
    figures = dict(content["figures"].items())
    figures["examples"] *= 7
    figures["steps"] = int(federation.protocol.steps(np.array([figures["examples"]]))[0])
    made = edit(content, "up", {"delta": lambda value: -2 * value})
    made["figures"] = MetricRecord(figures)
    return made


ATTACKS = {
    "x -10": ("fedavg", times(-10.0, "delta"), {}, "'delta' "),
    "x -50": ("fedlamb", times(-50.0, "delta"), {}, "'delta' "),
    "example count": ("fedavg", heavy, {"weighting": "examples"}, "is opposed to the others"),
    "second moments": ("fedlamb", times(1e3, "v"), {}, "'v' of '0.weight' grew by"),
    "a few second moments": (
        "fedams", lambda c, _: edit(c, "up", {"v": lambda v: torch.cat([v[:-3], v[-3:] + 1])}), {}, "'v' of '2.bias'",
    ),
    "running maximum": ("localadam", times(1e3, "v_hat"), {}, "'v_hat' of '0.weight' grew by"),
    "statistics": (
        "fedavg", lambda c, _: edit(c, "buffers", {n: lambda b: b + 80 for n in c["buffers"]}), {"norm": True},
        "the buffer '1.running_mean' has entries",
    ),
    "control variate": ("scaffold", times(-1.0, "delta_c"), {}, "'delta_c' contradicts the other fields"),
    "gradient": ("mime", times(50.0, "gradient"), {}, "'gradient' "),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_node_is_refused_in_every_round(name, tmp_path):
    """In every round: nothing that was accepted before makes later attacks, or honest nodes, look otherwise."""
    algorithm, spoil, more, why = ATTACKS[name]
    for entry in federation(tmp_path, algorithm, spoil, **more):
        (refused,) = entry["refused"]
        assert refused["client"] == HOSTILE
        assert why in refused["why"], refused


def test_limits_name_fields_that_are_sent(tmp_path):
    with pytest.raises(BadInput, match="max_norm names 'detla', which is not a field of the uploads; did") as error:
        federation(tmp_path, "scaffold", limits=Limits(max_norm={"detla": 1.0}))
    assert "(fields: delta, delta_c)" in str(error.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(BadInput, match="non_negative names 'v'"):
        federation(tmp_path, "fedavg", limits=Limits(non_negative=["v"]))


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


# --- the comparison of updates ---------------------------------------------------------------------------------------

LAYERS = lamina.Layers({"a.weight": (40, 5), "b.weight": (10, 5)})
KNOWN = outliers.Broadcast(LAYERS, {}, lambda steps: {}, by_examples=False)


def steps_of(rows, examples=None, steps=None):
    """Updates of nothing but a displacement."""
    n = len(rows)
    return {
        c: Update(Displacement(rows[c]), {}, (examples or [20] * n)[c], (steps or [2] * n)[c], 0.0) for c in range(n)
    }


def random_rows(n=10, spread=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(LAYERS.size, generator=generator)
    return common + spread * torch.randn(n, LAYERS.size, generator=generator)


def test_a_long_update_of_a_client_with_more_steps_is_not_refused():
    rows = random_rows()
    rows[0] *= 7
    assert list(outliers.judge_updates(steps_of(rows), KNOWN, Limits())) == [0]
    more = steps_of(rows, steps=[20] + [2] * 9)
    assert outliers.judge_updates(more, KNOWN, Limits()) == {}
    rows[0] *= 1000  # the steps excuse no more than three times the length
    assert list(outliers.judge_updates(steps_of(rows, steps=[2000] + [2] * 9), KNOWN, Limits())) == [0]


def test_an_update_against_the_others_counts_with_its_weight():
    rows = random_rows()
    rows[0] *= -1
    assert outliers.judge_updates(steps_of(rows), KNOWN, Limits()) == {}
    weighted = KNOWN._replace(by_examples=True)
    heavier = steps_of(rows, examples=[60] + [20] * 9)
    assert "is opposed" in outliers.judge_updates(heavier, weighted, Limits())[0]
    assert outliers.judge_updates(heavier, KNOWN, Limits()) == {}
    rows[0] *= 2
    assert list(outliers.judge_updates(steps_of(rows), KNOWN, Limits())) == [0]


def test_the_step_of_one_module_may_not_be_turned_back():
    rows = random_rows()
    rows[0, 200:] *= -5
    assert "of 'b'" in outliers.judge_updates(steps_of(rows), KNOWN, Limits())[0]


def test_a_claim_of_many_examples_is_refused():
    found = outliers.judge_counts({c: 20 if c else 200 for c in range(10)}, Limits())
    assert list(found) == [0]
    assert "its number of examples is 200, more than 8 times the round's median, 20" in found[0]
    assert outliers.judge_counts({c: 20 if c else 200 for c in range(10)}, Limits(times_examples=11)) == {}


def test_second_moments_are_judged_by_what_was_added():
    """What earlier rounds have left in the broadcast neither excuses an attack nor condemns an honest client."""
    algorithm = lamina.FedLamb()
    generator = torch.Generator().manual_seed(0)
    honest = 1e-6 * torch.rand(10, LAYERS.size, generator=generator)
    info = ClientInfo(1, 0.1, LAYERS)
    down, client = algorithm.init(honest[0], LAYERS), algorithm.client_init(honest[0], LAYERS)
    up = algorithm.finish(algorithm.begin(down, client, info), down, client, info)[0]

    def judge(poison, added):
        v_hat = torch.full((LAYERS.size,), 1e-6) + poison
        server = down._replace(v_hat=v_hat)
        known = KNOWN._replace(
            inherited=lambda steps: algorithm.inherited_moments(server, info._replace(round=2, steps=float(steps)))
        )
        updates = {
            c: Update(up._replace(delta=random_rows()[c], v=algorithm.beta2**2 * v_hat + row), {}, 20, 2, 0.0)
            for c, row in enumerate(added)
        }
        return outliers.judge_updates(updates, known, Limits())

    hostile = honest.clone()
    hostile[0] += 30 * honest.mean()
    assert judge(0.0, honest) == {}
    assert judge(1e-4, honest) == {}
    assert list(judge(0.0, hostile)) == [0]
    assert list(judge(1e-4, hostile)) == [0]


def test_growth_of_second_moments_adds_up_over_rounds():
    """What passes in a single round is refused once it has been sent in many; a client with many rounds is not."""
    added = torch.rand(10, LAYERS.size, generator=torch.Generator().manual_seed(0)) + 0.5

    def updates(factor):
        rows = torch.cat([factor * added[:1], added[1:]])
        return {c: Update(WithSecondMoment(random_rows()[c], row), {}, 20, 2, 0.0) for c, row in enumerate(rows)}

    known = KNOWN._replace(
        inherited=lambda steps: {"v": torch.zeros(LAYERS.size)}, largest_growth={"v of a": 300.0, "v of b": 1e3}
    )
    assert outliers.judge_updates(updates(1.0), known, Limits()) == {}
    once = outliers.add_growth(updates(4.0), known)
    assert once[0].own == pytest.approx(4 * once[1].own, rel=0.1)
    tired = dict.fromkeys(range(10), outliers.Growth(30.0, 30.0))  # all have taken part in many rounds
    assert outliers.judge_updates(updates(4.0), known._replace(growth_by_client=tired), Limits()) == {}
    tired[0] = outliers.Growth(185.0, 30.0)
    found = outliers.judge_updates(updates(4.0), known._replace(growth_by_client=tired), Limits())
    assert list(found) == [0]
    assert "its second moments have grown" in found[0]


class WithSecondMoment(NamedTuple):
    delta: torch.Tensor
    v: torch.Tensor


def test_two_hostile_nodes_of_twenty_do_not_vouch_for_each_other():
    values = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))
    values[:2] += 20
    buffers = [{"running_mean": row} for row in values]
    known = KNOWN._replace(buffers={"running_mean": torch.zeros(8)})
    updates = {c: one._replace(buffers=buffers[c]) for c, one in steps_of(random_rows(20)).items()}
    assert sorted(outliers.judge_updates(updates, known, Limits())) == [0, 1]


def test_a_node_that_moves_the_model_back_to_its_start_is_refused():
    """Also where its step is not opposed to those of this round."""
    rows = random_rows(10)
    drift = torch.zeros(rows.shape[1])
    drift[0] = 100.0
    rows[:, 0] = 0.0
    rows[HOSTILE, 0] = -3 * float(rows.norm(dim=1).median())
    updates = steps_of(rows)
    assert outliers.judge_updates(updates, KNOWN, Limits()) == {}
    found = outliers.judge_updates(updates, KNOWN._replace(drift=drift), Limits())
    assert list(found) == [HOSTILE]
    assert "moves the model back towards its start" in found[HOSTILE]
    rows[:, 0] = -3 * float(rows.norm(dim=1).median())  # all have gone too far
    assert outliers.judge_updates(steps_of(rows), KNOWN._replace(drift=drift), Limits()) == {}


# --- what attacks cost -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attacks():
    path = Path(__file__).parents[2] / "benchmarks" / "attacks.py"
    spec = importlib.util.spec_from_file_location("attacks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COSTS = [("scaffold", "sign flip")]  # with the delta_c that goes with it: errors would add up over rounds
MORE_COSTS = [
    ("fedlada", "sign flip"),  # of a step that is the broadcast's own for nine tenths
    ("fedams", "second moments: spread"),
    ("fedams", "sign flip"),
    ("fedams", "just below: opposed"),
    ("scaffold", "delta_c x -1"),
    ("fedlamb", "just below: undo"),
    ("fedlamb", "BatchNorm +1"),
    ("fedavg", "many examples, weighted, flip"),
]


@pytest.fixture(scope="module")
def honest_accuracy(attacks):
    @functools.cache
    def accuracy(algorithm, **settings):
        reached, refused = attacks.run(algorithm, **settings)
        assert refused == {}
        return reached

    return accuracy


@pytest.mark.parametrize(
    ("algorithm", "name"), [*COSTS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_COSTS)]
)
def test_an_attack_costs_at_most_two_points_after_15_rounds(algorithm, name, attacks, honest_accuracy):
    """The whole table is that of benchmarks/attacks.py."""
    attack, settings = attacks.attacks(lamina.create(algorithm), attacks.RATES[algorithm])[name]
    accuracy, refused = attacks.run(algorithm, attack, **settings)
    assert set(refused) <= {attacks.HOSTILE}
    assert accuracy >= honest_accuracy(algorithm, **settings) - 0.02


def test_a_robust_mean_holds_an_attack_that_passes_the_limits(attacks, honest_accuracy):
    """The node uses only its own data; no limit refuses it, and with the plain mean it ruins the model."""
    attack, _ = attacks.attacks(lamina.create("fedlamb"), attacks.RATES["fedlamb"])["own data: raise the loss"]
    honest = honest_accuracy("fedlamb")
    accuracy, refused = attacks.run("fedlamb", attack)
    assert refused == {}
    assert accuracy < honest - 0.2
    for aggregation in ("trimmed_mean", "median"):
        assert attacks.run("fedlamb", attack, aggregation=aggregation)[0] >= honest - 0.02


@pytest.mark.long
def test_a_suppressed_class_gets_its_honest_holders_refused(attacks):
    attack, settings = attacks.attacks(lamina.create("mime"), attacks.RATES["mime"])["own data: suppress a class"]
    settings = {**settings, "aggregation": "trimmed_mean"}
    before, after = attacks.run("mime", **settings)[1], attacks.run("mime", attack, **settings)[1]
    for holder in range(1, attacks.RARE_HOLDERS):
        assert len(after.get(holder, [])) > len(before.get(holder, []))


# --- what the server's judge knows of earlier rounds -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["drift", "totals"])
def test_the_judge_compares_with_earlier_rounds(what, tmp_path):
    """The same updates pass in the first round."""
    made = Federation("scaffold", model, part_of, clients=NODES, device="cpu", out=tmp_path)
    objective = Objective(model(), "cross_entropy")
    algorithm, layers, x = made.algorithm, objective.layers, objective.start
    state = State.start(algorithm, objective, NODES)
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(len(x), generator=generator) + 0.3 * torch.randn(NODES, len(x), generator=generator)
    away = torch.randn(len(x), generator=generator)
    away -= (away @ delta.mean(0)) / (delta.mean(0) @ delta.mean(0)) * delta.mean(0)
    away /= away.norm()
    delta -= torch.outer(delta @ away, away)
    if what == "drift":
        delta[HOSTILE] -= 3 * delta.norm(dim=1).median() * away
    updates = {c: Update(Up(row, row), {}, 20, 2, 1.0) for c, row in enumerate(delta)}
    later = dataclasses.replace(state, server=state.server._replace(x=x + 100 * away))
    later.clients = {c: Up(None, row * (20 if c == HOSTILE and what == "totals" else 1)) for c, row in enumerate(delta)}

    def refused(state):
        judge, record = Judge(made, objective, state, Memory(run="a")), Attendance(2, nodes={})
        down = algorithm.broadcast(state.server, ServerInfo(2, 0.1, layers))
        judge.expect(state, down, ClientInfo(2, 0.1, layers))
        judge.remove_odd_updates(dict(updates), record, None)
        return {one["client"]: one["why"] for one in record.refused}

    assert refused(state) == {}
    found = refused(later)
    assert list(found) == [HOSTILE]
    assert {"drift": "back towards its start", "totals": "the sum of 'delta_c' over all rounds"}[what] in found[HOSTILE]


def test_growth_is_remembered_with_the_checkpoint(tmp_path):
    federation(tmp_path, lamina.FedAms(), rounds=2)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "round-000002.json").read_text())
    (facts,) = manifest["content"]["history"]
    assert len(facts["growth_by_client"]) == NODES
    for own, others in facts["growth_by_client"].values():
        assert own > 0
        assert others > 1.2  # one in the first round; the later ones are added
