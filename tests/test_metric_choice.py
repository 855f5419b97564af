"""The first metric decides: the best model, targets, tuning, tables, the report, and a federation's rows."""

import json

import pytest
from safetensors import safe_open

from flower_grid import LoopGrid
from helpers import call
from lamina.experiment.build import build
from lamina.experiment.config import load
from lamina.experiment.records import read_record
from lamina.flower import Federation

OWN = """
import lamina

size = lamina.Metric("size", lambda outputs, targets: outputs.abs().mean(), larger_is_better=False)
"""
FILE = """
[data]
clients = 5
heldout_clients = 0.2
local_test = 0.2
[algorithm]
name = "fedavg"
[train]
rounds = 3
lr = 0.05
metrics = ["own_size:size", "f1", "accuracy"]
[tune.grid]
"train.lr" = [0.5, 0.0001]
"""


@pytest.fixture
def file(empty_folder):
    (empty_folder / "own_size.py").write_text(OWN)
    (empty_folder / "own.toml").write_text(FILE)
    return empty_folder


def test_the_first_metric_chooses_the_best_model_and_is_known_without_the_users_code(file, capsys):
    assert call("run", "own.toml", "--out", "run") == 0
    assert "best size" in capsys.readouterr().out
    rows = [json.loads(line) for line in (file / "run" / "metrics.jsonl").read_text().splitlines()]
    sizes = [row["size"] for row in rows]
    with safe_open(file / "run" / "best.safetensors", "pt") as best:
        assert int(best.metadata()["round"]) == sizes.index(min(sizes)) + 1
    assert {"heldout_f1", "client_size_worst10", "client_accuracy_mean"} <= set(rows[0])
    (file / "own_size.py").unlink()
    history = read_record("run").history
    assert history.metric == "size"
    assert history.best() == min(sizes)
    assert call("watch", "run", "--once") == 0
    assert "test size" in capsys.readouterr().out
    assert call("report", "run", "--out", "page.html", "--target", "9") == 0
    assert '"smaller_is_better":true' in (file / "page.html").read_text()


def test_a_run_without_metrics_keeps_its_configuration(file):
    assert call("run", "--set", "train.rounds=1", "own.toml", "--set", 'train.metrics=["accuracy"]', "--out", "a") == 0
    (file / "plain.toml").write_text("[train]\nrounds = 1\n")
    assert call("run", "plain.toml", "--out", "plain") == 0
    config = json.loads((file / "plain" / "config.json").read_text())
    assert "metrics" not in config
    assert "metrics" not in config["train"]
    assert not {"heldout_clients", "local_test"} & set(config["data"])


def test_tuning_takes_the_direction_of_the_first_metric(file):
    assert call("tune", "own.toml", "--out", "tuned") == 0
    assert "lr = 0.0001" in (file / "tuned" / "best.toml").read_text()  # small outputs, though a worse accuracy


def test_a_wrong_metric_of_a_file_is_one_line(file, capsys):
    assert call("run", "own.toml", "--set", 'train.metrics=["f2"]', "--out", "run") == 2
    assert "unknown metric 'f2'" in capsys.readouterr().err
    assert not (file / "run").exists()


def test_a_federation_evaluates_as_the_simulation_does(file):
    experiment = load("own.toml")
    expected = build(experiment.model_copy(update={"run": experiment.run.model_copy(update={"engine": "loop"})}))
    rows = expected.run(3)
    federation = Federation.from_experiment(experiment, out=str(file / "run"), poll=0.01, state_dir=str(file / "nodes"))
    assert federation.plan.clients.count == 4
    grid = LoopGrid(federation.client_app(), {100 + i: {"partition-id": i, "num-partitions": 4} for i in range(4)})
    federation.server_app()(grid, grid.contexts[100])
    record = read_record("run")
    assert record.history.metric == "size"
    for name in rows[-1]:
        if "seconds" not in name:
            assert record.history[-1][name] == pytest.approx(rows[-1][name], rel=1e-5), name
