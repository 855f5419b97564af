"""A run's config.json describes the same experiment again."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lamina
from lamina.cli import main
from lamina.experiment.runs.records import find_records

FILE = """\
[data]
clients = 6
partition = { name = "classes", k = 3 }
augment = true
[model]
hidden = 8
[algorithm]
name = "fedlada"
[train]
rounds = 2
local_steps = 3
schedule = "cosine"
metrics = ["f1", "accuracy"]
aggregation = { name = "trimmed_mean", share = 0.2 }
[run]
device = "cpu"
threads = 1
evaluate_every = 2
"""
WEIGHTS = "model.safetensors"


def lamina_run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["run", *map(str, words), "--quiet"])
    return ended.value.code


@pytest.fixture
def first(empty_folder):
    Path("mine.toml").write_text(FILE)
    assert lamina_run("mine.toml", "--out", "runs/x") == 0
    return Path("runs/x")


def test_the_same_experiment_runs_again_in_a_new_folder(first, capsys):
    assert lamina_run(first / "config.json") == 0
    again = first.with_name("x-again")
    assert json.loads((again / "config.json").read_text()) == json.loads((first / "config.json").read_text())
    assert (again / WEIGHTS).read_bytes() == (first / WEIGHTS).read_bytes()
    assert capsys.readouterr().err == ""


def test_it_is_never_resumed_or_replaced_silently(first, capsys):
    assert lamina_run(first / "config.json") == 0
    assert lamina_run(first / "config.json") == 2
    assert "'runs/x-again' exists: resume the run in it with --out runs/x-again" in capsys.readouterr().err
    assert lamina_run(first / "config.json", "--out", "runs/x-again") == 0  # complete
    assert lamina_run(first / "config.json", "--overwrite") == 0
    assert lamina_run(first / "config.json", "--out", "runs/third") == 0
    assert lamina_run(first / "config.json", "--set", "run.out=runs/fourth") == 0
    assert len(find_records(["runs"])) == 4


def test_what_differs_is_said(first, capsys):
    assert lamina_run(first / "config.json", "--set", "train.rounds=1", "--set", "train.lr=0.5") == 0
    error = capsys.readouterr().err
    assert "note: not the same as runs/x/config.json: " in error
    assert "train.rounds = 2 (now 1)" in error
    assert "train.lr" in error
    assert find_records(["runs/x-again"])[0].lr == 0.5


def test_changed_data_are_noticed(empty_folder, capsys):
    rows = "\n".join(f"{i},{i % 2}" for i in range(30))
    Path("a.csv").write_text(f"x,y\n{rows}\n")
    Path("a.toml").write_text('[data]\nname = "table"\npath = "a.csv"\nlabel = "y"\nclients = 2\n[train]\nrounds = 1\n')
    assert lamina_run("a.toml", "--out", "runs/a") == 0
    Path("a.csv").write_text(f"x,y\n{rows}\n99,1\n")
    assert lamina_run("runs/a/config.json") == 0
    assert "the contents of the data (data_digest) changed" in capsys.readouterr().err


def test_natural_clients_are_counted_again(empty_folder):
    rows = "\n".join(f"{i},{i % 2},{'abc'[i % 3]}" for i in range(30))
    Path("a.csv").write_text(f"x,y,site\n{rows}\n")
    Path("a.toml").write_text('[data]\nname="table"\npath="a.csv"\nlabel="y"\nclient="site"\n[train]\nrounds=1\n')
    assert lamina_run("a.toml", "--out", "runs/a") == 0
    assert lamina_run("runs/a/config.json") == 0
    assert find_records(["runs/a-again"])[0].config["data"]["clients"] == 3


def test_a_simulation_of_names_runs_again_and_one_of_objects_is_refused(empty_folder, capsys):
    lamina.Simulation("mlp", "digits", "fedavg", clients=5, lr=0.1, device="cpu", out="runs/names").run(1)
    assert lamina_run("runs/names/config.json") == 0
    assert Path("runs/names", WEIGHTS).read_bytes() == Path("runs/names-again", WEIGHTS).read_bytes()
    data = (torch.randn(20, 3), torch.arange(20) % 2)
    lamina.Simulation(nn.Linear(3, 2), data, "fedavg", clients=2, device="cpu", out="runs/objects").run(1)
    assert lamina_run("runs/objects/config.json") == 2
    assert "objects that no file holds (its data, its model)" in capsys.readouterr().err


def test_an_augmentation_of_the_users_is_not_left_out(empty_folder, capsys):
    def mirrored(batch, generator):
        return batch

    options = {"clients": 5, "device": "cpu", "augmentation": mirrored, "out": "runs/mine"}
    lamina.Simulation("mlp", "digits", "fedavg", **options).run(1)
    assert lamina_run("runs/mine/config.json") == 2
    assert "objects that no file holds (its augmentation)" in capsys.readouterr().err


def test_an_infinite_option_has_not_changed(empty_folder, capsys):
    Path("mine.toml").write_text('[data]\nclients = 5\n[algorithm]\nname = "fedlamb"\n[train]\nrounds = 1\n')
    assert lamina_run("mine.toml", "--out", "runs/mine") == 0
    assert lamina_run("runs/mine/config.json") == 0
    assert json.loads(Path("runs/mine-again/config.json").read_text())["algorithm"]["phi_max"] == "inf"
    assert capsys.readouterr().err == ""
    assert lamina_run("runs/mine/config.json", "--overwrite", "--set", "algorithm.phi_max=9.0") == 0
    assert 'algorithm.phi_max = "inf" (now 9.0)' in capsys.readouterr().err


def test_a_named_augmentation_of_the_users_runs_again(empty_folder, monkeypatch, capsys):
    Path("views_of_mine.py").write_text("def views(batch, generator):\n    return batch\n")
    monkeypatch.syspath_prepend(empty_folder)
    file = '[data]\nclients = 5\naugment = "views_of_mine:views"\n[algorithm]\nname = "fedavg"\n[train]\nrounds = 1\n'
    Path("mine.toml").write_text(file)
    assert lamina_run("mine.toml", "--out", "runs/mine") == 0
    assert lamina_run("runs/mine/config.json") == 0
    assert capsys.readouterr().err == ""
    assert lamina_run("runs/mine/config.json", "--set", "data.augment_pad=2") == 2  # would not act
    assert "augment_pad needs augment = true" in capsys.readouterr().err


def test_another_json_file_is_refused(empty_folder, capsys):
    Path("settings.json").write_text("{}")
    assert lamina_run("settings.json") == 2
    Path("config.json").write_text("{}")
    assert lamina_run("config.json") == 2
    assert capsys.readouterr().err.count("\n") == 2
