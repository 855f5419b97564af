"""What several tests of the commands share: calling them, killing them, and looking at what they leave behind."""

import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from lamina import cli
from lamina.experiment.runs.records import Record
from lamina.experiment.trials import trials
from lamina.experiment.trials.trial import Trial

HELD_UP = 240  # seconds; nothing here takes so long, but on a busy machine

# Children are forked from a server that has imported torch, and what the commands import, once.
processes = multiprocessing.get_context("forkserver")
PRELOADED = ["lamina.experiment.trials.compare", "lamina.experiment.trials.tune", "lamina.report.save", "helpers"]
processes.set_forkserver_preload(PRELOADED)


class Killed(BaseException):
    """Stands for a kill at a place of the test's choice: nothing in lamina catches it."""


def call(*arguments):
    """The exit code of a command run in this process: a process of its own costs three seconds."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return ended.value.code or 0


def mode(path):
    """The permissions of a file or folder."""
    return path.stat().st_mode & 0o777


def truncate(path):
    """Cut a file to half its length."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def sets(*settings):
    """Settings as words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def words(command, out, *settings, file="small.toml"):
    """The words of a quiet command, which may be started in another folder."""
    return [command, str(Path(file).resolve()), "--out", str(Path(out).resolve()), "--quiet", *sets(*settings)]


def said_in_one_line(capsys):
    """What a command said on stderr, which must be one line."""
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


def child(arguments, environment=(), largest_file=None, errors=None):
    """A command in a process of its own."""
    os.environ.update(environment)
    if errors is not None:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    cli.main(arguments)


def start(arguments, **more):
    """Start a command in a process of its own."""
    process = processes.Process(target=child, args=(arguments,), kwargs=more, daemon=True)  # it ends with the tests
    process.start()
    return process


def finish(arguments, **more):
    """The exit code of a command in a process of its own."""
    process = start(arguments, **more)
    process.join(HELD_UP)
    return process.exitcode


def kill(process, folder, rounds, delay):
    """Kill a process some seconds after there are so many rounds more in a folder; whether it had not ended before."""
    before, deadline = count(folder), time.monotonic() + HELD_UP
    while process.is_alive() and count(folder) < before + rounds and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.join(HELD_UP)
    return process.exitcode == -signal.SIGKILL


def count(path):
    """Rounds in all metrics below a folder."""
    return sum(file.read_bytes().count(b"\n") for file in Path(path).rglob("metrics.jsonl"))


def rows(path):
    """The metrics of a run but for the times."""
    return without_times(json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines())


def without_times(history):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


def trial(name, histories, title="", lr=0.1, diverged=None):
    """The runs of an algorithm as a comparison has them, one per history; `diverged` says how all of them did."""
    config = {"algorithm": {"name": name}, "title": title, "train": {"lr": lr}}
    records = [
        Record(Path(), {**config, "train": {"lr": lr, "seed": seed, "rounds": len(history)}}, history, {}, diverged)
        for seed, history in enumerate(histories)
    ]
    return Trial(name, {"lr": lr}, records, len(records))


def populations(monkeypatch):
    """A list that grows by the groups of runs that train side by side."""
    groups, stackable = [], trials.stackable
    monkeypatch.setattr(trials, "stackable", lambda runs: groups.append(stackable(runs)) or groups[-1])
    return groups


def skip_pictures(monkeypatch):
    """Let commands write an empty picture and no report: drawing costs more than training a small model."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b""))
    monkeypatch.setattr("lamina.cli.compare.write_page", lambda comparison, baseline=None: None)


def assert_same(a, b):
    """Two runs ended the same, bit for bit."""
    assert rows(a) == rows(b)
    for name in ("model.safetensors", "best.safetensors"):
        assert (Path(a) / name).read_bytes() == (Path(b) / name).read_bytes(), name


def cells(text, *starts):
    """The rest of the first row of a Markdown table that begins with these cells."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return next(row[len(starts) :] for row in rows if tuple(row[: len(starts)]) == starts)
