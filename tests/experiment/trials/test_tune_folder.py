"""The folder of a tuning: whose it is, what may change when it resumes, and what a killed --overwrite leaves."""

import csv
from pathlib import Path

import pytest

from helpers import Killed, call, said_in_one_line, skip_pictures, words
from lamina.experiment.runs import records
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.records import find_records

TOML = """
[data]
clients = 6
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 6

[algorithm]
name = "fedavg"

[train]
rounds = 3
batch_size = 64
"""
TPE = """
[tune]
sampler = "tpe"
[tune.space]
"train.lr" = { low = 0.001, high = 1.0, log = true }
"""


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("grid.toml").write_text(TOML + '[tune.grid]\n"train.lr" = [0.05, 0.2]\n')
    Path("tpe.toml").write_text(TOML + TPE)
    skip_pictures(monkeypatch)


def times_in(folder):
    """The seconds of all rounds, which no run shares with another."""
    return {seconds for record in find_records([folder]) for seconds in record.history.column("seconds")}


def tune(file, *more, out):
    return words("tune", out, *more, file=file)


def table(folder):
    with Path(folder, "trials.csv").open() as file:
        return list(csv.DictReader(file))


RATES = 'tune.grid={"train.lr" = [0.05, 0.2]}'


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("train.seed=1",), "train.seed = 0 (now 1)"),
        (("train.seed=1", "tune.seeds=3"), "train.seed = 0 (now 1)"),
        (("algorithm.decay=0.1",), "algorithm.decay = 0.0 (now 0.1)"),
        (('tune.grid={"algorithm.decay" = [0.0, 0.1]}',), "tuning.grid.train.lr"),
        (('tune.grid={"train.lr" = [0.3], "algorithm.decay" = [0.1]}',), "tuning.grid.algorithm.decay"),
    ],
)
def test_a_grid_refuses_the_folder_of_another_tuning(here, capsys, settings, said):
    """Even if none of its runs has the name of an earlier one."""
    assert call(*tune("grid.toml", RATES, "train.rounds=1", out="t")) == 0
    before = {path: path.read_bytes() for path in Path("t").rglob("*") if path.is_file()}
    grid = () if "tune.grid" in settings[0] else ('tune.grid={"train.lr" = [0.3]}',)
    assert call(*tune("grid.toml", "train.rounds=1", *grid, *settings, out="t")) == 2
    line = said_in_one_line(capsys)
    assert "holds another tuning" in line
    assert said in line
    assert {path: path.read_bytes() for path in before} == before
    assert len(find_records(["t"])) == 2


def test_a_grid_may_grow_and_shrink(here):
    assert call(*tune("grid.toml", RATES, "train.rounds=1", out="t")) == 0
    more = 'tune.grid={"train.lr" = [0.2, 0.3, 0.05]}'
    assert call(*tune("grid.toml", more, "train.rounds=2", "tune.seeds=2", out="t")) == 0
    assert [(row["trial"], row["seeds"]) for row in table("t")] == [("lr0.2", "2"), ("lr0.3", "2"), ("lr0.05", "2")]
    assert call(*tune("grid.toml", RATES, "train.rounds=2", out="t")) == 0


def test_a_grid_without_a_finished_round_leaves_the_folder_free(here, monkeypatch):
    def dying(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record", dying)
        with pytest.raises(Killed):
            call(*tune("grid.toml", RATES, out="t"))
    assert call(*tune("grid.toml", RATES, "train.seed=1", "train.rounds=1", out="t")) == 0


@pytest.mark.long
@pytest.mark.parametrize("moment", [0, 1, 2])
@pytest.mark.parametrize("kind", ["tune", "compare"])
def test_runs_that_a_killed_overwrite_left_are_not_taken_for_new_ones(here, monkeypatch, kind, moment):
    def arguments(rates):
        values = {"tune": f'tune.grid={{"train.lr" = {rates}}}', "compare": f"compare.grid.fedavg.lr={rates}"}[kind]
        return words(kind, "t", values, "train.rounds=1", "compare.algorithms=['fedavg']", file="grid.toml")

    assert call(*arguments([0.05, 0.1, 0.2])) == 0
    remove, left = records.remove_records, [moment]

    def dying(folder):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        remove(folder)

    with monkeypatch.context() as patch:
        patch.setattr(records, "remove_records", dying)
        with pytest.raises(Killed):
            call(*arguments([0.2, 0.3]), "--overwrite")
    left_over = times_in("t")
    assert call(*arguments([0.2, 0.3])) == 0  # as `lamina` says: without --overwrite
    assert {record.lr for record in find_records(["t"])} == {0.2, 0.3}
    assert not left_over & times_in("t")


@pytest.mark.parametrize("files", [("grid.toml", "tpe.toml"), ("tpe.toml", "grid.toml")])
def test_an_overwriting_tuning_leaves_nothing_of_another_kind(here, capsys, files):
    pytest.importorskip("optuna")
    few = ("train.rounds=1", "tune.trials=1")
    first, second = files
    assert call(*tune(first, *few, out="t")) == 0
    assert call(*tune(second, *few, out="t")) == 2
    assert "holds another tuning" in said_in_one_line(capsys)
    assert call(*tune(second, *few, out="t"), "--overwrite") == 0
    assert len(find_records(["t"])) == (1 if second == "tpe.toml" else 2)
    assert Path("t/study.db").exists() is (second == "tpe.toml")


def test_an_overwriting_grid_that_is_killed_belongs_to_the_new_tuning(here, capsys, monkeypatch):
    assert call(*tune("grid.toml", RATES, "train.rounds=1", out="t")) == 0
    other = ("train.rounds=1", "train.seed=7")

    def dying(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "checkpoint", dying)
        with pytest.raises(Killed):
            call(*tune("grid.toml", RATES, *other, out="t"), "--overwrite")
    assert not Path("t/best.toml").exists()
    assert call(*tune("grid.toml", RATES, "train.rounds=1", out="t")) == 2
    assert "train.seed = 7 (now 0)" in said_in_one_line(capsys)
    assert call(*tune("grid.toml", RATES, *other, out="t")) == 0
    assert {record.seed for record in find_records(["t"])} == {6}
