"""Comparisons: folders of ordinary runs, stacked where they can be, that go on after a kill."""

import csv
import functools
import io
import json
import math
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console

from helpers import assert_same, call, finish, kill, rows, sets, start
from lamina import BadInput, Simulation
from lamina.cli import base
from lamina.experiment import compare as comparing
from lamina.experiment import tuner
from lamina.experiment.config import load
from lamina.experiment.records import find_records, read_record
from lamina.experiment.settings import folder_name
from lamina.report.rates import responses
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.locks import Lock

TOML = """
[data]
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 6

[train]
rounds = 12
participation = 0.4
batch_size = 64

[compare]
algorithms = ["fedavg", "scaffold"]
seeds = 2
target = 0.3

[compare.grid]
fedavg.lr = [0.05, 0.2]
"""
RUNS = (
    "tuning/fedavg/lr0.05",
    "tuning/fedavg/lr0.2",
    "fedavg/seed0",
    "fedavg/seed1",
    "scaffold/seed0",
    "scaffold/seed1",
)


@pytest.fixture
def here(empty_folder):
    Path("small.toml").write_text(TOML)
    return empty_folder


def command(out, *more):
    return ["compare", str(Path("small.toml").resolve()), "--out", str(Path(out).resolve()), "--quiet", *sets(*more)]


def assert_same_comparison(a, b, runs=RUNS):
    for name in runs:
        assert_same(Path(a, name), Path(b, name))
    for name in ("tuning.csv", "config.json"):
        assert Path(a, name).read_bytes() == Path(b, name).read_bytes()
    assert table(a) == table(b)


def table(path):
    """rounds.csv without the times."""
    with (Path(path) / "rounds.csv").open() as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def test_a_comparison_is_a_folder_of_ordinary_runs(here):
    assert call(*command("c")) == 0
    records = {str(record.folder.relative_to(here / "c")): record for record in find_records(["c"])}
    assert set(records) == set(RUNS)
    assert all(record.complete and len(record.history) == 12 for record in records.values())
    assert {name for name, record in records.items() if record.tuning} == set(RUNS[:2])
    assert records["tuning/fedavg/lr0.2"].config["data"]["validation"] == 0.2
    chosen = records["fedavg/seed1"]
    assert (chosen.algorithm, chosen.seed, chosen.config["data"]["validation"]) == ("fedavg", 1, None)
    scores = {records[name].lr: records[name].history.best() for name in RUNS[:2]}
    assert chosen.lr == max(scores, key=scores.get)
    # any of them can be gone on with as a run of its own: here it is complete
    settings = ("algorithm.name=fedavg", "train.seed=1", f"train.lr={chosen.lr}")
    run = ["run", "small.toml", "--out", "c/fedavg/seed1", *sets(*settings)]
    assert call(*run) == 0
    assert len(rows("c/fedavg/seed1")) == 12
    tuning = ["run", "small.toml", "--out", "again", "-q", "--set", "algorithm.name=fedavg", "--set", "train.lr=0.2",
              "--set", "data.validation=0.2"]  # fmt: skip
    assert call(*tuning) == 0
    assert [row["accuracy"] for row in rows("again")] == pytest.approx(
        [row["accuracy"] for row in rows("c/tuning/fedavg/lr0.2")], abs=0.01
    )


def test_side_by_side_gives_the_results_of_separate_runs(here, monkeypatch):
    grouped = []
    monkeypatch.setattr(tuner, "stackable", lambda runs, old=tuner.stackable: grouped.append(old(runs)) or grouped[-1])
    every = "run.evaluate_every=5"  # and the last round
    assert call(*command("stacked", every)) == 0
    assert [[len(group) for group in groups] for groups in grouped] == [[2], [2], [2]]
    monkeypatch.setattr(tuner, "stackable", lambda runs: [[run] for run in runs])
    assert call(*command("separate", every)) == 0
    for name in RUNS:
        for a, b in zip(rows(Path("stacked", name)), rows(Path("separate", name)), strict=True):
            assert a == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in b.items()}
    assert ["accuracy" in row for row in rows("stacked/fedavg/seed0")] == [r in (5, 10, 12) for r in range(1, 13)]


def test_runs_of_the_loop_engine_are_compared_too(here):
    assert call(*command("c", "run.engine=loop", "train.rounds=2")) == 0
    assert all(record.config["run"]["engine"] == "loop" for record in find_records(["c"]))


@pytest.mark.long
def test_killed_and_started_again_it_ends_the_same(here):
    longer = "train.rounds=40"
    assert finish(command("a", longer)) == 0
    moments = random.Random(0)
    for _ in range(6):
        killed = kill(start(command("b", longer)), here / "b", rounds=20, delay=moments.uniform(0, 0.05))
        assert killed, "the comparison ended before it was killed: give it more rounds"
    assert finish(command("b", longer)) == 0
    assert_same_comparison("a", "b")


@pytest.mark.parametrize("behind", ["seed0", "seed1"])
def test_members_one_round_apart_go_on_from_the_round_they_share(here, behind, capsys):
    """A kill between two members' checkpoints of the seventh round."""
    untuned = "compare.grid.fedavg.lr=[0.05]"  # with more rounds another rate may be the best
    assert call(*command("whole", untuned)) == 0
    assert call(*command("c", untuned, "train.rounds=7")) == 0
    place = here / "c" / "scaffold" / behind
    (place / "checkpoints" / "round-000007.json").unlink()
    for seed in ("seed0", "seed1"):
        (here / "c" / "scaffold" / seed / "model.safetensors").unlink()
    metrics = place / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:6]) + '{"round": 7, "tr')
    assert call(*command("c", untuned)) == 0
    assert capsys.readouterr().err == ""  # nothing is damaged
    assert_same_comparison("whole", "c", RUNS[2:])
    for seed in ("seed0", "seed1"):
        assert "going on after round 6" in (here / "c" / "scaffold" / seed / "log.txt").read_text()
    assert "going on after round 7" in (here / "c" / "fedavg" / "seed0" / "log.txt").read_text()


def test_a_kill_between_two_final_models(here):
    assert call(*command("whole")) == 0
    shutil.copytree("whole", "c")
    (here / "c" / "scaffold" / "seed1" / "model.safetensors").unlink()
    assert call(*command("c")) == 0
    assert_same_comparison("whole", "c")


def test_more_seeds_and_methods_are_added_to_what_is_there(here, monkeypatch):
    assert call(*command("c")) == 0
    before = {name: (here / "c" / name / "metrics.jsonl").read_bytes() for name in RUNS}
    assert call(*command("c", "compare.seeds=3", "compare.algorithms=['fedavg', 'scaffold', 'fedlada']")) == 0
    assert {name: (here / "c" / name / "metrics.jsonl").read_bytes() for name in RUNS} == before
    assert len(table("c")) == 3 * 3 * 12
    monkeypatch.setattr(Simulation, "record", None)
    assert call(*command("c")) == 0  # complete: nothing is trained
    assert len(table("c")) == 2 * 2 * 12


def test_fewer_methods_and_seeds_leave_one_story_in_the_folder(here, capsys):
    """Tables, picture and report are all of what was asked for, and a note names what else is there."""
    quick = ("train.rounds=2", "compare.grid={}", "train.lr=0.1")
    assert call(*command("c", *quick)) == 0
    assert call(*[word for word in command("c", *quick) if word != "--quiet"]) == 0
    assert "not asked for" not in capsys.readouterr().out
    fewer = command("c", *quick, "compare.algorithms=['fedavg']", "compare.seeds=1")
    assert call(*[word for word in fewer if word != "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "the folder holds runs that were not asked for now" in said
    assert "fedavg/seed1, scaffold/seed0, scaffold/seed1; `lamina report" in said
    assert len(table("c")) == 2
    assert list(json.loads(Path("c/config.json").read_text())["algorithms"]) == ["fedavg"]
    page = Path("c/report.html").read_text()
    assert "1 curve from 1 run " in page
    assert rows("c/scaffold/seed1")  # still there
    assert call(*command("c", *quick)) == 0
    assert len(table("c")) == 2 * 2 * 2


def test_a_log_is_about_its_own_run(here):
    assert call(*command("c", "compare.grid.fedavg.lr=[0.05, 1e30]", "train.rounds=2")) == 0
    logs = {name: Path("c", name, "log.txt").read_text() for name in RUNS[2:]}
    logs |= {f"tuning/fedavg/lr{lr}": Path(f"c/tuning/fedavg/lr{lr}/log.txt").read_text() for lr in ("0.05", "1e+30")}
    for name, text in logs.items():
        assert f"c/{name}: " in text
        assert not any(f"c/{other}: " in text for other in logs if other != name)
        assert ("diverged" in text) == name.endswith("1e+30")


def test_another_comparison_is_refused_until_told_to_overwrite(here, capsys):
    assert call(*command("c")) == 0
    kept = ("fedavg/seed0/metrics.jsonl", "rounds.csv", "tuning.csv", "config.json", "comparison.png")
    before = [(here / "c" / name).read_bytes() for name in kept]
    assert call(*command("c", "train.batch_size=32")) == 2
    said = capsys.readouterr().err
    assert "train.batch_size = 64 (now 32)" in said
    assert len(said.splitlines()) == 1
    assert [(here / "c" / name).read_bytes() for name in kept] == before
    assert call(*command("c", "train.batch_size=32"), "--overwrite") == 0
    assert read_record("c/fedavg/seed0").config["train"]["batch_size"] == 32
    config = json.loads((here / "c" / "config.json").read_text())
    del config["format"]
    (here / "c" / "config.json").write_text(json.dumps(config))
    assert call(*command("c")) == 2
    assert "was written by an older lamina" in capsys.readouterr().err


def test_a_damaged_config_is_named(here, capsys):
    Path("c").mkdir()
    Path("c/config.json").write_text("{")
    assert call(*command("c")) == 2
    said = capsys.readouterr().err
    assert "holds a config.json that cannot be read" in said
    assert said.count("\n") == 1


def test_two_comparisons_never_share_a_folder(here, capsys):
    lock = Lock(here / "c")
    assert call(*command("c")) == 2
    assert f"process {os.getpid()} is writing" in capsys.readouterr().err
    lock.release()


def test_choosing_on_the_test_data_is_said(here, capsys):
    assert call(*command("c", "compare.select=test")) == 0
    records = [read_record(Path("c", name)) for name in RUNS[:2]]
    assert all(record.tuning and not record.on_validation_data for record in records)
    assert (
        (here / "c" / "tuning.csv").read_text().startswith("algorithm,learning_rate,rounds,best_test_accuracy,chosen")
    )
    assert call(*[word for word in command("c", "compare.select=test") if word != "--quiet"]) == 0
    said = capsys.readouterr()
    assert "note: rates were chosen on the test data" in said.out
    assert "best test accuracy" in said.err
    assert call(*command("c", "data.validation=0.5")) == 2
    assert "data.validation is for single runs" in capsys.readouterr().err


def test_ctrl_c_shows_the_finished_runs_and_says_how_to_go_on(here, capsys, monkeypatch):
    record, seen = Simulation.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == 4 * 12 + 5:  # tuning and the seeds of fedavg, then five rounds
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", counted)
        assert call(*[word for word in command("c") if word != "--quiet"]) == 130
    said = capsys.readouterr()
    assert "fedavg" in said.out
    assert "scaffold" not in said.out
    assert "table, picture and CSV are of the finished runs; to go on, start the same command again" in said.err
    assert len(table("c")) == 2 * 12
    assert Checkpoints(here / "c" / "scaffold" / "seed1" / "checkpoints").rounds()[-1] == 3
    assert call(*command("c")) == 0
    assert call(*command("whole")) == 0
    assert_same_comparison("whole", "c")


def test_a_member_that_diverges_leaves_the_others_alone(here):
    """After a kill, too: who has diverged is not run again, and the others end as they would have."""
    wild = "compare.grid.fedavg.lr=[0.05, 1e30]"
    assert call(*command("a", wild)) == 0
    record = read_record("a/tuning/fedavg/lr1e+30")
    assert record.ended
    assert not record.complete
    assert "went non-finite" in record.diverged
    with Path("a/tuning.csv").open() as file:
        assert math.isnan(float(list(csv.DictReader(file))[1]["best_validation_accuracy"]))
    assert read_record("a/fedavg/seed0").lr == 0.05
    assert call(*command("b", wild, "train.rounds=5")) == 0
    assert call(*command("b", wild)) == 0
    assert_same("a/tuning/fedavg/lr0.05", "b/tuning/fedavg/lr0.05")


GRID = ("compare.algorithms=['fedlamb']", "compare.seeds=1", "train.rounds=4", "compare.grid.fedlamb.lr=[0.01, 0.1]",
        "compare.grid.fedlamb.decay=[0.0, 0.01, 0.0]")  # fmt: skip


def test_options_are_tried_with_every_rate_side_by_side(here, monkeypatch, capsys):
    grouped = []
    monkeypatch.setattr(tuner, "stackable", lambda runs, old=tuner.stackable: grouped.append(old(runs)) or grouped[-1])
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
        ("compare.grid.fedlamb.decai=[0.1]", "no key 'decai'; did you mean 'decay'"),
        ("compare.grid.fedlamb.decay=[-1.0, 0.0]", "decay = -1.0"),
        ("compare.grid.fedlamb.decay=0.1", "compare.grid.fedlamb.decay = 0.1: must be a list"),
        ("compare.grid.fedlamb.lr=[]", "compare.grid.fedlamb.lr = []: must not be empty"),
        ("compare.grid.fedlamb.name=['fedavg']", "[compare.grid.fedlamb] has no key 'name'"),
        ("compare.lr.fedlamb=[0.1]", "[compare] has no key 'lr'"),
        ("compare.tuning_rounds=0", "compare.tuning_rounds.0 = 0: input should be greater than"),
        ("compare.tuning_rounds=2.5", "compare.tuning_rounds.0 = 2.5: input should be a valid integer"),
        ("compare.tuning_rounds=[3, 0]", "compare.tuning_rounds.1 = 0: input should be greater than"),
        ("compare.tuning_rounds=[3, 3]", "compare.tuning_rounds = [3, 3]: must be a number, or a list of growing"),
        ("compare.tuning_rounds=[]", "compare.tuning_rounds = []: must be a number, or a list of growing numbers"),
        ("compare.tuning_rounds=[3, 13]", "compare.tuning_rounds = [3, 13]: must be at most train.rounds = 12"),
        ("compare.tuning_rounds=13", "compare.tuning_rounds = 13: must be at most train.rounds = 12"),
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
    rates = "compare.grid.fedavg.lr=[0.02, 0.5]"
    assert call(*command("whole", SHORT[0], rates)) == 0
    assert call(*[word for word in command("c", *SHORT, rates) if word != "--quiet"]) == 0
    for name in ("tuning/fedavg/lr0.02", "tuning/fedavg/lr0.5"):
        assert read_record(Path("c", name)).complete
        assert len(rows(Path("c", name))) == 4
        assert untimed(Path("c", name)) == untimed(Path("whole", name))[:4]
    assert [len(rows(f"c/fedavg/seed{seed}")) for seed in (0, 1)] == [12, 12]
    assert [read_record(f"{folder}/fedavg/seed0").lr for folder in ("c", "whole")] == [0.02, 0.5]
    assert "held out, in the first 4 rounds\n" in capsys.readouterr().out
    assert json.loads(Path("c/config.json").read_text())["compare"]["tuning_rounds"] == [4]
    assert call(*[word for word in command("whole", SHORT[0], rates) if word != "--quiet"]) == 0
    assert "in the first" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["cosine", "{name='milestones', at=[3, 6]}"])
def test_tuning_runs_have_the_rates_of_the_final_ones(here, schedule):
    """A cosine ends with the final runs, not with these."""
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0
    final = read_record("c/fedavg/seed0")
    rates = [row["lr"] for row in rows(f"c/tuning/fedavg/lr{final.lr:g}")]
    assert rates == [row["lr"] for row in rows("c/fedavg/seed0")][:4]
    if schedule == "cosine":  # half a cosine over the 12 final rounds
        assert rates == pytest.approx([final.lr * (1 + math.cos(math.pi * done / 12)) / 2 for done in range(4)])
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0  # the same runs: nothing is refused


def test_short_tuning_runs_go_on_and_are_never_mixed(here, monkeypatch, capsys):
    record, seen = Simulation.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == 2 * 2 + 1:  # two rounds of both rates, then the third
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", counted)
        assert call(*command("c", *SHORT)) == 130
    assert [len(rows(Path("c", name))) for name in RUNS[:2]] == [3, 3]
    assert call(*command("c", *SHORT)) == 0
    assert call(*command("whole", *SHORT)) == 0
    assert_same_comparison("whole", "c", RUNS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", None)
        assert call(*command("c", *SHORT)) == 0  # complete: nothing is trained
    capsys.readouterr()
    assert call(*command("c", *SHORT, "compare.tuning_rounds=3")) == 2
    said = capsys.readouterr().err
    assert "tuning/fedavg/lr0.05' holds another run: train.rounds = 4 (now 3)" in said
    assert said.count("\n") == 1
    assert call(*command("c", *SHORT, "compare.tuning_rounds=6")) == 0  # more are added
    assert call(*command("longer", *SHORT, "compare.tuning_rounds=6")) == 0
    assert_same_comparison("longer", "c", RUNS[:4])


STAGES = (
    "compare.algorithms=['fedavg']",
    "compare.tuning_rounds=[2, 5]",
    "compare.grid.fedavg.lr=[0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 1e30]",
)


def test_the_best_third_goes_on_to_the_next_stage(here, capsys):
    assert call(*command("whole", STAGES[0], STAGES[2], "compare.tuning_rounds=5")) == 0
    assert call(*[word for word in command("c", *STAGES) if word != "--quiet"]) == 0
    said = capsys.readouterr().out
    with Path("c/tuning.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    folders = [folder_name({"lr": float(line["learning_rate"])}) for line in table]  # in the order of the grid
    made = {name: rows(Path("c/tuning/fedavg", name)) for name in folders}
    whole = {name: rows(Path("whole/tuning/fedavg", name)) for name in folders}
    first = {name: max((row["accuracy"] for row in own[:2]), default=-1) for name, own in whole.items()}
    going_on = sorted(folders, key=lambda name: -first[name])[:4]  # a third of 10; of equals the first
    for name in folders:
        expected = whole[name][: 5 if name in going_on else 2]
        assert [row["accuracy"] for row in made[name]] == [row["accuracy"] for row in expected]
    assert [int(line["rounds"]) for line in table] == [len(made[name]) for name in folders]
    assert [len(made[name]) for name in folders].count(5) == 4
    longest = max(max(row["accuracy"] for row in own) for own in made.values() if len(own) == 5)
    (chosen,) = [line for line in table if line["chosen"] == "True"]
    assert float(chosen["best_validation_accuracy"]) == longest
    assert "chosen on 20% of the training data, held out, in the first 5 rounds\n" in said
    assert "the best third of what was tried went on after 2 rounds (at least 3)" in said
    (tuned,) = [response for response in responses(find_records(["c"])) if response.on == "validation"]
    assert len(tuned.tried) == 10  # one curve for all stages, so that an edge is one of all that was tried
    assert tuned.chosen == float(chosen["learning_rate"])


def test_stages_go_on_after_a_stop_and_can_be_begun_anew(here, monkeypatch):
    record, seen = Simulation.record, []

    def counted(self, *arguments, **options):
        seen.append(self.state.round)
        if seen.count(4) == 2:  # in the second stage
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", counted)
        assert call(*command("c", *STAGES)) == 130
    assert max(len(rows(path)) for path in Path("c/tuning/fedavg").iterdir()) == 4
    assert call(*command("c", *STAGES)) == 0
    assert call(*command("whole", *STAGES)) == 0
    ended = (path.parent.name for path in Path("whole/tuning/fedavg").glob("*/model.safetensors"))
    names = sorted(f"tuning/fedavg/{name}" for name in ended)
    assert len(names) == 9  # the tenth has diverged
    assert_same_comparison("whole", "c", [*names, "fedavg/seed0", "fedavg/seed1"])
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", lambda self, *rest: seen.append(1) or record(self, *rest))
        assert call(*command("c", *STAGES), "--overwrite") == 0
    assert len(seen) == 9 * 2 + 4 * 3 + 2 * 12  # no round twice: nine of two rounds, four go on, two seeds
    assert_same_comparison("whole", "c", [*names, "fedavg/seed0", "fedavg/seed1"])
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "record", None)
        assert call(*command("c", *STAGES)) == 0  # complete: nothing is trained


def test_more_runs_than_may_be_open_at_once(here, monkeypatch):
    assert call(*command("a", *GRID)) == 0
    monkeypatch.setattr(tuner, "MOST_AT_ONCE", 3)
    ended = []
    monkeypatch.setattr(comparing.Watcher, "run_ended", lambda self, job, record: ended.append(job.folder))
    assert call(*command("b", *GRID)) == 0
    assert len(ended) == len(set(ended)) == 5
    assert Path("a/tuning.csv").read_text() == Path("b/tuning.csv").read_text()


def test_a_record_of_a_run_that_is_still_going(here):
    assert call(*command("c")) == 0
    metrics = here / "c" / "fedavg" / "seed0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]) + '{"round": 6, "lo')
    record = read_record(metrics.parent)
    assert (len(record.history), record.complete, record.ended) == (5, False, False)
    with pytest.raises(BadInput, match="no run in"):
        find_records([here / "c" / "fedavg" / "seed0" / "checkpoints"])
    with pytest.raises(BadInput, match="no folder"):
        find_records(["none"])


def test_a_comparison_writes_nothing_before_it_runs(here):
    experiment = load("small.toml", ["compare.algorithms=['fedlamb']"])
    comparison = comparing.Comparison(experiment, here / "c")
    assert [point["lr"] for point in comparing.points_of(experiment, "fedavg")] == [0.05, 0.2]
    assert comparison.entries == []
    assert not (here / "c").exists()  # nothing is written before it runs


def test_live_bars_on_a_terminal(here, monkeypatch):
    """A bar for every algorithm: what it does, its round, its accuracy."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(base, "err", screen)
    monkeypatch.setattr(base, "Progress", functools.partial(base.Progress, refresh_per_second=1000))
    assert call(*[word for word in command("c", "compare.tuning_rounds=9") if word != "--quiet"]) == 0
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.file.getvalue())
    lines = [line.split() for line in plain.splitlines()]
    assert any(line[:2] == ["scaffold", "waiting"] for line in lines)
    assert any(line[:2] == ["fedavg", "tuning"] and "9/9" in line and "accuracy" in line for line in lines)
    assert any(line[:2] == ["scaffold", "running"] and "12/12" in line for line in lines)
    assert any(line[:2] == ["fedavg", "done"] and "best" in line for line in lines)
