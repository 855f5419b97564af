"""`lamina run`: its records and model, resuming, replacing an earlier run, and Ctrl-C."""

import json
import math
import os
import signal
from unittest import mock

import pytest
from safetensors.torch import load_file

from helpers import call, sets
from lamina import algorithms
from lamina.experiment import build as building
from lamina.experiment.config import load
from lamina.experiment.runs.folder import RunFolder
from lamina.training.training import Training


def rounds_in(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_run_trains_and_keeps_records(here, capsys):
    assert call("run", "small.toml") == 0
    printed = capsys.readouterr()
    assert "Fed-LAMB: 3 rounds, best accuracy" in printed.out
    assert printed.err == ""  # no progress bar outside a terminal
    run = here / "runs" / "small-fedlamb-seed0"
    rows = rounds_in(run)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert 0 <= rows[-1]["accuracy"] <= 1
    config = json.loads((run / "config.json").read_text())
    assert (config["algorithm"]["name"], config["algorithm"]["decay"]) == ("fedlamb", 0.01)
    weights = load_file(run / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == 64 * 16 + 16 + 16 * 10 + 10

    assert call("run", "small.toml") == 0
    printed = capsys.readouterr()
    assert "is complete: 3 rounds" in printed.out
    assert printed.err == ""
    assert call("run", "small.toml", "--overwrite", "--quiet", "--set", "train.rounds=1") == 0
    assert capsys.readouterr() == ("", "")
    assert len(rounds_in(run)) == 1


def test_a_diverging_run_exits_3_and_keeps_its_rounds(here, capsys):
    overrides = sets("algorithm={name='fedavg'}", "train.schedule={name='exponential', gamma=1e30}")
    assert call("run", "small.toml", "--out", "d", *overrides) == 3
    assert "diverged: round" in capsys.readouterr().err
    assert rounds_in(here / "d")


def test_overwrite_replaces_a_run_and_nothing_else(here, capsys):
    quick, before = ("--set", "train.rounds=1", "--quiet"), (here / "small.toml").read_bytes()
    assert call("run", "small.toml", "--out", "r", *quick) == 0
    (here / "r" / "thesis.txt").write_text("years of work")
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 2
    assert "holds other files ('thesis.txt')" in capsys.readouterr().err
    assert (here / "r" / "thesis.txt").read_text() == "years of work"
    (here / "r" / "thesis.txt").unlink()
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 0
    (here / "r" / "config.json").write_text('{"theirs": 1}')
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 2
    assert (here / "r" / "config.json").read_text() == '{"theirs": 1}'
    for place, text in (
        (".", "holds other files"),
        ("small.toml", "Not a directory"),
        ("small.toml/x", "Not a directory"),
    ):
        assert call("run", "small.toml", "--out", place, "--overwrite", *quick) == 2
        assert text in capsys.readouterr().err
    assert (here / "small.toml").read_bytes() == before


def test_out_may_be_the_current_folder_if_it_is_empty(here, monkeypatch):
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert call("run", "../small.toml", "--out", ".", "--quiet") == 0
    assert call("run", "../small.toml", "--out", ".", "--quiet", "--overwrite") == 0


def test_a_run_without_a_finished_round_may_be_replaced(here, capsys):
    wild = ("--set", "train.lr=1e38", "--set", "algorithm.name=fedavg")
    assert call("run", "small.toml", "--out", "r", *wild) == 3
    printed = capsys.readouterr().err
    assert call("run", "small.toml", "--out", "r", *wild) == 3
    assert capsys.readouterr().err == printed  # it is remembered, not run again
    assert call("run", "small.toml", "--out", "r", "--quiet") == 0
    before = (here / "r" / "metrics.jsonl").read_text()
    assert call("run", "small.toml", "--out", "r", "--overwrite", *wild) == 3
    assert (here / "r" / "metrics.jsonl").read_text() == before  # a failed replacement replaces nothing


def test_config_is_resolved_and_files_are_readable(here):
    assert call("run", "small.toml", "--out", "r", "--quiet", "--set", "train.schedule=cosine") == 0
    config = json.loads((here / "r" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["algorithm"]["decay"] == 0.01
    assert config["algorithm"]["phi_max"] == "inf"
    assert set(config["algorithm"]) == {"name", "preset", *algorithms.options(algorithms.FedLamb)}
    assert config["train"]["lr"] == 0.02
    assert config["train"]["schedule"] == {"name": "cosine", "rounds": 3, "floor": 0.0}
    assert config["model"] == {"name": "mlp", "hidden": 16, "depth": 1, "dropout": 0.0}
    assert config["run"]["device"] in ("cpu", "cuda")
    assert config["run"]["engine"] == "stacked"
    environment = json.loads((here / "r" / "environment.json").read_text())
    assert {"lamina", "torch", "numpy", "python", "platform", "device_name", "threads", "started"} <= set(environment)
    modes = {path.name: path.stat().st_mode for path in (here / "r").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_metrics_are_valid_json(here):
    experiment = load("small.toml")
    simulation = building.build(experiment)
    with RunFolder(here / "r", building.resolved(experiment, simulation)) as folder:
        folder.record({"round": 1, "loss": math.nan, "x": math.inf, "accuracy": 0.5}, simulation)
    assert rounds_in(here / "r") == [{"round": 1, "loss": None, "x": None, "accuracy": 0.5}]


@pytest.fixture
def default_ctrl_c():
    """Restore the handler of Ctrl-C: a test run in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signal_after(monkeypatch, rounds, times=1):
    """Send this process Ctrl-C while the round after so many is being recorded."""
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == rounds:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    monkeypatch.setattr(Training, "record", counted)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_stops_after_the_round_and_says_how_to_resume(here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        signal_after(patch, 2)
        assert call("run", "small.toml", "--out", "r") == 130
    printed = capsys.readouterr().err
    assert "stopped after round 2 of 3; run the same command again to resume\n" in printed
    assert len(rounds_in(here / "r")) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert call("run", "small.toml", "--out", "r") == 0
    assert "resuming after round 2" in capsys.readouterr().out
    assert [row["round"] for row in rounds_in(here / "r")] == [1, 2, 3]


@pytest.mark.usefixtures("default_ctrl_c")
def test_a_second_ctrl_c_stops_at_once(here, capsys, monkeypatch):
    signal_after(monkeypatch, 2, times=2)
    assert call("run", "small.toml", "--out", "r") == 130
    assert "interrupted; finished rounds are kept; run the same command again to resume" in capsys.readouterr().err
    assert len(rounds_in(here / "r")) == 1


OWN = """
import lamina

@lamina.algorithm("mine", title="Mine", reference="-", lr=0.1)
class Mine(lamina.FedAvg):
    pass

class Incomplete(lamina.Algorithm):
    card = lamina.FedAvg.card
"""


@mock.patch.dict(algorithms.registry())  # without the test's algorithm afterwards
def test_a_users_algorithm_is_found_in_the_current_folder(here, capsys):
    (here / "own_for_cli_test.py").write_text(OWN)
    (here / "broken_for_cli_test.py").write_text("def f(:")
    (here / "raising_for_cli_test.py").write_text("raise RuntimeError('no\\nlicence')")
    name = "own_for_cli_test:Mine"
    assert call("run", "small.toml", "--out", "r", "--set", f"algorithm.name={name}", "-q") == 0
    assert json.loads((here / "r" / "config.json").read_text())["algorithm"]["name"] == name
    capsys.readouterr()
    for wrong, text in (
        ("broken_for_cli_test:X", "SyntaxError"),
        ("raising_for_cli_test:X", "RuntimeError: no licence"),
        ("own_for_cli_test:Incomplete", "not complete"),
        ("lamina:Algorithm", "not an algorithm class"),
    ):
        assert call("run", "small.toml", "--set", f"algorithm.name={wrong}") == 2
        printed = capsys.readouterr().err
        assert text in printed
        assert len(printed.splitlines()) == 1
    assert call("run", "small.toml", "--set", "model.name=broken_for_cli_test:X") == 2
    assert "cannot load the model" in capsys.readouterr().err


def test_an_empty_file_runs(here):
    (here / "empty.toml").write_text("")
    assert call("run", "empty.toml", "--set", "train.rounds=1", "--out", "r", "-q") == 0
    assert json.loads((here / "r" / "config.json").read_text())["data"]["clients"] == 10


def test_a_run_that_its_patience_stops_says_so(here, capsys):
    settings = sets("train.patience=1", "train.lr=1e-12", "train.rounds=9")  # no round is better than the first
    assert call("run", "small.toml", *settings) == 0
    assert "stopped early: no better accuracy in 1 evaluation\n" in capsys.readouterr().out
    assert len(rounds_in(here / "runs" / "small-fedlamb-seed0")) == 2
    assert call("run", "small.toml", *settings) == 0
    assert "is complete: 2 rounds; raise train.patience for more" in capsys.readouterr().out
