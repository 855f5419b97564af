"""Training a run: checkpoints, stops, several processes, and the class counts in partition.json."""

import json
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

import lamina
from helpers import HELD_UP, assert_same, call, rows, start
from lamina.data import Classes, Reallocate, label_counts
from lamina.experiment import build as building
from lamina.experiment.config import load
from lamina.experiment.runs import run as running
from lamina.experiment.runs.folder import RunFolder
from lamina.report.build import build
from lamina.storage.checkpoint import Checkpoints
from lamina.training.training import Training
from small_run import command


def labelled(n=60, classes=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 5, generator=generator), torch.arange(n) % classes


def train(out, data=None, rounds=1, model=None, **settings):
    simulation = lamina.Simulation(
        model or torch.nn.Linear(5, 3), data or labelled(), "fedavg", lr=0.1, out=out, **settings
    )
    simulation.run(rounds)
    return simulation


def stored(out):
    return np.array(json.loads((out / "partition.json").read_text())["class_counts"])


def test_a_run_stores_what_its_clients_hold_and_its_report_shows_it(tmp_path):
    torch.manual_seed(0)
    data, model = labelled(), torch.nn.Linear(5, 3)
    parts = Classes(2).split(data[1].numpy(), 4, 0)
    train(tmp_path / "r", data, model=model, clients=4, partition=Classes(2))
    counts = label_counts(parts, data[1].numpy())
    assert stored(tmp_path / "r").tolist() == counts.tolist()
    ((title, shown),) = build([tmp_path / "r"]).dealt
    assert shown == counts.tolist()
    assert title.endswith("4 clients, seed 0")


def test_held_out_clients_and_samples_count_too(tmp_path):
    lists = [range(10), range(10, 30), range(30, 60)]
    simulation = train(tmp_path / "r", clients=lists, heldout_clients=[1], local_test=0.5)
    assert simulation.plan.clients.count == 2
    assert stored(tmp_path / "r").sum(axis=1).tolist() == [10, 20, 30]


def test_of_clients_that_are_dealt_anew_the_first_round_is_an_example(tmp_path):
    simulation = train(tmp_path / "r", rounds=2, clients=6, participation=0.5, partition=Reallocate(Classes(1)))
    first = simulation.plan.round(1).samples
    assert stored(tmp_path / "r").tolist() == label_counts(first, simulation.train_data.labels).tolist()
    ((title, _),) = build([tmp_path / "r"]).dealt
    assert title.endswith("seed 0; split again in every round: this is an example")


def test_without_classes_with_too_many_numbers_or_with_privacy_there_is_no_file(tmp_path, monkeypatch):
    x, _ = labelled()
    train(tmp_path / "regression", (x, x[:, :1]), model=torch.nn.Linear(5, 1), loss="mse", clients=4)
    monkeypatch.setattr(running, "MOST_CLASS_COUNTS", 12)
    train(tmp_path / "at-most", clients=4)
    train(tmp_path / "more", clients=5)
    privacy = {"bound": 1.0, "noise_multiplier": 1.0, "delta": 0.01, "secret": str(tmp_path / "secret")}
    train(tmp_path / "private", clients=4, local_steps=1, privacy=privacy)  # its clients' classes have no noise
    assert [path.parent.name for path in tmp_path.rglob("partition.json")] == ["at-most"]
    assert len(build([tmp_path]).dealt) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_the_file_is_no_part_of_the_identity_of_a_run(tmp_path, monkeypatch, lost):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text('[data]\nname = "digits"\nclients = 5\n[train]\nrounds = 1\nlr = 0.1\n')
    assert call("run", "e.toml", "--out", "r", "-q") == 0
    file = tmp_path / "r" / "partition.json"
    before = file.read_bytes()
    if lost:  # as in a folder of an earlier version
        file.unlink()
    assert call("run", "e.toml", "--out", "r", "-q", "--set", "train.rounds=2") == 0
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2
    assert lost or file.read_bytes() == before
    assert call("run", "e.toml", "--out", "r", "-q", "--overwrite", "--set", "data.clients=6") == 0
    assert len(stored(tmp_path / "r")) == 6


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


def test_checkpoints_of_every_third_round(here, capsys):
    assert call(*command("whole", rounds=8)) == 0
    assert call(*command("r", "run.checkpoint_every=3", rounds=8)) == 0
    assert Checkpoints(here / "r" / "checkpoints").rounds() == [6, 8]  # the last round always
    assert_same("whole", "r")


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
