"""TensorBoard and CSV hold every round once, however the run came about."""

import builtins
import csv
import io
import logging
from pathlib import Path

import pytest

from helpers import call, sets
from lamina.experiment import build as building
from lamina.experiment.config import load
from lamina.experiment.runs import run as running
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.records import read_record
from lamina.experiment.runs.tensorboard import TensorBoard

TOML = """
[data]
clients = 6
[model]
hidden = 4
[algorithm]
name = "fedavg"
[train]
rounds = 5
lr = 0.02
batch_size = 128
[run]
checkpoint_every = 2
evaluate_every = 2
"""
RUN = Path("runs/small-fedavg-seed0")


@pytest.fixture
def here(empty_folder):
    Path("small.toml").write_text(TOML)
    return empty_folder


def die_in_round(number):
    """Train as `lamina run --tensorboard` does, up to a kill after a round's metrics and before its checkpoint."""
    experiment = load("small.toml")
    simulation = building.build(experiment)
    config = building.resolved(experiment, simulation)

    def die(_, row):
        if row["round"] == number:
            raise RuntimeError("killed")

    with RunFolder(RUN, config, tensorboard=TensorBoard(RUN)) as folder:
        running.resume([simulation], [folder])
        with pytest.raises(RuntimeError, match="killed"):
            running.train([simulation], [folder], experiment, on_round=die)


def events(tag, run=RUN):
    """(round, value) of all that is in the event files, in the order it was written."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = []
    for file in sorted((run / "tensorboard").iterdir()):
        for event in loader.EventFileLoader(str(file)).Load():
            found += [(event.step, value.tensor.float_val[0]) for value in event.summary.value if value.tag == tag]
    return found


def test_tensorboard_holds_every_round(here):
    pytest.importorskip("tensorboard")
    assert call("run", "small.toml", "-q", "--tensorboard") == 0
    history = read_record(RUN).history
    assert events("train_loss") == [(row["round"], pytest.approx(row["train_loss"])) for row in history]
    assert [step for step, _ in events("accuracy")] == [2, 4, 5]  # only where it was evaluated


def test_tensorboard_holds_no_round_twice_after_a_kill(here):
    pytest.importorskip("tensorboard")
    die_in_round(3)
    assert [step for step, _ in events("round")] == [1, 2, 3]
    assert call("run", "small.toml", "-q", "--tensorboard") == 0  # resumes after round 2
    assert [step for step, _ in events("round")] == [1, 2, 3, 4, 5]


def test_tensorboard_asked_for_later_holds_the_earlier_rounds_too(here):
    pytest.importorskip("tensorboard")
    assert call("run", "small.toml", "-q") == 0
    assert call("run", "small.toml", "-q", "--tensorboard") == 0  # complete
    assert [step for step, _ in events("round")] == [1, 2, 3, 4, 5]
    assert call("run", "small.toml", "-q", "--set", "train.rounds=6") == 0  # its files are not foreign to the folder
    assert call("run", "small.toml", "-q", "--tensorboard", "--set", "train.rounds=6") == 0
    assert [step for step, _ in events("round")] == [1, 2, 3, 4, 5, 6]


def test_overwrite_removes_what_the_old_run_wrote(here):
    pytest.importorskip("tensorboard")
    assert call("run", "small.toml", "-q", "--tensorboard") == 0
    assert call("run", "small.toml", "-q", "--overwrite") == 0
    assert not (RUN / "tensorboard").exists()


def test_a_missing_package_is_one_line_before_any_work(here, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *rest):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for command in ("run", "compare"):
        assert call(command, "small.toml", "--tensorboard") == 2
        message = capsys.readouterr().err
        assert message == "error: --tensorboard needs tensorboard: pip install -e '.[tensorboard]'\n"
    assert not Path("runs").exists()


def test_events_that_cannot_be_written_do_not_end_the_run(here, monkeypatch, caplog):
    pytest.importorskip("tensorboard")

    def write(self, history):
        raise OSError("the disk is full")

    monkeypatch.setattr(TensorBoard, "_write", write)
    with caplog.at_level(logging.WARNING):
        assert call("run", "small.toml", "-q", "--tensorboard") == 0
    assert [r.getMessage() for r in caplog.records] == [
        "tensorboard gets no more rounds; the run continues: the disk is full"
    ]
    assert read_record(RUN).complete


COMPARE = ["compare", "small.toml", "-q", "--out", "c", "--algorithms", "fedavg", "--seeds", "2",
           *sets("compare.grid.fedavg.lr=[0.01, 0.02]", "train.rounds=2")]  # fmt: skip


@pytest.mark.long
def test_every_run_of_a_comparison_has_its_own_events(here, monkeypatch):
    pytest.importorskip("tensorboard")
    assert call(*COMPARE) == 0
    assert not Path("c/fedavg/seed0/tensorboard").exists()
    assert call(*COMPARE, "--tensorboard") == 0  # complete: what is there is copied
    assert call(*COMPARE, "--overwrite", "--tensorboard") == 0
    for run in ("fedavg/seed0", "fedavg/seed1", "tuning/fedavg/lr0.01", "tuning/fedavg/lr0.02"):
        written = [(row["round"], pytest.approx(row["train_loss"])) for row in read_record(Path("c", run)).history]
        assert events("train_loss", Path("c", run)) == written


def test_export_is_one_table_of_all_runs(here, capsys):
    assert call("run", "small.toml", "-q") == 0
    assert call("run", "small.toml", "-q", "--out", "runs/b", "--set", "train.batch_size=64") == 0
    assert call("export", "runs") == 0
    printed = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [(row["run"], row["round"], row["train.batch_size"]) for row in rows] == [
        (run, str(number), size) for run, size in (("runs/b", "64"), (str(RUN), "128")) for number in range(1, 6)
    ]
    assert list(rows[0])[:8] == [
        "run", "data", "model", "algorithm", "learning_rate", "seed", "train.batch_size", "round"
    ]  # fmt: skip
    assert rows[0]["accuracy"] == ""
    assert float(rows[1]["accuracy"]) == read_record("runs/b").history[1]["accuracy"]
    assert call("export", "runs", "--out", "all.csv") == 0
    assert Path("all.csv").read_text() == printed


def test_export_says_what_is_wrong(here, capsys):
    assert call("export", "nowhere") == 2
    assert capsys.readouterr().err.startswith("error: no folder 'nowhere' in ")
    assert call("run", "small.toml", "-q") == 0
    assert call("export", "runs", "--out", "no/such/folder.csv") == 2
    assert "cannot write 'no/such/folder.csv'" in capsys.readouterr().err
