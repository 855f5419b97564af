"""A run that is killed, at any moment, ends as if nothing had happened."""

import errno
import json
import os
import random
import shutil
import signal
import time

import pytest

from helpers import HELD_UP, Killed, assert_same, call, finish, start
from lamina.base import atomic
from lamina.experiment.runs import folder as run_folder
from lamina.experiment.runs.metrics_file import MetricsFile
from lamina.storage import checkpoint
from lamina.storage.leases import Lease
from leases_of_others import abandon
from small_run import command


def wait_for_a_round(path, process):
    """Wait until a run has one finished round more than now, or has ended."""
    metrics, before = path / "metrics.jsonl", None
    deadline = time.monotonic() + HELD_UP
    while process.is_alive() and time.monotonic() < deadline:
        size = metrics.stat().st_size if metrics.exists() else 0
        before = size if before is None or size < before else before  # cut back when it resumes
        if size > before:
            return
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [("scaffold", "stacked"), ("scaffold", "loop"), ("fedlamb", "stacked"), ("mimelamb", "loop")],
)
def test_killed_at_random_moments(here, algorithm, engine):
    undisturbed, disturbed = (command(name, algorithm=algorithm, engine=engine) for name in ("a", "b"))
    assert call(*undisturbed) == 0
    moments = random.Random(f"{algorithm} {engine}")
    for kill in range(5):
        process = start(disturbed)
        if kill % 5 != 2:  # one of five may be hit before it has done anything
            wait_for_a_round(here / "b", process)
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.join(HELD_UP)
        assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed: give it more rounds"
    assert 0 < len(rows_so_far(here / "b")) < 40
    assert finish(disturbed) == 0
    assert_same("a", "b")


def test_a_resumed_run_keeps_the_engine_that_was_chosen_for_it(here, monkeypatch):
    def run(out, rounds):
        return call("run", "demo.toml", "--out", out, "--set", f"train.rounds={rounds}")

    (here / "demo.toml").write_text('model = { name = "mlp", hidden = 4 }\ndata = { clients = 3 }\n')
    assert run("a", 4) == run("b", 2) == 0
    monkeypatch.setattr("lamina.engines.choice.why_apart", lambda *_: "a later version has another rule")
    assert run("b", 4) == 0
    assert_same("a", "b")
    assert json.loads((here / "b" / "config.json").read_text())["run"]["engine"] == "stacked"
    assert run("c", 1) == 0
    assert json.loads((here / "c" / "config.json").read_text())["run"]["engine"] == "loop"


def rows_so_far(path):
    return MetricsFile(path / "metrics.jsonl").read().rows


@pytest.mark.long
def test_killed_at_every_write(here, monkeypatch):
    """Every call that makes something durable is the last one, in turn."""
    quick = {"rounds": 2, "algorithm": "fedlamb"}
    assert call(*command("a", **quick)) == 0
    sync, moment = os.fsync, 0
    while True:
        left = [moment]

        def counted(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted)
            patch.setattr(Lease, "release", abandon)  # a kill deletes nothing
            try:
                call(*command("b", **quick))
                break
            except Killed:
                pass
        assert call(*command("b", **quick)) == 0
        assert_same("a", "b")
        shutil.rmtree("b")
        moment += 3 if moment > 12 else 1  # after the first round they repeat
    assert moment > 18


@pytest.mark.long
@pytest.mark.parametrize("file", ["clients", "state", "round", "best"])
def test_a_full_disk_is_one_line_and_the_run_resumes_later(half, capsys, monkeypatch, file):
    write = atomic.write_file

    def full(path, data):
        if path.name.startswith(file):
            path.with_name(path.name + ".partial").write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    with monkeypatch.context() as patch:
        for module in (checkpoint, run_folder):
            patch.setattr(module, "write_file", full)
        if file == "best":  # every round counts as the best so far
            patch.setattr(run_folder.BestModel, "score", property(lambda _: -1.0, lambda *_: None), raising=False)
        assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "No space left on device" in said
    assert "rounds 1 to 4 are kept" in said
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


@pytest.mark.long
def test_a_file_that_may_not_grow(here):
    """The system cuts the metrics in the middle of a line."""
    plain = {"algorithm": "fedavg", "rounds": 30}
    assert finish(command("a", **plain)) == 0
    assert finish(command("b", **plain), largest_file=4500, errors=here / "said.txt") == 2
    said = (here / "said.txt").read_text()
    assert "File too large" in said
    assert len(said.splitlines()) == 1
    assert not (here / "b" / "metrics.jsonl").read_text().endswith("\n")
    assert finish(command("b", **plain)) == 0
    assert_same("a", "b")
