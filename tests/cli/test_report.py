"""`lamina report`: the files it writes, and errors in one line."""

import json
import sys
from pathlib import Path

import pytest

from helpers import call
from lamina.experiment.runs.records import FORMAT
from lamina.report import figures
from run_folders import write_run


def test_a_real_run_and_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "FORMATS", ("svg",))  # the others are tested on one figure: they take their time
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("small.toml").write_text(
        '[data]\nname = "digits"\nclients = 6\npartition = { name = "classes", k = 2 }\n'
        '[model]\nname = "mlp"\nhidden = 8\n[algorithm]\nname = "fedlamb"\n[train]\nrounds = 2\n'
    )
    assert call("run", "small.toml", "--out", "runs/one", "-q") == 0
    assert call("report", "runs", "--figures", "figures", "--target", "0.05", "--title", "Tiny") == 0
    assert "report in report.html" in capsys.readouterr().out
    text = Path("report.html").read_text()
    assert "<h1>Tiny</h1>" in text
    written = {path.name for path in Path("figures").iterdir()}
    assert {"accuracy-by-bytes.svg", "train-loss-by-round.svg", "partition.svg", "results.csv"} <= written
    assert {"cost-to-target.csv", "common-configuration.csv"} <= written
    assert call("report", "runs") == 0  # an earlier report is replaced
    Path("report.html").write_text("mine")
    assert call("report", "runs") == 2
    assert "is there and is no report" in capsys.readouterr().err
    assert Path("report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no folder 'nowhere'"),
        (["empty"], "no run in 'empty'"),
        (["good", "--target", "90"], "--target 90: must be an accuracy above 0 and up to 1"),
        (["bad"], "is not a run's configuration: KeyError('train')"),
        (["good", "--out", "good"], "cannot write 'good'"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("empty").mkdir()
    write_run(Path("good"), [0.5])
    write_run(Path("bad"), [0.5])
    Path("bad/config.json").write_text(json.dumps({"format": FORMAT, "algorithm": {"name": "fedavg"}}))
    assert call("report", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
