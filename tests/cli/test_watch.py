"""`lamina watch` tells from the folder alone how runs stand."""

import json
import time
from pathlib import Path

import pytest

from helpers import call
from lamina import cli
from lamina.cli import watch
from lamina.storage.leases import take

CONFIG = {
    "lamina": "0",
    "format": 1,
    "data": {"name": "digits"},
    "algorithm": {"name": "fedavg"},
    "train": {"rounds": 10, "lr": 0.1, "seed": 0},
}


@pytest.fixture(autouse=True)
def here(empty_folder, monkeypatch):
    monkeypatch.setattr(watch, "EVERY", 0)
    return empty_folder


def make_run(folder, rounds, diverged=None):
    """A run's folder as lamina leaves it after some of its ten rounds, of half a second each."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, rounds + 1))))
    if diverged:
        (folder / "diverged.json").write_text(json.dumps({"message": diverged}))
    return folder


def line(number):
    row = {"round": number, "accuracy": number / 10, "loss": 1 / number, "train_loss": None, "seconds": 0.4}
    return json.dumps({**row, "evaluation_seconds": 0.1}) + "\n"


def frame(capsys, folder):
    assert call("watch", str(folder), "--once") == 0
    return capsys.readouterr().out


def test_a_running_run(capsys):
    run = make_run("run", 4)
    lease = take(run)
    shown = frame(capsys, run)
    lease.release()
    for part in ("run: fedavg lr 0.1 seed 0, running", "4/10", "0.4, best 0.4", "0.25, best 0.25", "2 rounds/s",
                 "0:00:03"):  # fmt: skip
        assert part in shown
    assert "training loss" not in shown  # nothing finite to draw


def test_runs_that_have_stopped(capsys):
    assert "complete" in frame(capsys, make_run("complete", 10))
    stopped = frame(capsys, make_run("stopped", 4))
    assert "stopped" in stopped
    assert "run the same command again to resume" in stopped
    assert "time left" not in stopped
    diverged = frame(capsys, make_run("diverged", 4, "round 5: the loss is [NaN]"))
    assert "diverged" in diverged
    assert "round 5: the loss is [NaN]" in diverged


def test_a_folder_of_runs(capsys):
    make_run("runs/a", 10)
    lease = take(make_run("runs/b/seed0", 5))
    make_run("runs/c", 0)
    shown = frame(capsys, "runs").splitlines()
    lease.release()
    assert [row.split()[:3] for row in shown[1:4]] == [
        ["b/seed0", "running", "5/10"], ["a", "complete", "10/10"], ["c", "stopped", "0/10"]
    ]  # fmt: skip
    assert shown[4] == "3 runs: 1 running, 1 complete, 1 stopped"


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_shows_fewer_columns_and_those_whole(capsys, monkeypatch, width):
    for name in ("fedavg", "fedlamb"):
        for seed in range(3):
            make_run(f"runs/{name}/seed{seed}", 10)
    lease = take(make_run("runs/scaffold/seed0", 5))
    monkeypatch.setattr(watch.out, "width", width)
    monkeypatch.setattr(cli, "WIDTH_FOR_PROGRAMS", width)
    shown = frame(capsys, "runs").splitlines()
    lease.release()
    words = [line.split() for line in shown[1:8]]
    runs = ["scaffold/seed0", *(f"{name}/seed{seed}" for name in ("fedavg", "fedlamb") for seed in range(3))]
    assert [line[0] for line in words] == runs
    assert words[0][1:4] == ["running", "5/10", "0.5000"]
    assert words[0][-1] == "0:00:02"  # the time left is worth more than a curve
    assert all(line[:4] == [run, "complete", "10/10", "1.0000"] for run, line in zip(runs[1:], words[1:], strict=True))
    assert all(len(line) <= width for line in shown)
    assert "…" not in "".join(shown)


def test_it_ends_with_the_run(capsys, monkeypatch):
    run = make_run("run", 8)
    lease = take(run)
    looks = []

    def a_round_later(_):
        looks.append(len(looks))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(9 + len(looks) - 1) if len(looks) <= 2 else "")
        if len(looks) == 3:
            lease.release()

    monkeypatch.setattr(time, "sleep", a_round_later)
    assert call("watch", "run") == 0
    assert len(looks) == 3
    assert "complete" in capsys.readouterr().out


def test_ctrl_c_ends_it(monkeypatch):
    lease = take(make_run("run", 3))

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert call("watch", "run") == 0
    lease.release()


def test_a_run_before_its_first_round(capsys):
    Path("run").mkdir()
    lease = take(Path("run"))
    assert frame(capsys, "run") == "run: waiting for the first round\n"
    lease.release()
    assert call("watch", "run", "--once") == 2
    assert "no run in 'run'" in capsys.readouterr().err


def test_no_folder(capsys):
    assert call("watch", "nowhere") == 2
    assert capsys.readouterr().err.startswith("error: no folder 'nowhere' in ")


def test_looking_does_not_keep_a_run_from_starting():
    run = make_run("run", 3)
    assert not watch.is_held(run)
    take(run).release()


def test_the_speed_seen_counts_more_than_the_recorded_one(monkeypatch):
    """Runs side by side record their share of the time only."""
    run = make_run("run", 4)
    lease = take(run)
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    view = watch.View(run)
    view.frame()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(5))
    with watch.out.capture() as printed:
        watch.out.print(view.frame())
    lease.release()
    assert "0.25 rounds/s" in printed.get()


def test_runs_show_their_own_metric(capsys):
    make_run("runs/a", 3)
    folder = make_run("runs/b", 3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{"round": row["round"], "loss": 0.25, "seconds": 1.0} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = frame(capsys, "runs").splitlines()
    assert "score" in shown[0]
    assert "accuracy 0." in shown[1]
    assert "loss 0.2500" in shown[2]
