"""How a comparison chooses the settings of each method."""

import csv
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest

from comparisons import ROUNDS, RUNS, TOML, assert_same_comparison, command
from helpers import call, populations, rows, skip_pictures
from lamina.experiment.config import load
from lamina.experiment.runs.records import find_records, read_record
from lamina.experiment.trials import compare as comparing
from lamina.experiment.trials import trials
from lamina.training.training import Training


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


GRID = ("compare.algorithms=['fedlamb']", "compare.seeds=1", "train.rounds=4", "compare.grid.fedlamb.lr=[0.01, 0.1]",
        "compare.grid.fedlamb.decay=[0.0, 0.01, 0.0]")  # fmt: skip


def test_options_are_tried_with_every_rate_side_by_side(here, monkeypatch, capsys):
    grouped = populations(monkeypatch)
    assert call(*[word for word in command("c", *GRID) if word != "--quiet"]) == 0
    assert [[len(group) for group in groups] for groups in grouped] == [[4], [1]]
    said = capsys.readouterr()
    records = {record.folder.name: record for record in find_records(["c/tuning"])}
    assert set(records) == {f"lr{lr}-decay{decay}" for lr in (0.01, 0.1) for decay in (0.0, 0.01)}
    scores = {name: record.history.best() for name, record in records.items()}
    best = records[max(scores, key=scores.get)].config
    final = read_record("c/fedlamb/seed0").config
    assert (final["train"]["lr"], final["algorithm"]["decay"]) == (best["train"]["lr"], best["algorithm"]["decay"])
    kept = json.loads(Path("c/config.json").read_text())["algorithms"]["fedlamb"]
    assert (kept["lr"], kept["decay"]) == (final["train"]["lr"], final["algorithm"]["decay"])
    with Path("c/tuning.csv").open() as file:
        tried = list(csv.DictReader(file))
    assert list(tried[0]) == ["algorithm", "learning_rate", "decay", "rounds", "best_validation_accuracy", "chosen"]
    names = [f"lr{row['learning_rate']}-decay{row['decay']}" for row in tried]
    assert dict(zip(names, (float(row["best_validation_accuracy"]) for row in tried), strict=True)) == scores
    assert [row["decay"] for row in tried if row["chosen"] == "True"] == [str(final["algorithm"]["decay"])]
    assert "note: settings were chosen on 20% of the training data, held out" in said.out
    assert f"fedlamb: lr {final['train']['lr']:g}, decay {final['algorithm']['decay']:g} was chosen" in said.out
    assert "the best decay 0 lies" not in said.out  # nothing lies below 0
    assert re.search(r"tuning fedlamb, lr 0.01, decay 0.01, seed 0, \d+ rounds: best validation accuracy", said.err)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("compare.grid.fedlamb.decai=[0.1]", "no option 'decai'; did you mean 'decay'"),
        ("compare.grid.fedlamb.decay=[-1.0, 0.0]", "decay = -1.0"),
        ("compare.grid.fedlamb.decay=0.1", "compare.grid.fedlamb.decay = 0.1: must be a list"),
        ("compare.grid.fedlamb.lr=[]", "compare.grid.fedlamb.lr = []: must not be empty"),
        ("compare.grid.fedlamb.name=['fedavg']", "[compare.grid.fedlamb] has no key 'name'"),
        ("compare.lr.fedlamb=[0.1]", "[compare] has no key 'lr'"),
        ("compare.tuning_rounds=0", "compare.tuning_rounds = 0: input should be greater than"),
        ("compare.tuning_rounds=2.5", "compare.tuning_rounds = 2.5: input should be a valid integer"),
        ("compare.tuning_rounds=[3, 8]", "compare.tuning_rounds = [3, 8]: input should be a valid integer"),
        ("compare.tuning_rounds=13", "compare.tuning_rounds = 13: must be at most train.rounds = 8"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_runs(here, capsys, setting, said):
    assert call(*command("c", "compare.algorithms=['fedlamb']", setting)) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert not (here / "c").exists()


SHORT = ("compare.algorithms=['fedavg']", "compare.tuning_rounds=4")


def untimed(folder):
    """The rounds of a run without their times."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows(folder)]


def test_settings_are_chosen_in_fewer_rounds(here, capsys):
    """The slow rate is ahead in the first rounds, the fast one at the end."""
    rates = ("compare.grid.fedavg.lr=[0.02, 0.5]", "train.rounds=12", "train.seed=1")
    assert call(*command("whole", SHORT[0], *rates)) == 0
    assert call(*[word for word in command("c", *SHORT, *rates) if word != "--quiet"]) == 0
    for name in ("tuning/fedavg/lr0.02", "tuning/fedavg/lr0.5"):
        assert read_record(Path("c", name)).complete
        assert len(rows(Path("c", name))) == 4
        assert untimed(Path("c", name)) == untimed(Path("whole", name))[:4]
    assert [len(rows(f"c/fedavg/seed{seed}")) for seed in (1, 2)] == [12, 12]
    assert [read_record(f"{folder}/fedavg/seed1").lr for folder in ("c", "whole")] == [0.02, 0.5]
    assert "held out, in the first 4 rounds\n" in capsys.readouterr().out
    assert json.loads(Path("c/config.json").read_text())["compare"]["tuning_rounds"] == 4
    assert call(*[word for word in command("whole", SHORT[0], *rates) if word != "--quiet"]) == 0
    assert "in the first" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["cosine", "{name='milestones', at=[3, 6]}"])
def test_tuning_runs_have_the_rates_of_the_final_ones(here, schedule):
    """A cosine ends with the final runs, not with these."""
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0
    final = read_record("c/fedavg/seed0")
    rates = [row["lr"] for row in rows(f"c/tuning/fedavg/lr{final.lr:g}")]
    assert rates == [row["lr"] for row in rows("c/fedavg/seed0")][:4]
    if schedule == "cosine":  # half a cosine over the final rounds
        assert rates == pytest.approx([final.lr * (1 + math.cos(math.pi * done / ROUNDS)) / 2 for done in range(4)])
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0  # the same runs: nothing is refused


def test_short_tuning_runs_continue_and_are_never_mixed(here, monkeypatch, capsys):
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == 2 * 2 + 1:  # two rounds of both rates, then the third
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", counted)
        assert call(*command("c", *SHORT)) == 130
    assert [len(rows(Path("c", name))) for name in RUNS[:2]] == [3, 3]
    assert call(*command("c", *SHORT)) == 0
    assert call(*command("whole", *SHORT)) == 0
    assert_same_comparison("whole", "c", RUNS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", None)
        assert call(*command("c", *SHORT)) == 0  # complete: nothing is trained
    capsys.readouterr()
    assert call(*command("c", *SHORT, "compare.tuning_rounds=3")) == 2
    said = capsys.readouterr().err
    assert "tuning/fedavg/lr0.05' holds another run: train.rounds = 4 (now 3)" in said
    assert said.count("\n") == 1
    assert call(*command("c", *SHORT, "compare.tuning_rounds=6")) == 0  # more are added
    assert call(*command("longer", *SHORT, "compare.tuning_rounds=6")) == 0
    assert_same_comparison("longer", "c", RUNS[:4])


@pytest.mark.long
def test_more_runs_than_may_be_open_at_once(here, monkeypatch):
    assert call(*command("a", *GRID)) == 0
    monkeypatch.setattr(trials, "MAX_OPEN_RUNS", 3)
    ended = []
    comparison = comparing.Comparison(load("small.toml", GRID), here / "b")
    comparison.on_end = lambda job, record: ended.append(job.folder)
    assert comparison.run()
    assert len(ended) == len(set(ended)) == 5
    assert Path("a/tuning.csv").read_text() == Path("b/tuning.csv").read_text()
