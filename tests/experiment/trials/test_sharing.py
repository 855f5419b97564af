"""Processes that share the runs of a comparison or a tuning, also if some of them are killed."""

import contextlib
import csv
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from comparisons import RUNS, TOML, assert_same_comparison, command
from helpers import HELD_UP, call, count, rows, skip_pictures, start, words
from lamina.experiment.config import load
from lamina.experiment.trials.compare import Comparison
from lamina.storage import leases
from lamina.storage.leases import claim
from leases_of_others import give

GRID = ("tune.grid.train.lr=[0.01, 0.05, 0.2]", "tune.seeds=2", "train.rounds=6")
STUDY = ("tune.sampler=tpe", "tune.space.train.lr={low=0.01, high=1.0, log=true}", "tune.trials=5", "train.rounds=6")


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


def logged(folder):
    """How often the log of a run says that it began, and that it is complete."""
    text = (Path(folder) / "log.txt").read_text()
    return len(re.findall("rounds, (?:stacked|loop) on", text)), len(re.findall("complete after", text))


def assert_trained_once(folder, runs):
    """Every run has begun and ended once: no process trained what another one did."""
    for run in runs:
        assert logged(Path(folder, run)) == (1, 1), run


def table(folder):
    with (Path(folder) / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def hold(folder):
    """Let a process on another machine have the lease of a run; return the lease's path."""
    lease = claim(folder)
    give(lease, machine="another boot")
    return lease.path


def work(arguments, workers=3, seed=None, folder=None):
    """Run the same command in several processes; with a seed, kill and replace one of them at random, five times."""
    running = [start(arguments) for _ in range(workers)]
    draw, kills = random.Random(seed), 0 if seed is None else 5
    for _ in range(kills):
        before, deadline = count(folder), time.monotonic() + 10
        while count(folder) < before + draw.randrange(1, 5) and time.monotonic() < deadline:
            time.sleep(0.002)
        victim = draw.randrange(workers)
        running[victim].kill()
        running[victim].join(HELD_UP)
        if running[victim].exitcode == 0:  # all was done
            break
        running[victim] = start(arguments)
    for process in running:
        process.join(HELD_UP)
    assert [process.exitcode for process in running] == [0] * workers


@pytest.mark.long
def test_a_process_takes_the_runs_that_are_free_and_waits_for_the_others(here, capsys):
    assert call(*command("alone")) == 0
    comparison = Comparison(load("small.toml"), here / "c")
    held = hold(here / "c" / "tuning/fedavg/lr0.2")
    waits = []

    def wait(runs):
        waits.append(runs)
        assert (here / "c/scaffold/seed1/model.safetensors").exists()
        assert not (here / "c/tuning/fedavg/lr0.05/metrics.jsonl").exists()  # part of a population rounds differently
        held.unlink()

    comparison.on_wait = wait
    assert comparison.run()
    assert waits == [2]
    assert_same_comparison("alone", "c")


def test_a_stop_ends_the_waiting(here):
    comparison = Comparison(load("small.toml"), here / "c", stop=lambda: bool(waits))
    hold(here / "c" / "scaffold" / "seed1")
    waits = []
    comparison.on_wait = waits.append
    assert not comparison.run()
    assert [(entry.name, len(entry.records)) for entry in comparison.entries] == [("fedavg", 2)]


@pytest.mark.long
def test_three_processes_compare_as_one_does(here):
    assert call(*command("alone")) == 0
    work(command("c"))
    assert_same_comparison("alone", "c")
    assert_trained_once("c", RUNS)
    assert not list(Path("c").rglob("lease*"))


# With the loop engine: stacked runs, of which a kill left some without a checkpoint, resume apart and round so.
KILLED = ("train.rounds=30", "compare.seeds=3", "run.engine=loop")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The comparison whose workers are killed, by one process in peace."""
    place = tmp_path_factory.mktemp("undisturbed")
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        Path("small.toml").write_text(TOML)
        skip_pictures(patch)
        assert call(*command("alone", *KILLED)) == 0
    return place / "alone"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_killed_lose_nothing(here, undisturbed, seed):
    work(command("c", *KILLED), seed=seed, folder="c")
    runs = [*RUNS, "fedavg/seed2", "scaffold/seed2"]
    assert_same_comparison(undisturbed, "c", runs)
    for run in runs:
        assert logged(Path("c", run))[1] <= 1, run  # none, if it was killed between the model and this line


@pytest.mark.long
def test_a_grid_and_a_study_are_shared(here):
    pytest.importorskip("optuna")
    for name, settings in (("grid", GRID), ("study", STUDY)):
        assert call(*words("tune", f"{name}-alone", *settings)) == 0
        work(words("tune", name, *settings), workers=2)
        for file in ("trials.csv", "config.json", "best.toml"):
            assert Path(name, file).read_bytes() == Path(f"{name}-alone", file).read_bytes(), (name, file)
        runs = [path.parent.relative_to(name) for path in Path(name).rglob("metrics.jsonl")]
        assert len(runs) == 6 if name == "grid" else 5
        assert_trained_once(name, runs)


@pytest.mark.long
def test_workers_share_populations_and_write_the_tables_of_one_process(here):
    rates = ", ".join(str(0.01 * (i + 1)) for i in range(20))  # more than one population has room for
    more = ("train.rounds=3", f"compare.grid.fedavg.lr=[{rates}]", "run.engine=stacked")
    assert call(*command("alone", *more)) == 0
    assert call(*command("c", *more), "--workers", "3") == 0
    assert_same_comparison("alone", "c", ["fedavg/seed0", "scaffold/seed1", "tuning/fedavg/lr0.2"])


@pytest.mark.long
def test_a_reproduction_is_shared(here):
    claim = "[[claim]]\ntext = 'it helps'\nkind = 'order'\nexpect = ['scaffold@fast', 'scaffold', 'fedavg']\n"
    Path("claims.toml").write_text(f"{TOML}{claim}variants = {{ fast = ['train.batch_size=32'] }}\n")
    arguments = [
        "reproduce",
        str(here / "claims.toml"),
        "--quiet",
        "--set",
        "train.rounds=30",
        "--set",
        "run.engine=loop",
    ]
    assert call(*arguments, "--out", str(here / "alone")) == 0
    work([*arguments, "--out", str(here / "c")], seed=0, folder="c")
    assert Path("c/claims.json").read_bytes() == Path("alone/claims.json").read_bytes()
    for variant in ("as-given", "fast"):
        for file in ("tuning.csv", "config.json"):
            assert Path("c", variant, file).read_bytes() == Path("alone", variant, file).read_bytes()


@pytest.mark.long
def test_a_stopped_process_finds_its_runs_taken_over(here, monkeypatch):
    more = ("compare.algorithms=['scaffold']", "train.rounds=100", "run.checkpoint_every=50")
    arguments = command("c", *more)
    first = start(arguments, errors=str(here / "errors.txt"))
    deadline = time.monotonic() + HELD_UP
    while count("c") < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr(leases, "LEASE_S", 1.0)
    assert call(*arguments) == 0
    os.kill(first.pid, signal.SIGCONT)
    first.join(HELD_UP)
    assert first.exitcode == 2
    message = Path("errors.txt").read_text()
    assert "continued by another process" in message
    assert message.count("\n") == 1
    assert [len(rows(Path("c", run))) for run in ("scaffold/seed0", "scaffold/seed1")] == [100, 100]
