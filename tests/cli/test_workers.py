"""`--workers` and `--slurm`: several processes of one command."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparisons import TOML, assert_same_comparison, command
from helpers import HELD_UP, call, count, said_in_one_line, skip_pictures
from lamina.base.workers import Worker, is_worker, this_worker
from lamina.cli import workers
from lamina.experiment.build import choose_threads
from lamina.experiment.config import load
from lamina.storage.leases import Owner, join


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


def launcher(*arguments):
    """Start a command with workers as a user does."""
    words = [sys.executable, "-m", "lamina", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def owners(folder):
    """The workers that have joined a folder."""
    contents = []
    for path in Path(folder).glob("lease-????????"):
        try:
            contents.append(path.read_bytes())
        except FileNotFoundError:
            continue
    return [owner.process for owner in map(Owner.of, contents) if owner.process]


def wait_until(condition):
    deadline = time.monotonic() + HELD_UP
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_a_worker_knows_its_place(monkeypatch, here):
    assert (is_worker(), this_worker()) == (False, Worker(1, 1))
    for name, value in Worker(2, 3).environment().items():
        monkeypatch.setenv(name, value)
    assert (is_worker(), this_worker()) == (True, Worker(2, 3))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert choose_threads(load("small.toml"), 10**7) == 4


@pytest.mark.parametrize("kind", ["compare", "tune"])
def test_more_workers_than_runs(here, capsys, kind):
    more = ["--set", "tune.grid.train.lr=[0.1, 0.2]", "--set", "tune.seeds=3"] if kind == "tune" else []
    assert call(kind, "small.toml", "--workers", 7, *more) == 2
    assert said_in_one_line(capsys) == "error: --workers 7: there is no work for so many, only 6 runs\n"


def test_gpus_are_shared_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert workers.visible_gpus() == ["3", "5"]
    started = []

    class Ended:
        returncode, pid = 0, 1

        def __init__(self, words, env, **options):
            started.append((words, env["CUDA_VISIBLE_DEVICES"], env["LAMINA_WORKER"]))

        def poll(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    assert workers.run_workers(["lamina"], 3) == 0
    assert started == [
        (["lamina"], "3", "1/1"), (["lamina", "--quiet"], "5", "2/1"), (["lamina", "--quiet"], "3", "3/1")
    ]  # fmt: skip


def test_overwrite_is_refused_while_a_process_works_there(here, capsys):
    other = join(here / "c", {})
    assert call(*command("c"), "--workers", 2, "--overwrite") == 2
    assert "--overwrite would delete its runs" in said_in_one_line(capsys)
    other.release()


@pytest.mark.long
def test_a_killed_worker_is_reported_and_the_others_finish(here):
    more = ("train.rounds=50",)
    assert call(*command("alone", *more)) == 0
    process = launcher(*command("c", *more), "--workers", 2)
    wait_until(lambda: len(owners("c")) == 2 and count("c") > 5)
    os.kill(owners("c")[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=HELD_UP)
    assert process.returncode == 0
    assert errors.count("was ended by signal 9 (Killed); the others finish its runs") == 1
    assert_same_comparison("alone", "c")
    old = Path("c/fedavg/seed0/metrics.jsonl").stat().st_ino
    assert launcher(*command("c", *more), "--workers", 2, "--overwrite").wait(HELD_UP) == 0
    assert Path("c/fedavg/seed0/metrics.jsonl").stat().st_ino != old
    assert_same_comparison("alone", "c")


@pytest.mark.long
def test_ctrl_c_stops_all_workers(here):
    process = launcher(*command("c", "train.rounds=100000", "run.evaluate_every=1000"), "--workers", 2)
    wait_until(lambda: len(owners("c")) == 2 and count("c") > 5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HELD_UP)
    assert process.returncode == 130
    assert "run the same command again to resume" in errors
    assert not list(Path("c").rglob("lease*"))


def test_slurm_options(capsys, here, monkeypatch):
    for given, what in (("partition", "write KEY=VALUE pairs"), ("time=1h", "must be a whole number of minutes")):
        assert call("compare", "small.toml", "--slurm", given) == 2
        assert what in said_in_one_line(capsys)
    monkeypatch.setattr(workers.shutil, "which", lambda name: None)
    assert call("compare", "small.toml", "--slurm", "gpus=0") == 2
    assert "there is no Slurm on this machine" in said_in_one_line(capsys)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert call("compare", "small.toml", "--slurm", "gpus=0") == 2
    assert "pip install" in said_in_one_line(capsys)


def test_submitit_leaves_the_logging_of_others_alone(here):
    """Its own set-up would close all handlers, and with them streams that are still written to."""
    code = """
import logging
from pathlib import Path
from lamina.base.errors import BadInput
from lamina.cli import workers

class Kept(logging.Handler):
    def close(self):
        print("closed")

handler = Kept()
try:
    workers.submit(["lamina"], 1, "gpus=0", Path("x"))
except BadInput:
    print("refused", flush=True)
import os
os._exit(0)
"""
    environment = {**os.environ, "PATH": ""}  # so that there is no sbatch
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == "refused\n"


@pytest.mark.long
def test_workers_are_submitted(here, capsys, monkeypatch):
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed")
    monkeypatch.setattr(workers, "CLUSTER", "local")
    assert call(*command("alone")) == 0
    arguments = [word for word in command("c") if word != "--quiet"]
    assert call(*arguments, "--workers", 2, "--slurm", "gpus=0,time=5") == 0
    printed = capsys.readouterr().out
    assert "submitted 2 jobs: " in printed
    assert f"lamina watch {here / 'c'}" in printed
    wait_until(lambda: len(list((here / "c-slurm").glob("*_result.pkl"))) == 2)
    assert_same_comparison("alone", "c")
