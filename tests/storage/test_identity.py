"""A checkpoint continues the run that wrote it, and no other."""

import functools
import hashlib
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup
from helpers import call, rows, sets
from lamina.base.errors import BadInput
from lamina.data.feed import Augment
from lamina.objective.fingerprint import attributes_digest, value_digest
from lamina.rounds.schedules import Cosine, Exponential
from lamina.storage import identity
from lamina.storage.identity import content_digest

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(0, 256, (48, 3, 4, 4), dtype=torch.uint8, generator=GENERATOR)
Y = torch.arange(48) % 3


def model(activation=nn.ReLU, hidden=5, frozen=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, hidden), activation(), nn.Linear(hidden, 3))
    net[1].bias.requires_grad_(False).fill_(frozen)
    return net


def double(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def scaled(by):
    def loss(outputs, targets):
        return by * nn.functional.cross_entropy(outputs, targets, reduction="none")

    return loss


def weighted(last):
    """A loss that differs only for labels that are not among the first."""
    return nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 1.0, last]))


class Steps:
    """A schedule of the user's own."""

    def __init__(self, factor):
        self._factor = factor

    def factor(self, round):
        return self._factor**round


SETTINGS = {
    "net": model(), "train": (X, Y), "algorithm": lamina.FedLamb(), "clients": 6, "participation": 0.5,
    "sampling": "exact", "batch_size": 4, "lr": 0.05, "schedule": "constant",
    "clip": None, "weighting": "clients", "loss": "cross_entropy", "augmentation": None, "seed": 1,
    "device": "cpu", "test": None, "engine": "loop",
}  # fmt: skip


def simulate(**changed):
    settings = {**SETTINGS, **changed}
    net, train, algorithm = (settings.pop(name) for name in ("net", "train", "algorithm"))
    return lamina.Simulation(net, train, algorithm, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    simulation = simulate()
    simulation.run(2)
    simulation.save(folder)
    return folder


one_pixel = X.clone()
one_pixel[17, 2, 1, 3] ^= 1
parts = [range(8 * i, 8 * i + 8) for i in range(6)]
OTHERS = {
    "lr": ({"lr": 0.1}, "lr = 0.05 (now 0.1"),
    "algorithm": ({"algorithm": "scaffold"}, 'algorithm.name = "fedlamb" (now "scaffold"'),
    "option": ({"algorithm": lamina.FedLamb(decay=0.1)}, "algorithm.decay = 0.0 (now 0.1"),
    "loss": ({"loss": double}, 'loss = "cross_entropy" (now "double"'),
    "schedule": ({"schedule": Exponential(0.9)}, '= {"name": "constant"} (now {"name": "exponential", "gamma": 0.9}'),
    "own schedule": ({"schedule": Steps(0.5)}, '(now {"name": "steps'),
    "participation": ({"participation": 1.0}, "participation = 0.5 (now 1.0"),
    "sampling": ({"sampling": "bernoulli"}, 'sampling = "exact" (now "bernoulli"'),
    "batch size": ({"batch_size": 8}, "batch_size = 4 (now 8"),
    "epochs": ({"epochs": 2}, "epochs = 1 (now 2"),
    "local steps": ({"local_steps": 2}, r"epochs = 1 (now none), local_steps = none (now 2)"),
    "aggregation": ({"aggregation": "median"}, 'aggregation = {"name": "mean"} (now {"name": "median"}'),
    "clip": ({"clip": 1.0}, "clip = none (now 1.0"),
    "weighting": ({"weighting": "examples"}, 'weighting = "clients" (now "examples"'),
    "augmentation": ({"augmentation": Augment(1, True)}, '= none (now {"pad": 1'),
    "seed": ({"seed": 2}, "seed = 1 (now 2)"),  # which deals the samples otherwise, too
    "clients": ({"clients": 5}, "clients = 6 (now 5)"),
    "partition": ({"clients": parts}, "the split of the samples among clients (partition) changed"),
    "samples": ({"train": (X[:42], Y[:42])}, "samples = 48 (now 42)"),
    "other data": ({"train": (255 - X, Y)}, "the training data (training_data) changed"),
    "one pixel": ({"train": (one_pixel, Y)}, "the training data (training_data) changed"),
    "labels": ({"train": (X, Y.flip(0))}, "the training data (training_data) changed"),
    "data type": ({"train": (X.float(), Y)}, "the training data (training_data) changed"),
    "width": ({"net": model(hidden=6)}, "parameters = "),
    "layers": ({"net": model(nn.Tanh)}, "the model's layers or frozen weights (model) changed"),
    "frozen weights": ({"net": model(frozen=1.0)}, "the model's layers or frozen weights (model) changed"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_the_setting_that_differs(name, saved, caplog):
    changed, expected = OTHERS[name]
    other = simulate(**changed)
    before = other.state
    with pytest.raises(BadInput) as error:
        other.restore(saved)
    line = str(error.value)
    assert f"the checkpoint of round 2 in '{saved}' is of " in line
    assert expected in line
    assert "\n" not in line
    assert "damaged" not in line + caplog.text
    assert other.state is before


class Scaled(nn.Module):
    """A model whose plain attributes matter; its forward pass changes some of them."""

    def __init__(self, **attributes):
        super().__init__()
        self.flat, self.fc, self.calls, self.last = nn.Flatten(), nn.Linear(48, 3), 0, None
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        self.calls, self.last = self.calls + 1, x
        return self.fc(self.flat(x)) * getattr(self, "scale", 1.0)


class Table:
    def __init__(self, rows):
        self.rows, self.owner = rows, self


def attention(heads):
    layer = nn.TransformerEncoderLayer(48, heads, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 48)), layer, nn.Flatten(), nn.Linear(48, 3))


def hooked(by):
    net = Scaled()
    net.fc.register_forward_hook(lambda module, inputs, outputs: outputs * by)
    return net


def partly_evaluated(evaluated):
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3))
    net[2].train(not evaluated)
    return net


def of_class(by):
    class Local(Scaled):
        def forward(self, x):
            return by * self.fc(self.flat(x))

    return Local()


MODELS = {
    "number": lambda other: Scaled(scale=3.0 if other else 2.0),
    "nested": lambda other: Scaled(options={"a": [1, (2, other)], "b": {"x", "y", "z"}}),
    "tensor": lambda other: Scaled(table=torch.ones(3) + other),
    "array": lambda other: Scaled(table=np.ones(3) + other),
    "function": lambda other: Scaled(function=torch.relu if other else torch.tanh),
    "closure": lambda other: Scaled(function=scaled(3 if other else 2)),
    "partial": lambda other: Scaled(function=functools.partial(torch.clamp, max=3 if other else 2)),
    "object": lambda other: Scaled(table=Table([1, other])),
    "heads": lambda other: attention(4 if other else 2),
    "hook": lambda other: hooked(3 if other else 2),
    "evaluation mode": partly_evaluated,
    "class of a function": lambda other: of_class(3 if other else 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_differ_in_a_plain_attribute_are_told_apart(name, tmp_path):
    simulation = simulate(net=MODELS[name](False))
    simulation.run(1)
    simulation.save(tmp_path)
    simulate(net=MODELS[name](False)).restore(tmp_path)  # with other weights
    what = "the settings of the model's layers, such as a dropout rate"
    with pytest.raises(BadInput, match=rf"is of another run: {what} \(model_values\) changed;"):
        simulate(net=MODELS[name](True)).restore(tmp_path)


def test_the_digest_of_code_does_not_depend_on_the_order_of_a_set():
    assert list(frozenset([0, 8])) != list(frozenset([8, 0]))  # as sets of strings are in other processes
    one, other, third = (eval(f"lambda o, t: o in {numbers}", {}) for numbers in ("{0, 8}", "{8, 0}", "{0, 16}"))
    assert value_digest(one) == value_digest(other) != value_digest(third)


def test_the_digest_of_attributes_depends_on_no_address_and_no_order_of_a_set():
    def digest(numbers):
        things = {"object": object(), "lock": threading.Lock(), "function": scaled(2), "device": torch.device("cpu")}
        return attributes_digest(Scaled(numbers=set(numbers), things=things))

    assert list({0, 8}) != list({8, 0})  # as sets of strings are in other processes
    assert digest([0, 8]) == digest([8, 0]) != digest([0, 16])


def test_the_digest_of_attributes_does_not_depend_on_a_hash_of_transformers():
    def digest(**attributes):  # of a GenerationConfig, which every model of transformers that generates text has
        return attributes_digest(Scaled(config=SimpleNamespace(length=5, **attributes)))

    assert digest(_original_object_hash=1) == digest(_original_object_hash=2) != digest(length_penalty=2)


def test_the_checkpoints_of_another_simulation_are_not_replaced(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = simulate(lr=0.1)
    with pytest.raises(BadInput, match=r"round 2 in .* is of another run: lr = 0.05 \(now 0.1\); .* another folder$"):
        other.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    simulate().save(tmp_path)  # the same simulation from its start
    other.save(tmp_path / "other")


class Called:
    def __init__(self, factor):
        self.__class__ = type("Called", (), {"__call__": lambda _, o, t: scaled(factor)(o, t)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(2), scaled(3)),
        (Called(2), Called(3)),
        (nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="none", label_smoothing=0.3)),
        (weighted(2.0), weighted(3.0)),
    ],
)
def test_two_losses_of_one_name_are_told_apart(one, other, tmp_path):
    simulation = simulate(loss=one)
    simulation.run(1)
    simulation.save(tmp_path)
    simulate(loss=one).restore(tmp_path)
    with pytest.raises(BadInput, match=r"is of .*loss_\w+"):
        simulate(loss=other).restore(tmp_path)


def test_two_schedules_of_one_name_are_told_apart(tmp_path):
    simulation = simulate(schedule=Steps(0.9))
    simulation.run(1)
    simulation.save(tmp_path)
    simulate(schedule=Steps(0.9)).restore(tmp_path)
    with pytest.raises(BadInput, match=r'is of another run: schedule = {"name": "steps'):
        simulate(schedule=Steps(0.8)).restore(tmp_path)
    with pytest.raises(BadInput, match=r'now {"name": "cosine", "rounds": 9, "floor": 0.0}'):
        simulate(schedule=Cosine(9)).restore(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"engine": "stacked"},
        {"precision": "tf32"},
        {"deterministic": True},
        {"test": (X, Y)},
        {"evaluate_every": 3},
        {"client_metrics": True},
        {"trust_ratios": True},
        {"diagnostics": ["drift"]},
        {"algorithm": "fedlamb"},
        {"train": lamina.Dataset(X.clone(), Y.clone(), name="a copy")},
        {"schedule": lamina.schedules.Constant()},
    ],
    ids=str,
)
def test_what_does_not_change_the_trajectory_may_differ(changed, saved):
    other = simulate(**changed)
    other.restore(saved)
    assert other.state.round == 2
    other.run(1)


def test_other_starting_weights_may_be_restored_over(saved):
    """The checkpoint holds all weights that train; how the module was initialised no longer matters."""
    fresh = model()
    with torch.no_grad():
        fresh[3].weight.normal_()
    other = simulate(net=fresh)
    other.restore(saved)
    same = simulate()
    same.restore(saved)
    other.run(2), same.run(2)
    assert torch.equal(other.state.server.x, same.state.server.x)


def test_a_digest_depends_on_type_shape_and_values_alone():
    values = torch.arange(1000, dtype=torch.int32).reshape(10, 100)
    assert content_digest(values) == content_digest(values.t().contiguous().t())
    assert content_digest(values) == content_digest(
        torch.cat([values[:1], values])[1:]
    )  # not at the start of its memory
    assert content_digest(values) != content_digest(values.reshape(100, 10))
    assert content_digest(values) != content_digest(values.float())
    assert content_digest(values[:, :3]) != content_digest(values[:, 1:4])
    for odd in (
        torch.zeros(0),
        torch.tensor(True),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(5, dtype=torch.uint8),
    ):
        assert content_digest(odd) == content_digest(odd.clone())
    swapped = values.flatten().clone()
    swapped[[0, 999]] = swapped[[999, 0]]
    assert content_digest(values) != content_digest(swapped.reshape(10, 100))


def test_a_large_data_set_is_hashed_once(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(identity, "content_digest", lambda values: calls.append(1) or content_digest(values))
    data = lamina.Dataset(X, Y)
    for name in ("a", "b"):
        simulation = simulate(train=data, net=nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
        for _ in range(2):
            simulation.run(1)
            simulation.save(tmp_path / name)
    assert len(calls) == 2  # x and y


# --- run folders ------------------------------------------------------------------------------------------------------


def command(out, seed, rounds):
    Path("small.toml").write_text("[data]\nclients = 4\n[model]\nname = 'mlp'\nhidden = 6\n[train]\nbatch_size = 64\n")
    return ["run", "small.toml", "--out", out, "--quiet", *sets(f"train.seed={seed}", f"train.rounds={rounds}")]


def test_checkpoints_of_another_seed_in_a_run_folder_are_refused(empty_folder, capsys):
    for seed in (0, 1):
        assert call(*command(f"seed{seed}", seed, 2)) == 0
    shutil.rmtree("seed1/checkpoints")
    shutil.copytree("seed0/checkpoints", "seed1/checkpoints")
    before = rows("seed1")
    capsys.readouterr()
    assert call(*command("seed1", 1, 4)) == 2
    said = capsys.readouterr().err
    assert "the checkpoint of round 2 in 'seed1/checkpoints' is of another run" in said
    assert "seed = 0 (now 1)" in said
    assert len(said.splitlines()) == 1
    assert rows("seed1") == before
    assert call(*command("seed0", 0, 4)) == 0  # its own are fine, and may run for longer


def test_checkpoints_of_other_settings_in_a_federation_are_refused(tmp_path):
    setup = Setup(tmp_path / "a", "scaffold", rounds=2)
    setup.run()
    other = Setup(tmp_path / "b", "scaffold", rounds=2, seed=6)
    other.run()
    shutil.rmtree(other.out / "checkpoints")
    shutil.copytree(setup.out / "checkpoints", other.out / "checkpoints")
    (other.out / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"is of another run: seed = 5 \(now 6"):
        other.run()
    (manifest,) = (setup.out / "checkpoints").glob("round-000002.json")
    assert json.loads(manifest.read_text())["content"]["identity"]["seed"] == 5


def test_an_older_format_is_refused_with_a_line(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "old")
    (manifest,) = (tmp_path / "old").glob("round-000002.json")
    content = json.loads(manifest.read_text())["content"] | {"format": 1}
    sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": sha256, "content": content}))
    with pytest.raises(BadInput, match="has format 1; this version of lamina reads 3: resume with"):
        simulate().restore(tmp_path / "old")


def test_a_run_with_an_option_that_was_removed_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "old")
    (manifest,) = (tmp_path / "old").glob("round-000002.json")
    content = json.loads(manifest.read_text())["content"]
    content["identity"] |= {"algorithm.bias_correction": True}
    sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": sha256, "content": content}))
    with pytest.raises(BadInput, match=r"algorithm\.bias_correction = true \(now none\)"):
        simulate().restore(tmp_path / "old")
