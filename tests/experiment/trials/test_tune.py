"""Tuning: grids as populations of ordinary runs, Optuna's trials, and what is chosen on which data."""

import contextlib
import csv
import json
import logging
import random
import sqlite3
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import lamina
from helpers import (
    HELD_UP,
    Killed,
    call,
    finish,
    kill,
    populations,
    rows,
    said_in_one_line,
    sets,
    skip_pictures,
    start,
    words,
)  # fmt: skip
from lamina import BadInput, History
from lamina.base.errors import MissingExtra
from lamina.cli import base
from lamina.cli import tune as tune_command
from lamina.experiment.config import load, parse
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.trials import study
from lamina.experiment.trials import tune as tuning
from lamina.experiment.trials.settings import Range
from lamina.report import figures

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
GRID = """
[tune.grid]
"train.lr" = [0.05, 0.2, 1e-6]
algorithm.decay = [0.0, 0.01]
"""
TPE = """
[tune]
sampler = "tpe"
trials = 6
pruner = "median"
[tune.space]
"train.lr" = { low = 0.001, high = 1.0, log = true }
"train.local_steps" = { low = 1, high = 3 }
"algorithm.decay" = { choices = [0.0, 0.01] }
"""


@pytest.fixture
def drawn(empty_folder):
    Path("grid.toml").write_text(TOML + GRID)
    Path("tpe.toml").write_text(TOML + TPE)
    return empty_folder


@pytest.fixture
def here(drawn, monkeypatch):
    skip_pictures(monkeypatch)
    return drawn


def tune(file, *more, out):
    return words("tune", out, *more, file=file)


def table(folder):
    with Path(folder, "trials.csv").open() as file:
        return list(csv.DictReader(file))


SMALL = [1e-3, 3e-3, 5e-3, 1e-2, 3e-2, 5e-2, 0.1, 0.3, 0.5]  # SPEC §4, P2
AMS = [1e-4, 3e-4, 5e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2, 5e-2, 0.1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedavg", {"train.lr": SMALL}),
        ("fedlamb", {"train.lr": SMALL, "algorithm.decay": [0, 0.01, 0.1]}),
        ("mimelamb", {"train.lr": SMALL, "algorithm.decay": [0, 0.01, 0.1]}),
        ("fedams", {"train.lr": AMS}),
        ("mime", {"train.lr": AMS}),
        ("fedadam", {"train.lr": [1e-4, 3e-4, 5e-4, *SMALL], "algorithm.server_lr": AMS}),
    ],
)
def test_the_lamb_papers_grid(name, expected):
    experiment = parse({"algorithm": name, "tune": {"grid": "lamb-paper"}})
    grid = tuning.find_grid(experiment)
    assert grid == expected
    for key, values in grid.items():
        for value in values:
            tuning.with_settings(experiment, {key: value})  # the algorithm takes them


@mock.patch.dict(lamina.registry())
def test_an_algorithm_of_ones_own_declares_a_grid():
    @lamina.algorithm("mine", title="Mine", reference="", lr=0.1, grids={"mine": {"lr": (0.1, 1), "server_lr": [0.5]}})
    class Mine(lamina.FedAvg):
        """FedAvg by another name."""

    experiment = parse({"algorithm": "mine", "tune": {"grid": "mine"}})
    assert tuning.find_grid(experiment) == {"train.lr": [0.1, 1], "algorithm.server_lr": [0.5]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grid": "lamb-papr"}, "did you mean 'lamb-paper'"),
        ({"grid": "lada-alpha"}, "no values for fedlamb"),
        ({}, "nothing to try"),
        ({"grid": {"train": {"lr": 0.1}}}, "'train.lr' must be a list"),
        ({"grid": {"train.lrr": [0.1]}}, "no key 'lrr'; did you mean 'lr'"),
        ({"grid": {"algorithm.decai": [0.1]}}, "no option 'decai'; did you mean 'decay'"),
        ({"grid": {"model.hiden": [4]}}, "no option 'hiden'; did you mean 'hidden'"),
        ({"grid": {"train.lr": [-1.0]}}, "greater than 0"),
        ({"grid": {"train.seed": [1, 2]}}, "'train.seed' cannot be tuned"),
        ({"grid": {"data.local_test": [0.1, 0.2]}}, "'data.local_test' cannot be tuned: all trials have the same data"),
        ({"grid": {"data.test": [0.1, 0.2]}}, "'data.test' cannot be tuned: all trials have the same data"),
        ({"grid": {"lr": [0.1]}}, "write section.key"),
        ({"sampler": "tpe"}, "[tune.space]"),
        ({"sampler": "tpe", "space": {"train.lr": {"low": 0.0, "high": 1.0, "log": True}}}, "if log is true, above 0"),
        ({"sampler": "tpe", "space": {"train.lr": {"low": 1.0, "high": 0.1}}}, "with low below high"),
        (
            {"sampler": "tpe", "space": {"train.lr": {"choices": [0.1], "low": 1.0}}},
            "must be a list of values, or a table",
        ),
        ({"sampler": "tpe", "space": {"train.lr": 0.1}}, "must be a list of values, or a table"),
    ],
)
def test_what_cannot_be_tried_is_said_in_a_line(given, said, tmp_path):
    with pytest.raises(BadInput) as caught:
        tuning.Tuning(parse({"tune": given}), tmp_path / "t")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_grid_is_a_population_of_ordinary_runs(here, monkeypatch, capsys):
    grouped = populations(monkeypatch)
    assert call(*tune("grid.toml", "tune.seeds=2", out="t")) == 0
    # Every seed holds out samples of its own.
    assert [[len(group) for group in groups] for groups in grouped] == [[6], [6]]
    assert capsys.readouterr().err == ""  # quiet
    place = "t/lr0.05-decay0.01/seed-2"
    single = ("train.lr=0.05", "algorithm.decay=0.01", "train.seed=-2", "data.validation=0.2")
    assert call("run", "grid.toml", "--out", "r", "-q", *sets(*single)) == 0
    assert rows("r") == [pytest.approx(row, rel=1e-4) for row in rows(place)]
    a, b = (json.loads(Path(folder, "config.json").read_text()) for folder in ("r", place))
    assert a == b
    assert call("run", "grid.toml", "--out", place, "-q", *sets(*single)) == 0  # complete


def test_protocols_that_differ_are_not_stacked(here):
    assert call(*tune("grid.toml", 'tune.grid={"train.local_steps" = [1, 2], "model.hidden" = [4, 6]}', out="t")) == 0
    assert [row["trial"] for row in table("t")] == [f"local_steps{k}-hidden{h}" for k in (1, 2) for h in (4, 6)]
    for row in table("t"):
        config = json.loads(Path("t", row["trial"], "seed-1", "config.json").read_text())
        assert str(config["train"]["local_steps"]) == row["train.local_steps"]
        steps = {line["steps"] for line in rows(Path("t", row["trial"], "seed-1"))}
        assert steps == {3 * config["train"]["local_steps"]}


@pytest.mark.long
def test_results_and_the_edge(drawn, capsys):
    assert call(*[word for word in tune("grid.toml", "train.rounds=20", out="t") if word != "--quiet"]) == 0
    said = capsys.readouterr()
    assert "final validation accuracy, %" in said.out
    assert "chosen on 20% of the training data, held out" in said.out
    chosen = [row for row in table("t") if row["remark"] == "chosen"]
    assert len(table("t")) == 6
    assert len(chosen) == 1
    assert float(chosen[0]["final_validation_accuracy"]) == max(
        float(row["final_validation_accuracy"]) for row in table("t")
    )
    assert chosen[0]["train.lr"] == "0.2"
    assert "the best train.lr = 0.2 lies on the edge of those tried: try larger values" in said.out
    assert "decay = 0 lies" not in said.out  # nothing lies below 0
    best = tomllib.loads(Path("t/best.toml").read_text())
    assert best["train"] == {"rounds": 20, "batch_size": 64, "lr": 0.2}
    assert "validation" not in best["data"]
    assert "validation" in Path("t/best.toml").read_text()
    assert Path("t/learning-rates.png").stat().st_size > 5_000
    assert call("run", "t/best.toml", "--out", "r", "-q") == 0
    wider = tune("grid.toml", 'tune.grid={"train.lr" = [0.05, 0.2, 1e9]}', out="u")
    assert call(*[word for word in wider if word != "--quiet"]) == 0
    assert table("u")[2]["remark"] in ("diverged", "")
    assert "on the edge" not in capsys.readouterr().out


def test_a_diverged_trial_is_marked_and_never_chosen(here, capsys):
    arguments = tune("grid.toml", 'tune.grid={"train.lr" = [0.1, 1e30]}', out="t")
    assert call(*[word for word in arguments if word != "--quiet"]) == 0
    assert [row["remark"] for row in table("t")] == ["chosen", "diverged"]
    assert "diverged" in capsys.readouterr().out


def test_chosen_on_the_test_data(here, capsys):
    arguments = tune("grid.toml", "tune.select=test", 'tune.grid={"train.lr" = [0.05, 0.1]}', out="t")
    assert call(*[word for word in arguments if word != "--quiet"]) == 0
    assert "chosen on the test data, as the papers do" in capsys.readouterr().out
    assert "final_test_accuracy" in table("t")[0]
    assert "final test accuracy" in Path("t/best.toml").read_text()
    assert json.loads(Path("t/lr0.1/seed-1/config.json").read_text())["data"]["validation"] is None
    assert call(*tune("grid.toml", 'tune.grid={"train.lr" = [0.05, 0.1]}', out="t")) == 2  # other data, other runs
    assert 'tuning.select = "test" (now "validation")' in capsys.readouterr().err


@pytest.mark.parametrize("file", ["grid.toml", pytest.param("tpe.toml", marks=pytest.mark.long)])
def test_resuming_after_a_kill(here, monkeypatch, file):
    assert call(*tune(file, out="a")) == 0
    old, left = RunFolder.checkpoint, [4]

    def dying(folder, simulation):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        old(folder, simulation)

    monkeypatch.setattr(RunFolder, "checkpoint", dying)
    with pytest.raises(Killed):
        call(*tune(file, out="b"))
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert call(*tune(file, out="b")) == 0
    assert table("a") == table("b")
    assert Path("a/best.toml").read_text() == Path("b/best.toml").read_text()
    before = Path("b/trials.csv").stat().st_mtime_ns, Path("b", table("b")[0]["trial"], "seed-1/log.txt").read_text()
    assert call(*tune(file, out="b")) == 0  # nothing is left to do
    assert Path("b", table("b")[0]["trial"], "seed-1/log.txt").read_text() == before[1]


def test_an_interrupted_grid_is_not_finished(here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(base.Stop, "__call__", lambda stop: True)
        assert call(*tune("grid.toml", out="t")) == 130
    assert "stopped after a round; run the same command again" in said_in_one_line(capsys)
    assert {row["remark"] for row in table("t")} == {"not finished"}
    assert call(*tune("grid.toml", out="t")) == 0


@pytest.mark.long
def test_a_grid_killed_at_random_moments_ends_the_same(here):
    longer = "train.rounds=12"
    assert finish(tune("grid.toml", longer, out="a")) == 0
    moments = random.Random(0)
    for _ in range(3):
        killed = kill(start(tune("grid.toml", longer, out="b")), "b", rounds=12, delay=moments.uniform(0, 0.05))
        assert killed, "the tuning ended before it was killed: give it more rounds"
    assert finish(tune("grid.toml", longer, out="b")) == 0
    assert table("a") == table("b")
    assert Path("a/best.toml").read_text() == Path("b/best.toml").read_text()


LONGER = ("train.rounds=6", "tune.trials=6", "tune.pruner=none")


def trials_in(folder):
    """What Optuna itself says of a study: number, state, values."""
    optuna = pytest.importorskip("optuna")
    found = optuna.load_study(study_name="tune", storage=f"sqlite:///{Path(folder, 'study.db').absolute()}")
    return [(trial.number, trial.state.name, trial.values) for trial in found.get_trials()]


@pytest.mark.long
def test_a_study_killed_at_random_moments_loses_no_trial(here):
    moments, finished = random.Random(0), set()
    for _ in range(4):
        process = start(tune("tpe.toml", *LONGER, out="t"))
        killed = kill(process, "t", rounds=moments.randint(1, 6), delay=moments.uniform(0, 0.03))
        assert killed, "the study ended before it was killed: give it more trials"
        known = trials_in("t")
        assert sum(state == "RUNNING" for _, state, _ in known) <= 1
        assert finished <= {repr(trial) for trial in known}
        finished = {repr(trial) for trial in known if trial[1] == "COMPLETE"}
    assert finish(tune("tpe.toml", *LONGER, out="t")) == 0
    known = trials_in("t")
    assert [(number, state) for number, state, _ in known] == [(number, "COMPLETE") for number in range(6)]
    assert finished <= {repr(trial) for trial in known}
    assert [float(row["final_validation_accuracy"]) for row in table("t")] == [score for _, _, (score,) in known]
    assert {len(rows(Path("t", row["trial"], "seed-1"))) for row in table("t")} == {6}


@pytest.mark.long
def test_a_study_killed_before_its_first_round(here):
    """While its tables are made, between the study and its first trial, and so on."""
    few = ("train.rounds=1", "tune.trials=2")
    for number in range(5):
        process = start(tune("tpe.toml", *few, out="t"))
        deadline = time.monotonic() + HELD_UP
        while not Path("t/study.db").exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.04 * number)
        process.kill()
        process.join(HELD_UP)
    assert finish(tune("tpe.toml", *few, out="t")) == 0
    assert [state for _, state, _ in trials_in("t")] == ["COMPLETE"] * 2


@pytest.mark.long
def test_a_worker_resumes_the_trial_of_one_that_was_killed(here):
    workers = [start(tune("tpe.toml", *LONGER, out="t")) for _ in range(2)]
    assert kill(workers[0], "t", rounds=8, delay=0)
    workers[1].join(HELD_UP)
    assert workers[1].exitcode == 0
    assert [state for _, state, _ in trials_in("t")] == ["COMPLETE"] * 6
    assert all(row["remark"] in ("", "chosen") for row in table("t"))


def not_a_database(folder):
    (folder / "study.db").write_text("dear diary, " * 500)


def of_another_optuna(folder):
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")


def without_a_column(folder):
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.execute("ALTER TABLE trials RENAME COLUMN number TO numero")


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (not_a_database, "file is not a database; run the same command again to resume"),
        (of_another_optuna, "is no longer compatible with the table schema"),
        (without_a_column, "no such column: trials.number; run the same command again"),
    ],
)
def test_a_study_that_cannot_be_read_is_one_line(here, capsys, damage, said):
    few = ("tune.trials=1", "train.rounds=1")
    assert call(*tune("tpe.toml", *few, out="t")) == 0
    damage(here / "t")
    assert call(*tune("tpe.toml", *few, out="t")) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.startswith(f"error: cannot use the study '{here}/t/study.db': ")
    assert line.count("\n") == 1
    assert logging.getLogger("optuna").getEffectiveLevel() > logging.WARNING  # it would say the same in ten lines
    assert call(*tune("tpe.toml", *few, out="t"), "--overwrite") == 0
    assert table("t")[0]["remark"] == "chosen"


def test_a_study_that_is_locked_or_read_only_is_one_line_and_resumes_later(here, capsys, monkeypatch):
    two = ("train.rounds=1", "tune.trials=2")
    assert call(*tune("tpe.toml", "train.rounds=1", "tune.trials=1", out="t")) == 0
    with monkeypatch.context() as patch, contextlib.closing(sqlite3.connect("t/study.db")) as other:
        patch.setattr(study, "WRITE_TIMEOUT_S", 0.05)
        other.execute("BEGIN IMMEDIATE")
        assert call(*tune("tpe.toml", *two, out="t")) == 2
    said = capsys.readouterr().err
    assert "study.db': database is locked; run the same command again" in said
    with monkeypatch.context() as patch:
        patch.setattr(study.Study, "url", f"sqlite:///file:{here}/t/study.db?mode=ro&uri=true")
        assert call(*tune("tpe.toml", *two, out="t")) == 2
    said = capsys.readouterr().err
    assert "study.db': attempt to write a readonly database; run the same command again" in said
    assert said.count("\n") == 1
    assert call(*tune("tpe.toml", *two, out="t")) == 0
    assert [state for _, state, _ in trials_in("t")] == ["COMPLETE"] * 2


@pytest.mark.long
def test_a_study_that_may_not_grow_is_one_line_and_resumes_later(here):
    few = ("train.rounds=2", "tune.trials=2")
    assert finish(tune("tpe.toml", *few, out="t"), largest_file=60_000, errors="said.txt") == 2  # as on a full disk
    said = Path("said.txt").read_text()
    assert "study.db': " in said
    assert "run the same command again to resume" in said
    assert said.count("\n") == 1
    assert finish(tune("tpe.toml", *few, out="t")) == 0
    assert [state for _, state, _ in trials_in("t")] == ["COMPLETE"] * 2


@pytest.mark.long
def test_optuna_prunes_and_is_extended(here, capsys, monkeypatch):
    optuna = pytest.importorskip("optuna")
    assert call(*tune("tpe.toml", "train.rounds=4", "tune.trials=3", out="t")) == 0
    first = table("t")
    assert sorted(row["remark"] for row in first) == ["", "", "chosen"]
    assert all(0.001 <= float(row["train.lr"]) <= 1 and row["train.local_steps"] in "123" for row in first)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.pruners, "MedianPruner", lambda **_: optuna.pruners.ThresholdPruner(lower=2.0))  # all
        assert call(*tune("tpe.toml", "train.rounds=4", "tune.trials=5", out="t")) == 0
    assert table("t")[:3] == first
    assert [row["remark"] for row in table("t")[3:]] == ["pruned", "pruned"]
    assert len(rows(Path("t", table("t")[3]["trial"], "seed-1"))) == 1
    capsys.readouterr()
    assert call(*tune("tpe.toml", "train.rounds=5", out="t")) == 2
    assert "holds another tuning: train.rounds = 4 (now 5)" in capsys.readouterr().err
    assert call(*tune("tpe.toml", "train.rounds=5", "tune.trials=1", out="t"), "--overwrite") == 0
    assert len(table("t")) == 1


@pytest.mark.long
def test_the_median_pruner_waits_for_a_quarter_of_the_rounds(here):
    """After the first round accuracies are near chance: the response curve would have no truth at low rates."""
    pytest.importorskip("optuna")
    slow = ("train.rounds=8", "tune.trials=9", 'tune.space={"train.lr" = {low = 1e-4, high = 1.0, log = true}}')
    assert call(*tune("tpe.toml", *slow, out="t")) == 0
    lengths = [len(rows(Path("t", row["trial"], "seed-1"))) for row in table("t") if row["remark"] == "pruned"]
    assert lengths  # else nothing was shown
    assert min(lengths) >= 2


def picture_of(trials, keys, monkeypatch, **study):
    """What `save_picture` draws of a study's trials: (rate, accuracy, remark, the other settings)."""
    made = SimpleNamespace(
        keys=keys, metric="accuracy", title="Fed-LAMB", folder=Path(),
        spec=SimpleNamespace(select="validation"),
        experiment=SimpleNamespace(algorithm=SimpleNamespace(name="fedlamb")), space=study,
        trials=[
            SimpleNamespace(settings={"train.lr": lr, **others}, best=[score], remark=remark, score_key=score,
                            score=score, histories=[History([{"round": 1, "accuracy": score}])])
            for lr, score, remark, others in trials
        ],
    )  # fmt: skip
    drawn, draw = [], figures.rates_figure
    monkeypatch.setattr(figures, "rates_figure", lambda found: drawn.append(found) or draw(found))
    tune_command.save_picture(made)
    return drawn[0], draw(drawn[0])


def test_the_picture_has_a_line_for_every_choice_and_a_mark_for_the_pruned(here, monkeypatch):
    layers = Range(choices=("tensor", "module"))
    trials = [
        (lr, lr + 0.1 * (kind == "module"), "pruned" if lr == 0.3 else "", {"algorithm.layers": kind})
        for lr in (0.1, 0.2, 0.3)
        for kind in ("tensor", "module")
    ]
    space = {"train.lr": Range(0.1, 1.0), "algorithm.layers": layers}
    found, figure = picture_of(trials, ["train.lr", "algorithm.layers"], monkeypatch, **space)
    assert [(response.label, [lr for lr, _ in response.tried]) for response in found] == [
        ("layers tensor", [0.1, 0.2, 0.3]), ("layers module", [0.1, 0.2, 0.3])
    ]  # fmt: skip
    (axes,) = figure.axes
    assert [line.get_marker() for line in axes.lines].count("x") == 2
    assert axes.get_xlabel() == "learning rate (ring: best; cross: pruned)"
    (tensor, module) = [line for line in axes.lines if line.get_label().startswith("layers")]
    assert tensor.get_xdata().tolist() == module.get_xdata().tolist() == [0.1, 0.2]


def test_points_that_differ_in_a_number_are_not_joined(here, monkeypatch):
    space = {"train.lr": Range(0.1, 1.0), "algorithm.decay": Range(0.0, 1.0)}
    trials = [(lr, 0.5, "", {"algorithm.decay": lr / 2}) for lr in (0.1, 0.2, 0.3)]
    _, figure = picture_of(trials, ["train.lr", "algorithm.decay"], monkeypatch, **space)
    (points,) = [line for line in figure.axes[0].lines if line.get_label() == "Fed-LAMB"]
    assert points.get_linestyle() == "None"
    assert points.get_marker() == "o"


def test_hyperband_with_seeds(here):
    assert call(*tune("tpe.toml", "tune.pruner=hyperband", "tune.trials=2", "tune.seeds=2", out="t")) == 0
    assert {row["seeds"] for row in table("t")} <= {"1", "2"}


@pytest.mark.long
def test_two_workers_share_a_study(here):
    arguments = tune("tpe.toml", "tune.pruner=none", "tune.trials=5", out="t")
    workers = [start(arguments), start(arguments)]
    for worker in workers:
        worker.join(HELD_UP)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [row["trial"] for row in table("t")] == [f"trial{number:03d}" for number in range(5)]
    assert all(row["remark"] in ("", "chosen") for row in table("t"))


def test_without_optuna(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"needs optuna: pip install -e '\.\[tune\]'"):
        tuning.Tuning(load("tpe.toml"), here / "t")
    assert not (here / "t").exists()


def test_a_folder_of_something_else_is_refused(here, capsys):
    Path("t").mkdir()
    Path("t/letter.txt").write_text("dear")
    assert call(*tune("grid.toml", out="t")) == 2
    assert "other files than those of lamina tune" in capsys.readouterr().err
