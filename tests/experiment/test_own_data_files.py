"""Experiment files that name the user's own data: run, resume, compare, tune and report."""

import json
import sys

import numpy as np
import pytest
import torch

import lamina
from helpers import call, sets, skip_pictures
from lamina.base.errors import BadInput
from lamina.data import load as load_data
from lamina.data.readers.own import as_splits
from lamina.experiment import build
from lamina.experiment.config import load
from lamina.experiment.trials.tune import with_settings

TABLE = """
[data]
name = "table"
path = "rows.csv"
label = "grade"
client = "clinic"
test = 0.25

[model]
name = "mlp"
hidden = 4

[algorithm]
name = "fedavg"

[train]
rounds = 2
batch_size = 16
lr = 0.1

[compare]
algorithms = ["fedavg", "fedlamb"]
seeds = 1

[tune.grid]
"train.lr" = [0.05, 0.1]
"""
MODULE = """
import numpy as np, lamina

def pairs(n=40, shift=0.0):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype("float32") + shift
    y = np.where(x[:, 0] > shift, "high", "low")
    site = np.arange(n) % 4
    half = n // 2
    return (x[:half], y[:half], {"site": site[:half]}), (x[half:], y[half:])

def broken():
    return 1 / 0

def four():
    return 1, 2, 3, 4

def unseen():
    return (np.zeros((2, 1)), [0, 0]), (np.zeros((2, 1)), [0, 1])

def needs(size):
    return size
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)
    skip_pictures(monkeypatch)
    (tmp_path / "table.toml").write_text(TABLE)
    write_rows(tmp_path / "rows.csv")
    (tmp_path / "own_rows.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("own_rows", None)


def write_rows(path, factor=1.0):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 80)) * factor
    clinics = [["north", "south", "west"][i % 3] for i in range(80)]
    grades = np.where(a > b, "bad", "good")
    rows = [f"{x:.4f},{y:.4f},{clinic},{grade}" for x, y, clinic, grade in zip(a, b, clinics, grades, strict=True)]
    path.write_text("\n".join(["a,b,clinic,grade", *rows, ""]))


def stored(run):
    return json.loads((run / "config.json").read_text())


def test_a_table_runs_on_its_natural_clients_and_resumes(folder, capsys):
    assert call("run", "table.toml", "--out", "r", "--quiet") == 0
    config = stored(folder / "r")
    assert (config["data"]["clients"], config["data"]["partition"]) == (3, {"name": "by-column", "column": "clinic"})
    assert config["class_names"] == ["bad", "good"]
    assert call("run", "table.toml", "--out", "r", "--quiet", *sets("train.rounds=3")) == 0
    assert len((folder / "r" / "metrics.jsonl").read_text().splitlines()) == 3
    capsys.readouterr()
    write_rows(folder / "rows.csv", factor=2.0)  # the same names and labels, but other numbers
    assert call("run", "table.toml", "--out", "r", "--quiet", *sets("train.rounds=4")) == 2
    assert "the contents of the data (data_digest)" in capsys.readouterr().err
    assert call("run", "table.toml", "--out", "r2", "--quiet", *sets("data.partition=iid", "data.clients=5")) == 0
    assert stored(folder / "r2")["data"]["clients"] == 5


def test_compare_tune_and_report_take_a_table(folder):
    assert call("compare", "table.toml", "--out", "c", "--quiet") == 0
    assert {path.name for path in (folder / "c").iterdir()} >= {"fedavg", "fedlamb", "rounds.csv"}
    assert call("tune", "table.toml", "--out", "t", "--quiet") == 0
    with pytest.raises(BadInput, match=r"'data.standardise' cannot be tuned: all trials have the same data"):
        with_settings(load("table.toml"), {"data.standardise": True})
    pytest.importorskip("plotly")
    assert call("report", "c", "--out", "page.html") == 0
    assert "by-column" in (folder / "page.html").read_text()


def test_a_function_of_the_users_own(folder, capsys):
    settings = ("data.name=own_rows:pairs", "data.n=60", "data.client=site")
    assert call("run", "table.toml", "--out", "f", "--quiet", *sets(*settings)) == 0
    config = stored(folder / "f")
    assert (config["data"]["n"], config["data"]["clients"], config["class_names"]) == (60, 4, ["high", "low"])
    assert "path" not in config["data"]  # it belonged to the old name
    assert call("run", "table.toml", "--out", "f", "--quiet", *sets(*settings, "data.shift=1.5")) == 2
    assert "the contents of the data (data_digest)" in capsys.readouterr().err
    pytest.importorskip("plotly")
    (folder / "own_rows.py").unlink()  # a report does not run the function
    assert call("report", "f", "--out", "page.html") == 0
    assert "4 clients, seed 0" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("own_rows:pears", {}, "cannot load the data 'own_rows:pears'"),
        ("no_such_module:load", {}, "No module named 'no_such_module'"),
        ("own_rows:", {}, "your own data is named 'package.module:name'"),
        ("own_rows:np", {}, "are of type module"),
        ("own_rows:pairs", {"shfit": 3}, "[data] has no key 'shfit'; did you mean 'shift'?"),
        ("own_rows:broken", {}, "ZeroDivisionError: division by zero (own_rows.py:12)"),
        ("own_rows:four", {}, "returned 4 values: return (train, test)"),
        ("own_rows:unseen", {}, "the class '1' appears only in the test data"),
        ("own_rows:needs", {}, "needs the key 'size' for own_rows:needs"),
        ("own_rows:needs", {"size": 3}, "returned an object of type int"),
    ],
)
def test_wrong_functions(name, options, expected):
    with pytest.raises(BadInput) as refused:
        load_data(name, **options)
    assert "\n" not in str(refused.value)
    assert expected in str(refused.value)


def test_what_a_function_may_return():
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    data = lamina.Dataset(x, y, columns={"who": [1, 1, 2, 2]})
    for result in ((data, data), [(x, y), (x, y)], {"train": (x.numpy(), y.numpy()), "test": data}):
        train, test = as_splits("m:load", result)
        assert (len(train), len(test), train.classes) == (4, 4, 2)
    train, _ = as_splits("m:load", ((x, ["a", "b", "a", "b"], {"who": [1, 1, 2, 2]}), (x, ["b", "b", "b", "b"])))
    assert (train.class_names, train.columns["who"].tolist()) == (("a", "b"), [1, 1, 2, 2])
    train, _ = as_splits("m:load", ((x, y.float()), (x, y.float())))
    assert train.classes is None


def test_regression_on_a_table(folder):
    settings = ["data.label=b", "data.features=['a']", "train.loss=mse", "run.engine=loop"]
    simulation = build.build(load("table.toml", settings))
    assert simulation.train_data.classes is None
    assert simulation.run(1).last("loss") > 0


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_other_clients_of_the_same_samples_are_other_data(folder, capsys, command):
    x, y = np.arange(12.0, dtype="float32").reshape(12, 1), np.arange(12) % 2
    site = np.arange(12) % 3
    options = sets("data.name=arrays", "data.path=q.npz", "data.client=site", "train.rounds=1")
    np.savez(folder / "q.npz", x=x, y=y, site=site)
    assert call(command, "table.toml", "--out", "q", "--quiet", *options) == 0
    assert call(command, "table.toml", "--out", "q", "--quiet", *options) == 0  # complete
    np.savez(folder / "q.npz", x=x, y=y, site=np.roll(site, 1))
    assert call(command, "table.toml", "--out", "q", "--quiet", *options) == 2
    assert "the contents of the data (data_digest)" in capsys.readouterr().err
