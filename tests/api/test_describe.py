"""Simulations described by arguments and recorded in a folder: resuming, and folders of other runs."""

import dataclasses
import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import lamina
from helpers import call
from lamina.api.describe import describe
from lamina.data import Augment
from lamina.experiment import config
from lamina.experiment.build import settings_of
from lamina.experiment.runs.records import read_record
from lamina.objective.losses import CrossEntropy
from lamina.training.metrics import METRICS
from two_classes import X, Y, numbers, own_metric, simulate


def test_a_simulation_with_a_folder_resumes_and_ends_as_one_run(tmp_path):
    whole = simulate()
    whole.run(5)
    first = simulate(out=tmp_path / "r")
    first.run(2)
    first.run(1)
    rows = []
    again = simulate(out=tmp_path / "r")
    assert numbers(again.history) == numbers(first.history)  # before `run`
    assert torch.equal(again.state.server.x, first.state.server.x)
    history = again.run(5, on_round=rows.append)
    assert [row["round"] for row in rows] == [4, 5]
    assert numbers(history) == numbers(whole.history) == numbers(read_record(tmp_path / "r").history)
    assert torch.equal(again.state.server.x, whole.state.server.x)
    for name in ("config.json", "environment.json", "log.txt", "model.safetensors", "best.safetensors"):
        assert (tmp_path / "r" / name).exists()
    done = simulate(out=tmp_path / "r")
    done.run(3)  # the folder is further
    assert done.state.round == 5
    done.run(3)  # 6 in all
    assert done.state.round == 6


def test_a_round_that_the_folder_lacks_is_trained_again(tmp_path):
    simulation = simulate(out=tmp_path / "r")
    simulation.run_round()
    assert [row["round"] for row in simulation.run(2)] == [1, 2]
    assert numbers(simulation.history) == numbers(simulate().run(2))


def test_the_folder_is_the_one_of_lamina_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(
        """
        [data]
        clients = 4
        [model]
        name = "mlp"
        [algorithm]
        name = "fedavg"
        [train]
        rounds = 1
        participation = 1.0
        [run]
        device = "cpu"
        """
    )
    assert call("run", "a.toml", "--out", "r", "-q") == 0
    stored = json.loads((tmp_path / "r" / "config.json").read_text())
    simulation = lamina.Simulation("mlp", "digits", "fedavg", clients=4, device="cpu", out="r")
    assert len(simulation.run(2)) == 2  # resumed after the command's round
    now = json.loads((tmp_path / "r" / "config.json").read_text())
    assert now["train"].pop("rounds") == 2
    assert stored["train"].pop("rounds") == 1
    assert now == stored
    assert call("run", "a.toml", "--out", "r", "-q", "--set", "train.rounds=2") == 0  # complete


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": (X + 1, Y)}, "holds another run: the contents of the data (data.content) changed; choose"),
        (
            {"model": nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))},
            "settings or initial weights (model.values) changed",
        ),
        ({"lr": 0.2}, "train.lr = 0.1 (now 0.2)"),
        ({"algorithm": lamina.FedAvg(decay=0.1)}, "algorithm.decay"),
        (
            {"loss": lambda outputs, targets: (outputs[:, 0] - targets) ** 2},
            "the weights or other values of the loss (loss_values) changed",
        ),
        ({"clients": [range(60), range(60, 120)]}, "data.partition"),
        ({"partition": lamina.data.Classes(k=1)}, "data.partition"),
    ],
)
def test_a_folder_of_another_simulation_is_refused(tmp_path, changes, named):
    simulate(out=tmp_path / "r").run(1)
    other = simulate(out=tmp_path / "r", **changes)
    with pytest.raises(lamina.BadInput, match="holds another run") as error:
        other.run(2)
    assert named in str(error.value)
    other = simulate(out=tmp_path / "r", overwrite=True, **changes)
    assert len(other.run(1)) == 1


def with_factor(factor):
    scope = {"cross_entropy": nn.functional.cross_entropy}
    exec(f"def loss(o, t): return cross_entropy(o, t, reduction='none') * {factor}", scope)
    return scope["loss"]


def scaled_net(slope):
    return nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(slope), nn.Linear(4, 2))


def hit_rate(factor):
    return lamina.Metric("hit_rate", lambda outputs, targets: factor * (outputs.argmax(1) == targets).double().mean())


@pytest.mark.parametrize(
    ("setting", "one", "other", "key"),
    [
        ("loss", with_factor(1), with_factor(2), "loss_values"),
        ("loss", CrossEntropy(weight=[1.0, 1.0]), CrossEntropy(weight=[1.0, 2.0]), "loss_values"),
        ("model", lambda: scaled_net(0.1), lambda: scaled_net(0.2), "model_values"),
        ("metrics", hit_rate(1), hit_rate(0.5), "metrics_values"),
    ],
    ids=["loss", "weights", "model", "metric"],
)
def test_changed_code_behind_a_name_is_another_run(tmp_path, monkeypatch, setting, one, other, key):
    module = SimpleNamespace(thing=one)
    monkeypatch.setitem(sys.modules, "own_thing", module)
    settings = {"out": tmp_path / "r", setting: "own_thing:thing"}
    simulate(**settings).run(1)
    simulate(**settings).run(1)
    module.thing = other
    with pytest.raises(lamina.BadInput, match=key):
        simulate(**settings).run(1)


def test_changed_code_of_an_algorithm_is_another_run(tmp_path):
    def fast(factor):
        @lamina.algorithm("fast_avg", title="Fast", reference="", lr=0.1)
        class Fast(lamina.FedAvg):
            def step(self, local, down, grad, lr, layers):
                return super().step(local, down, grad, factor * lr, layers)

        return Fast()

    with mock.patch.dict(lamina.algorithms.registry()):
        for _ in range(2):
            simulate(algorithm=fast(1), out=tmp_path / "r").run(1)
        with pytest.raises(lamina.BadInput, match="class of the algorithm"):
            simulate(algorithm=fast(2), out=tmp_path / "r").run(1)


def test_a_change_of_laminas_own_metrics_makes_no_other_run(tmp_path, monkeypatch):
    simulate(out=tmp_path / "r", metrics=["f1", hit_rate(1)]).run(1)
    changed = dataclasses.replace(METRICS["f1"], function=METRICS["f1_micro"].function)
    monkeypatch.setitem(METRICS, "f1", changed)
    assert len(simulate(out=tmp_path / "r", metrics=["f1", hit_rate(1)]).run(1)) == 1


def test_a_changed_loss_of_the_same_name_is_another_run(tmp_path):
    simulate(out=tmp_path / "r", loss=with_factor(1)).run(1)
    simulate(out=tmp_path / "r", loss=with_factor(1)).run(1)
    with pytest.raises(lamina.BadInput, match="loss_values"):
        simulate(out=tmp_path / "r", loss=with_factor(2)).run(1)


def test_a_diverged_folder_raises_again(tmp_path):
    for _ in range(2):
        wild = simulate(out=tmp_path / "r", lr=1e30)
        with pytest.raises(lamina.Diverged):
            wild.run(3)


def sharper_bias(outputs, targets):
    return (outputs.argmax(1) - targets).float().mean().abs() ** 2


def test_a_folder_keeps_own_metrics_and_held_out_clients(tmp_path):
    settings = {"metrics": [own_metric(), "accuracy"], "heldout_clients": (0,), "local_test": 0.2, "out": tmp_path}
    simulate(**settings).run(1)
    history = simulate(**settings).run(2)
    assert (history.metric, len(history), read_record(tmp_path).history.metric) == ("bias", 2, "bias")
    for changed in ({"metrics": [own_metric(sharper_bias), "accuracy"]}, {"local_test": 0.3}, {"heldout_clients": [1]}):
        with pytest.raises(lamina.BadInput, match="holds another run"):
            simulate(**settings | changed).run(2)


def test_data_may_have_the_name_of_a_file_format(tmp_path):
    named = lamina.Dataset(X, Y, name="images")
    simulate(data=named, out=tmp_path).run(1)
    assert read_record(tmp_path).config["data"]["name"] == "own images"


def test_a_population_refuses_folders(tmp_path):
    with pytest.raises(lamina.BadInput, match="a population writes no folders"):
        lamina.Population([simulate(out=tmp_path / "r"), simulate()])


def test_a_file_and_the_python_arguments_describe_the_same_augmentation():
    given = Augment(2, flip=False, crop_probability=0.25, fill="mean")
    written = {"augment": True, "augment_pad": 2, "augment_flip": False, "augment_crop_probability": 0.25}
    from_file = config.parse({"data": {**written, "augment_fill": "mean"}})
    assert settings_of(from_file)["augmentation"] == given
    from_python = describe("mlp", "digits", settings={"augmentation": given})
    assert settings_of(from_python)["augmentation"] == given
    for key, value in (("augment_crop_probability", 0.0), ("augment_crop_probability", 1.5), ("augment_fill", "white")):
        with pytest.raises(lamina.BadInput, match=key):
            config.parse({"data": {"augment": True, key: value}})
