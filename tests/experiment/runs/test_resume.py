"""A run that is killed, at any moment, ends as if nothing had happened."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import HELD_UP, Killed, assert_same, call, finish, rows, start
from lamina.base import atomic
from lamina.experiment import build as building
from lamina.experiment.config import load
from lamina.experiment.runs import folder as run_folder
from lamina.experiment.runs import run as running
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.metrics_file import MetricsFile
from lamina.storage import checkpoint
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.locks import Lock
from lamina.training.training import Training
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
@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedlamb", "mimelamb"])
def test_killed_at_random_moments(here, algorithm, engine):
    undisturbed, disturbed = (command(name, algorithm=algorithm, engine=engine) for name in ("a", "b"))
    assert finish(undisturbed) == 0
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


def rows_so_far(path):
    return MetricsFile(path / "metrics.jsonl").read().rows


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
            patch.setattr(Lock, "release", lambda self, delete: self._file.close())  # a kill deletes nothing
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


def test_a_second_process_is_refused_and_told_who_the_first_is(half, capsys):
    lock = Lock(half)
    assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert f"process {os.getpid()} is writing to the folder" in said
    assert len(said.splitlines()) == 1
    lock.release()
    assert call(*command(half, rounds=6)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_round(half, monkeypatch, number):
    run_round = Training.run_round

    def interrupted(self, **options):
        if self.state.round == 1:  # in the second round
            os.kill(os.getpid(), number)
        return run_round(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "run_round", interrupted)
        assert call(*command("b", "run.checkpoint_every=1000", rounds=6)) == 130  # it is saved when it stops
    assert len(rows("b")) == Checkpoints(Path("b/checkpoints")).rounds()[-1] == 2
    assert "stopped after round 2" in Path("b/log.txt").read_text()
    assert call(*command("b", rounds=6)) == 0
    assert_same("whole", "b")


@pytest.mark.parametrize("reader", [("report", "half"), ("export", "half"), ("watch", "half", "--once")])
def test_a_folder_of_another_format_is_not_read_as_if_it_were_ours(half, capsys, reader):
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "format": 0}))
    assert call(*reader) == 2
    said = capsys.readouterr().err
    assert "was written by another lamina (format 0, this one's is 1)" in said
    assert said.count("\n") == 1


def test_the_log_tells_a_run_from_its_start(half):
    whole = half.parent / "whole"
    (line,) = [line for line in (whole / "log.txt").read_text().splitlines() if "rounds, stacked on" in line]
    assert "scaffold on digits, 8 clients, mlp, lr 0.02, seed 0, 6 rounds, stacked on cpu" in line
    assert call(*command(half, rounds=6)) == 0
    assert "resuming after round 4 of 6" in (half / "log.txt").read_text()


def read_only(monkeypatch, place):
    """As on a file system that is mounted read-only, where root may not write, either."""

    def refused(dir):
        assert Path(dir).resolve().is_relative_to(place.resolve())
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(Lock, "__init__", lambda self, path: pytest.fail(f"wrote to {path}"))


def test_a_read_only_file_system_is_called_so(half, capsys, monkeypatch):
    read_only(monkeypatch, half.parent)
    assert call(*command(half, rounds=6)) == 2
    assert "Read-only file system" in capsys.readouterr().err
    assert call(*command("new", rounds=6)) == 2
    assert "Read-only file system" in capsys.readouterr().err
    assert call(*command("whole", rounds=6), "--overwrite") == 2
    assert "Read-only file system" in capsys.readouterr().err


def test_checkpoints_of_every_third_round(here, capsys):
    assert call(*command("whole", rounds=8)) == 0
    assert call(*command("r", "run.checkpoint_every=3", rounds=8)) == 0
    assert Checkpoints(here / "r" / "checkpoints").rounds() == [6, 8]  # the last round always
    assert_same("whole", "r")


def test_a_folder_of_another_format_is_refused(half, capsys):
    config = json.loads((half / "config.json").read_text())
    for format_ in (0, None, 99):
        config["format"] = format_
        kept = {key: value for key, value in config.items() if value is not None}
        (half / "config.json").write_text(json.dumps(kept))
        assert call(*command(half, rounds=6)) == 2
        said = capsys.readouterr().err
        assert f"was written by another lamina (format {format_ or 0}" in said
        assert len(said.splitlines()) == 1
    assert call(*command(half, rounds=6), "--overwrite") == 0
    assert_same("whole", half)


def test_another_config_is_refused_with_the_keys_that_differ(half, capsys):
    before = sorted(path.name for path in half.iterdir())
    assert call(*command(half, "train.lr=0.5", "data.partition.k=3", rounds=6)) == 2
    said = capsys.readouterr().err
    assert "train.lr = 0.02 (now 0.5)" in said
    assert "data.partition.k = 2 (now 3)" in said
    assert said.count(" (now ") == 2
    assert "--out" in said
    assert "--overwrite" in said
    assert call(*command(half, rounds=6, algorithm="fedavg")) == 2
    assert 'algorithm.name = "scaffold" (now "fedavg");' in capsys.readouterr().err  # not its options as well
    assert sorted(path.name for path in half.iterdir()) == before


def test_what_does_not_change_the_result_may_change(half):
    more = ("run.threads=1", "run.checkpoint_every=2", "data.dir=/tmp", "run.device=cpu")
    assert call(*command(half, *more, rounds=6)) == 0
    assert_same("whole", half)


def test_more_rounds_resume_and_fewer_are_refused(half, capsys):
    assert call(*command("whole", rounds=9)) == 0  # it was complete after six
    assert call(*command(half, rounds=9)) == 0
    assert_same("whole", half)
    assert json.loads((half / "config.json").read_text())["train"]["rounds"] == 9
    assert call(*command(half, rounds=5)) == 2
    assert "train.rounds = 9 (now 5)" in capsys.readouterr().err
    assert call(*command("c", "train.schedule=cosine", rounds=3)) == 0
    assert call(*command("c", "train.schedule=cosine", rounds=4)) == 2  # it would have had other rates
    assert "train.schedule.rounds = 3 (now 4)" in capsys.readouterr().err


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_became_read_only(half, capsys):
    half.chmod(0o500)
    assert call(*command(half, rounds=6)) == 2
    assert "cannot write to the folder" in capsys.readouterr().err
    half.chmod(0o700)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def test_a_diverged_run_is_not_run_again(here, capsys):
    wild = command("r", "train.schedule={name='milestones', at=[3], gamma=1e30}", algorithm="fedavg")
    assert call(*wild) == 3
    said, before = capsys.readouterr().err, rows("r")
    assert 0 < len(before) < 40
    assert call(*wild) == 3
    assert capsys.readouterr().err == said
    assert rows("r") == before


def test_an_infinite_test_loss_is_still_the_end_after_a_kill(here, capsys):
    """Killed after the checkpoint of that round, before it was noted that the run has diverged."""
    experiment = load("small.toml", ["train.rounds=3", "algorithm.name=fedavg"])
    for _ in range(2):
        simulation = building.build(experiment)
        with RunFolder(here / "r", building.resolved(experiment, simulation)) as place:
            if running.resume([simulation], [place]) == 0:
                row = {**simulation.run_round(), "loss": float("inf")}
                place.record(row, simulation)
                place.checkpoint(simulation)
            else:
                assert not running.train([simulation], [place], experiment)
                assert place.diverged is not None
    assert "test loss" in json.loads((here / "r" / "diverged.json").read_text())["message"]


@pytest.mark.long
def test_several_processes_resume_together(here):
    """Every rank saves the clients it owns, and all resume from the newest round they share."""

    def torchrun(out, rounds):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [start(command(out, rounds=rounds), environment={**place, "RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            rank.join(HELD_UP)
        return [rank.exitcode for rank in ranks]

    assert torchrun("a", 8) == [0, 0]
    assert torchrun("b", 5) == [0, 0]
    (newest,) = (here / "b" / "checkpoints" / "rank-1").glob("round-000005.json")
    newest.unlink()  # killed before the second process had saved the fifth round
    assert torchrun("b", 8) == [0, 0]
    assert_same("a", "b")
    assert "resuming after round 4" in (here / "b" / "log.txt").read_text()
    assert torchrun("b", 8) == [0, 0]  # complete
    assert call(*command("b", rounds=9)) == 2  # one process does not hold all clients' state


def test_models_in_the_folder_are_those_of_their_rounds(here):
    assert call(*command("r", rounds=9, algorithm="fedavg")) == 0
    experiment = load("small.toml", ["train.rounds=9", "algorithm.name=fedavg", "run.engine=stacked"])
    again = building.build(experiment)
    accuracies = [row["accuracy"] for row in rows("r")]
    best = accuracies.index(max(accuracies)) + 1
    for name, number in (("best", best), ("model", 9)):
        again.run(number - again.state.round)
        stored = load_file(here / "r" / f"{name}.safetensors")
        assert all(torch.equal(value, stored[key]) for key, value in again.model.state_dict().items())
        assert checkpoint.read_facts((here / "r" / f"{name}.safetensors").read_bytes())["round"] == str(number)


def test_the_best_model_survives_worse_rounds_after_it_went_on(half):
    metrics, best = half / "metrics.jsonl", (half / "best.safetensors").read_bytes()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[1]["accuracy"] = 1.0
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call(*command(half, rounds=6)) == 0
    assert (half / "best.safetensors").read_bytes() == best
