"""The first metric decides: the best model, targets, tuning, tables, the report, and a federation's rows."""

import json
import logging

import pytest
import torch
from safetensors import safe_open

import lamina
from flower_grid import LoopGrid
from helpers import call
from lamina.experiment.build import build
from lamina.experiment.config import load
from lamina.experiment.runs.records import read_record
from lamina.flower import Federation
from lamina.report.build import build as build_report

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


def regression(**more):
    x = torch.randn(60, 3, generator=torch.manual_seed(0))
    data, more = (x, x.sum(1)), {"loss": "mse", "clients": 3, "device": "cpu", **more}
    return (torch.nn.Linear(3, 1), data, "fedavg"), {"test": data, **more}


def unknown_from_round(first, name):
    """Return a metric that is NaN from a call on; it is called once before round 1."""
    calls = iter(range(1000))
    return lamina.Metric(name, lambda o, t: float("nan") if next(calls) >= first else 1.0, larger_is_better=False)


def test_a_metric_that_becomes_nan_is_warned_of_once(caplog):
    arguments, settings = regression(metrics=[unknown_from_round(2, "lost"), "r2"])
    history = lamina.Simulation(*arguments, **settings).run(4)
    assert history.best() == history.last() == 1.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("round 2: the metric 'lost' is NaN")


def test_no_settings_are_chosen_by_a_metric_without_numbers():
    arguments, settings = regression(metrics=[unknown_from_round(-1, "never")], rounds=1)
    with pytest.raises(lamina.BadInput, match=r"fedavg: the metric 'never', by which .* is NaN in every round"):
        lamina.compare(*arguments[:2], ["fedavg"], **settings, lr=[0.1, 0.2], seeds=1)
    with pytest.raises(lamina.BadInput, match=r"the metric 'never', by which .* is NaN in every round"):
        lamina.tune(*arguments, **settings, grid={"lr": [0.1, 0.2]})


def test_tuning_needs_no_test_data_for_metrics_and_a_run_does(caplog):
    arguments, settings = regression(metrics="r2", test=None)
    lamina.tune(*arguments, **settings, rounds=1, grid={"lr": [0.1, 0.2]})
    assert "test data" not in caplog.text
    lamina.Simulation(*arguments, **settings).run(2)
    assert caplog.text.count("metrics are computed on test data, and there are none") == 1


def test_a_comparison_prints_a_warning_of_several_runs_once(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger("lamina"), "propagate", False)  # pytest's handlers are the root's
    arguments, settings = regression(metrics=[unknown_from_round(-1, "unknown")], rounds=1)
    lamina.compare(*arguments[:2], ["fedavg"], **settings, seeds=2)
    assert capsys.readouterr().err.count("round 1: the metric 'unknown' is NaN") == 1


@pytest.mark.parametrize("target", [-0.5, 0.0])
def test_a_target_may_be_any_number_for_metrics_that_are_no_fractions(target, tmp_path, capsys):
    arguments, settings = regression(metrics="r2", rounds=3, lr=0.1, seeds=1)
    out = tmp_path / "runs"
    result = lamina.compare(*arguments[:2], ["fedavg"], **settings, target=target, out=out)
    (history,) = result.histories["fedavg"]
    assert history[0]["r2"] > 0
    assert f"r2 {target:g}" in str(result)
    assert dict(zip(result.table().head, result.table().rows[0], strict=True))["rounds\nto target"] == "1.0"
    assert build_report([out]).targets == [target]
    other = tmp_path / "without"
    lamina.compare(*arguments[:2], ["fedavg"], **settings, out=other)
    assert build_report([other]).targets == []
    config = json.loads((other / "fedavg" / "seed0" / "config.json").read_text())
    assert config["compare"]["target"] is None  # and not the default, which is an accuracy
    assert call("report", str(out), "--out", str(tmp_path / "page.html"), "--target", str(target)) == 0
    assert call("report", str(out), "--out", str(tmp_path / "page.html"), "--target", "nan") == 2
    assert "--target nan: must be a finite number" in capsys.readouterr().err
    binary = settings["test"][0], torch.arange(60) % 2
    with pytest.raises(lamina.BadInput, match="above 0 and up to 1"):
        lamina.compare(arguments[0], binary, test=binary, loss="bce", target=target)
