"""Comparisons: folders of ordinary runs, stacked where they can be, that resume after a kill."""

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
import torch
from rich.console import Console

import lamina
from comparisons import DATA, OF_TWO_RATES, ROUNDS, RUNS, TOML, assert_same_comparison, command, table
from helpers import assert_same, call, finish, kill, rows, sets, skip_pictures, start
from lamina.cli import base
from lamina.experiment.config import load
from lamina.experiment.runs.records import find_records, read_record
from lamina.experiment.trials import compare as comparing
from lamina.storage.checkpoint import Checkpoints
from lamina.training import progress
from lamina.training.training import Training


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished comparison."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(TOML)
    assert comparing.Comparison(load(folder / "small.toml"), folder / "c").run()
    return folder / "c"


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


@pytest.fixture
def whole(here, finished):
    """A copy of a finished comparison."""
    shutil.copytree(finished, here / "whole")
    return here / "whole"


def test_a_comparison_is_a_folder_of_ordinary_runs(here, whole):
    whole.rename("c")
    records = {str(record.folder.relative_to(here / "c")): record for record in find_records(["c"])}
    assert set(records) == set(RUNS)
    assert all(record.complete and len(record.history) == ROUNDS for record in records.values())
    assert {name for name, record in records.items() if record.tuning} == set(RUNS[:2])
    assert records["tuning/fedavg/lr0.2"].config["data"]["validation"] == 0.2
    chosen = records["fedavg/seed1"]
    assert (chosen.algorithm, chosen.seed, chosen.config["data"]["validation"]) == ("fedavg", 1, None)
    scores = {records[name].lr: records[name].history.final() for name in RUNS[:2]}
    assert chosen.lr == max(scores, key=scores.get)
    # `lamina run` can continue any of them as a run of its own: here it is complete
    settings = ("algorithm.name=fedavg", "train.seed=1", f"train.lr={chosen.lr}")
    run = ["run", "small.toml", "--out", "c/fedavg/seed1", *sets(*settings)]
    assert call(*run) == 0
    assert len(rows("c/fedavg/seed1")) == ROUNDS
    tuning = ["run", "small.toml", "--out", "again", "-q", "--set", "algorithm.name=fedavg", "--set", "train.lr=0.2",
              "--set", "data.validation=0.2", "--set", "train.seed=-1"]  # fmt: skip
    assert call(*tuning) == 0
    assert [row["accuracy"] for row in rows("again")] == pytest.approx(
        [row["accuracy"] for row in rows("c/tuning/fedavg/lr0.2")], abs=0.01
    )


@pytest.mark.long
def test_killed_and_started_again_it_ends_the_same(here):
    longer = "train.rounds=40"
    assert finish(command("a", longer)) == 0  # in a process like the others: to the bit, torch's threads matter
    moments = random.Random(0)
    for _ in range(6):
        killed = kill(start(command("b", longer)), here / "b", rounds=20, delay=moments.uniform(0, 0.05))
        assert killed, "the comparison ended before it was killed: give it more rounds"
    assert finish(command("b", longer)) == 0
    assert_same_comparison("a", "b")


@pytest.mark.long
@pytest.mark.parametrize("behind", ["seed0", "seed1"])
def test_members_one_round_apart_resume_from_the_round_they_share(here, behind, capsys):
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
        assert "resuming after round 6" in (here / "c" / "scaffold" / seed / "log.txt").read_text()
    assert "resuming after round 7" in (here / "c" / "fedavg" / "seed0" / "log.txt").read_text()


def test_a_kill_between_two_final_models(here, whole):
    shutil.copytree("whole", "c")
    (here / "c" / "scaffold" / "seed1" / "model.safetensors").unlink()
    assert call(*command("c")) == 0
    assert_same_comparison("whole", "c")


@pytest.mark.long
def test_more_seeds_and_methods_are_added_to_what_is_there(here, whole, monkeypatch):
    whole.rename("c")
    before = {name: (here / "c" / name / "metrics.jsonl").read_bytes() for name in RUNS}
    assert call(*command("c", "compare.seeds=3", "compare.algorithms=['fedavg', 'scaffold', 'fedlada']")) == 0
    assert {name: (here / "c" / name / "metrics.jsonl").read_bytes() for name in RUNS} == before
    assert len(table("c")) == 3 * 3 * ROUNDS
    monkeypatch.setattr(Training, "record", None)
    assert call(*command("c")) == 0  # complete: nothing is trained
    assert len(table("c")) == 2 * 2 * ROUNDS


@pytest.mark.long
def test_fewer_methods_and_seeds_leave_one_story_in_the_folder(empty_folder):
    """Tables, picture and report are all of what was asked for."""
    Path("small.toml").write_text(TOML)
    quick = ("train.rounds=2", "compare.grid={}", "train.lr=0.1")
    assert call(*command("c", *quick)) == 0
    assert call(*command("c", *quick, "compare.algorithms=['fedavg']", "compare.seeds=1")) == 0
    assert len(table("c")) == 2
    assert list(json.loads(Path("c/config.json").read_text())["algorithms"]) == ["fedavg"]
    page = Path("c/report.html").read_text()
    assert "1 curve from 1 run " in page
    assert rows("c/scaffold/seed1")  # still there
    assert call(*command("c", *quick)) == 0
    assert len(table("c")) == 2 * 2 * 2


def test_another_comparison_is_refused_until_told_to_overwrite(here, whole, capsys):
    whole.rename("c")
    kept = ("fedavg/seed0/metrics.jsonl", "rounds.csv", "tuning.csv", "config.json")
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
    assert "was written by another lamina" in capsys.readouterr().err


def test_a_damaged_config_is_refused_in_one_line(here, capsys):
    Path("c").mkdir()
    Path("c/config.json").write_text("{")
    assert call(*command("c")) == 2
    said = capsys.readouterr().err
    assert "holds other files than" in said
    assert said.count("\n") == 1


def test_choosing_on_the_test_data_is_said(here, capsys):
    assert call(*command("c", "compare.select=test")) == 0
    records = [read_record(Path("c", name)) for name in RUNS[:2]]
    assert all(record.tuning and not record.on_validation_data for record in records)
    assert (
        (here / "c" / "tuning.csv").read_text().startswith("algorithm,learning_rate,rounds,final_test_accuracy,chosen")
    )
    assert call(*[word for word in command("c", "compare.select=test") if word != "--quiet"]) == 0
    said = capsys.readouterr()
    assert "note: rates were chosen on the test data" in said.out
    assert "final test accuracy" in said.err
    assert call(*command("c", "data.validation=0.5")) == 2
    assert "data.validation is for single runs" in capsys.readouterr().err


def test_ctrl_c_shows_the_finished_runs_and_says_how_to_resume(here, whole, capsys, monkeypatch):
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == 4 * ROUNDS + 5:  # tuning and the seeds of fedavg, then five rounds
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", counted)
        assert call(*[word for word in command("c") if word != "--quiet"]) == 130
    said = capsys.readouterr()
    assert "fedavg" in said.out
    assert not any(line.lstrip().startswith("scaffold") for line in said.out.splitlines())  # in the table
    assert "table, picture and CSV are of the finished runs; run the same command again to resume" in said.err
    assert len(table("c")) == 2 * ROUNDS
    assert Checkpoints(here / "c" / "scaffold" / "seed1" / "checkpoints").rounds()[-1] == 3
    assert call(*command("c")) == 0
    assert_same_comparison("whole", "c")


@pytest.mark.long
def test_a_member_that_diverges_leaves_the_others_alone(here):
    """After a kill, too: who has diverged is not run again, and the others end as they would have."""
    wild = "compare.grid.fedavg.lr=[0.05, 1e30]"
    assert call(*command("a", wild)) == 0
    record = read_record("a/tuning/fedavg/lr1e+30")
    assert record.ended
    assert not record.complete
    assert "went non-finite" in record.diverged
    with Path("a/tuning.csv").open() as file:
        assert math.isnan(float(list(csv.DictReader(file))[1]["final_validation_accuracy"]))
    assert read_record("a/fedavg/seed0").lr == 0.05
    assert call(*command("b", wild, "train.rounds=5")) == 0
    assert call(*command("b", wild)) == 0
    assert_same("a/tuning/fedavg/lr0.05", "b/tuning/fedavg/lr0.05")


def test_a_comparison_writes_nothing_before_it_runs(here):
    experiment = load("small.toml", ["compare.algorithms=['fedlamb']"])
    comparison = comparing.Comparison(experiment, here / "c")
    assert [point["lr"] for point in comparing.points_of(experiment, "fedavg")] == [0.05, 0.2]
    assert comparison.entries == []
    assert not (here / "c").exists()  # nothing is written before it runs


@pytest.mark.long
def test_live_bars_on_a_terminal(here, monkeypatch):
    """A bar for every algorithm: what it does, its round, its accuracy."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(base, "err", screen)
    monkeypatch.setattr(progress, "Progress", functools.partial(progress.Progress, refresh_per_second=1000))
    assert call(*[word for word in command("c", "compare.tuning_rounds=6") if word != "--quiet"]) == 0
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.file.getvalue())
    lines = [line.split() for line in plain.splitlines()]
    assert any(line[:2] == ["scaffold", "waiting"] for line in lines)
    assert any(line[:2] == ["fedavg", "tuning"] and "6/6" in line and "accuracy" in line for line in lines)
    assert any(line[:2] == ["scaffold", "running"] and "8/8" in line for line in lines)
    assert any(line[:2] == ["fedavg", "done"] for line in lines)


def test_entries_may_have_a_channel_and_a_privacy_of_their_own(here):
    tables = ("plain={name='fedavg', privacy='none'}", "coarse={name='fedavg', channel='sign'}",
              "strict={name='fedavg', privacy={epsilon=1}}")  # fmt: skip
    options = f"{{{', '.join(tables)}}}"
    privacy = "privacy={bound=2, delta=0.01, epsilon=8, secret='secret.key'}"
    chosen = ("compare.algorithms=['plain', 'coarse', 'strict']", f"compare.options={options}", privacy,
              "compare.seeds=1", "train.rounds=2", "train.local_steps=1", "train.participation=1.0")  # fmt: skip
    assert call(*command("c", *chosen)) == 0
    plain, coarse, strict = (read_record(Path("c", name, "seed0")) for name in ("plain", "coarse", "strict"))
    assert [run.config.get("privacy", {}).get("epsilon") for run in (plain, coarse, strict)] == [None, 8.0, 1.0]
    assert strict.config["privacy"]["bound"] == 2
    assert coarse.config["channel"]["codec"] == [{"name": "sign", "scale": "layer"}]
    assert coarse.history.total("bytes_up") < plain.history.total("bytes_up") / 20
    assert "secret.key" not in Path("c/config.json").read_text() + (strict.folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("channel='zip'", "unknown codec 'zip'"),
        ("channel={codec='sign', up=3}", "channel has no option 'up'"),
        ("privacy='some'", "compare.options.mine.privacy = 'some': must be a table, or \"none\""),
        ("privacy={epsilon=8}", "compare.options.mine: [privacy] needs 'bound'"),
    ],
)
def test_a_wrong_channel_or_privacy_of_an_entry_is_one_line(here, capsys, option, message):
    settings = ("compare.algorithms=['mine']", f"compare.options.mine={{name='fedavg', {option}}}")
    assert call(*command("c", *settings)) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_model_that_a_method_cannot_train_is_refused_before_anything_runs():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.factor

    with pytest.raises(lamina.BadInput, match=r"FedMuon orthogonalises matrices, and no trained tensor"):
        lamina.compare(Scale(), DATA, ["fedavg", "fedmuon"], **OF_TWO_RATES, clients=4, out="c")
    assert not list(Path("c").rglob("metrics.jsonl"))


# --- clients ----------------------------------------------------------------------------------------------------------


def test_lists_of_clients_give_the_batches_of_a_simulation_whatever_their_order():
    order = torch.randperm(190, generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"clients": [order[:90], order[90:]], "batch_size": 10, "lr": 0.1, "device": "cpu"}
    module = torch.nn.Linear(4, 2)
    history = lamina.Simulation(module, DATA, "fedavg", test=DATA, **settings).run(2)
    (compared,) = lamina.compare(module, DATA, ["fedavg"], **OF_TWO_RATES | settings).histories["fedavg"]
    assert compared[-1]["loss"] == history[-1]["loss"]
