"""Run folders: which runs may use them, what they log, and which models they hold."""

import errno
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import assert_same, call, rows, truncate
from lamina.experiment import build as building
from lamina.experiment.config import load
from lamina.storage import checkpoint
from lamina.storage.leases import Lease, take
from small_run import command


def test_a_second_process_is_refused_and_told_who_the_first_is(half, capsys):
    lease = take(half)
    assert call(*command(half, rounds=6)) == 2
    message = capsys.readouterr().err
    assert f"process {os.getpid()} on {socket.gethostname()} is writing to the folder" in message
    assert len(message.splitlines()) == 1
    lease.release()
    assert call(*command(half, rounds=6)) == 0


def read_only(monkeypatch, place):
    """As on a file system that is mounted read-only, where root may not write, either."""

    def refused(dir):
        assert Path(dir).resolve().is_relative_to(place.resolve())
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(Lease, "create", lambda lease: pytest.fail(f"wrote to {lease.path}"))


def test_a_read_only_file_system_is_called_so(half, capsys, monkeypatch):
    read_only(monkeypatch, half.parent)
    assert call(*command(half, rounds=6)) == 2
    assert "Read-only file system" in capsys.readouterr().err
    assert call(*command("new", rounds=6)) == 2
    assert "Read-only file system" in capsys.readouterr().err
    assert call(*command("whole", rounds=6), "--overwrite") == 2
    assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_became_read_only(half, capsys):
    half.chmod(0o500)
    assert call(*command(half, rounds=6)) == 2
    assert "cannot write to the folder" in capsys.readouterr().err
    half.chmod(0o700)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def test_a_folder_of_another_format_is_refused(half, capsys):
    config = json.loads((half / "config.json").read_text())
    for format_ in (0, None, 99):
        config["format"] = format_
        kept = {key: value for key, value in config.items() if value is not None}
        (half / "config.json").write_text(json.dumps(kept))
        assert call(*command(half, rounds=6)) == 2
        message = capsys.readouterr().err
        assert f"was written by another lamina (format {format_ or 0}" in message
        assert len(message.splitlines()) == 1
    assert call(*command(half, rounds=6), "--overwrite") == 0
    assert_same("whole", half)


def test_another_config_is_refused_with_the_keys_that_differ(half, capsys):
    before = sorted(path.name for path in half.iterdir())
    assert call(*command(half, "train.lr=0.5", "data.partition.k=3", rounds=6)) == 2
    message = capsys.readouterr().err
    assert "train.lr = 0.02 (now 0.5)" in message
    assert "data.partition.k = 2 (now 3)" in message
    assert message.count(" (now ") == 2
    assert "--out" in message
    assert "--overwrite" in message
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


def test_the_log_tells_a_run_from_its_start(half):
    whole = half.parent / "whole"
    (line,) = [line for line in (whole / "log.txt").read_text().splitlines() if "rounds, stacked on" in line]
    assert "scaffold on digits, 8 clients, mlp, lr 0.02, seed 0, 6 rounds, stacked on cpu" in line
    assert call(*command(half, rounds=6)) == 0
    assert "resuming after round 4 of 6" in (half / "log.txt").read_text()


def test_a_diverged_run_is_not_run_again(here, capsys):
    wild = command("r", "train.schedule={name='milestones', at=[3], gamma=1e30}", algorithm="fedavg")
    assert call(*wild) == 3
    message, before = capsys.readouterr().err, rows("r")
    assert 0 < len(before) < 40
    assert call(*wild) == 3
    assert capsys.readouterr().err == message
    assert rows("r") == before


@pytest.mark.parametrize("algorithm", ["fedavg", "fedexp"])  # which evaluates another model than it broadcasts
def test_models_in_the_folder_are_those_of_their_rounds(here, algorithm):
    assert call(*command("r", rounds=9, algorithm=algorithm)) == 0
    experiment = load("small.toml", ["train.rounds=9", f"algorithm.name={algorithm}", "run.engine=stacked"])
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


def test_a_model_cut_short_is_written_again(half, capsys):
    whole = half.parent / "whole"
    model = (whole / "model.safetensors").read_bytes()
    truncate(whole / "model.safetensors")
    assert call(*[word for word in command(whole, rounds=6) if word != "--quiet"]) == 0
    assert "is complete" not in capsys.readouterr().out
    assert (whole / "model.safetensors").read_bytes() == model
