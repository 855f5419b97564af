"""Several processes share a cohort and end where one process ends."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import kinds
import lamina
from codec_cases import METHODS
from helpers import processes
from lamina.algorithms.contract import Displacement
from lamina.channel.codecs import CODECS
from lamina.channel.privacy import Noise, Privacy
from lamina.engines.ranks import Ranks
from lamina.engines.state import RoundSums
from lamina.training.metrics import DIAGNOSTICS
from objective.test_dropout import simulation as dropout_simulation
from per_layer import PerLayer
from second_gradients import Ditto, FedSam
from small_simulations import simulation

ROOT = Path(__file__).parents[2]
START = processes.get_start_method()  # from a server that has imported torch once
ALGORITHMS = {
    "fedlamb": lambda: lamina.FedLamb(decay=0.01),
    "scaffold": lambda: lamina.Scaffold(),
    "mime": lambda: lamina.create("mime", "mime"),
    "fedlada": lambda: lamina.FedLada(v_init=1e-6),
    "per_layer": PerLayer,
    "fedsam": FedSam,
    "ditto": Ditto,
    "fednova": lambda: lamina.FedNova(momentum=0.5),
    "fedavg": lambda: lamina.FedAvg(),
    "mimelamb": lambda: lamina.MimeLamb(),
}
# 3 of 5 clients active, and 1 of 5: with three ranks some have nothing to do
CASES = [
    ("fedlamb", "cnn", 0.6),
    ("scaffold", "mlp", 0.2),
    ("mime", "batch_norm", 1.0),
    ("fedlada", "mlp", 0.6),
    ("per_layer", "mlp", 0.6),
    ("fednova", "mlp", 0.2),
    ("fedsam", "batch_norm", 0.6),
    ("fedlamb", "augmented", 0.6),
    ("fedlamb", "dropout", 0.6),
    ("mime", "dropout2d", 1.0),
    ("fedlada", "dict", 1.0),
    ("fedlamb", "tuple", 0.7),
    ("fedlada", "private", 0.6),
    ("mime", "private", 0.2),
    ("fedlada", "private head", 0.7),
    ("ditto", "own models", 0.6),
    ("scaffold", "channel", 0.6),
    ("fedlada", "channel", 1.0),
    *((METHODS[(i + more) % len(METHODS)], codec, 0.6) for i, codec in enumerate(CODECS) for more in (0, 1)),
    ("fedlamb", "noise", 0.6),
    ("fedlada", "segmentation", 1.0),
    *((None, kind, 0.7) for kind in kinds.KINDS if kind not in ("dict", "tuple", "segmentation", *kinds.TRANSFORMERS)),
]


def noisy(batch, generator):
    return batch + torch.randn(batch.shape, generator=generator, dtype=batch.dtype)


def run_case(name, kind, share):
    if kind in kinds.KINDS:
        algorithm = None if name is None else ALGORITHMS[name]()
        run = kinds.simulation(kind, "stacked", algorithm, participation=share)
    elif kind == "private":
        settings = {"participation": share, "private": ["0.*", "*.running*"], "local_test": 0.3, "batch_size": None}
        run = simulation("batch_norm", ALGORITHMS[name](), "stacked", **settings)
    elif kind == "private head":  # of a model that returns a dict, with targets in a dict
        settings = {"participation": share, "private": ["size.*"], "local_test": 0.3}
        run = kinds.simulation("dict_targets", "stacked", ALGORITHMS[name](), **settings)
    elif kind == "own models":
        run = simulation("mlp", ALGORITHMS[name](), "stacked", participation=share, local_test=0.3)
    elif kind == "channel":
        channel = {"codec": [{"name": "topk", "share": 0.3}, "qsgd"], "feedback": True, "down": "bf16"}
        run = simulation("mlp", ALGORITHMS[name](), "stacked", participation=share, channel=channel)
    elif kind in CODECS:
        has_feedback = name == METHODS[[*CODECS].index(kind) % len(METHODS)]  # one of the two methods of a codec
        channel = {"codec": kind, "feedback": has_feedback}
        run = simulation("mlp", ALGORITHMS[name](), "stacked", participation=share, channel=channel)
    elif kind == "noise":
        privacy = Privacy(
            0.1, 1e-3, 1.0, quantile=0.4, secret_cohorts=False, noise=Noise(b"fixed", 0.3, count_deviation=0.1)
        )
        more = {"local_steps": 3, "trust_ratios": False, "privacy": privacy}
        run = simulation("mlp", ALGORITHMS[name](), "stacked", participation=share, **more)
    elif kind == "augmented":
        run = simulation("mlp", ALGORITHMS[name](), "stacked", participation=share, augmentation=noisy)
    elif kind.startswith("dropout"):
        run = dropout_simulation(kind, engine="stacked", algorithm=ALGORITHMS[name](), participation=share, lr=0.01)
    else:
        run = simulation(kind, ALGORITHMS[name](), "stacked", participation=share, diagnostics=list(DIAGNOSTICS))
    run.run(2)
    return run


def worker(rank, world, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        ends = {}
        assert Ranks.current().of_first(lambda: f"of rank {rank}") == "of rank 0"
        with pytest.raises(ZeroDivisionError if rank == 0 else lamina.BadInput):
            Ranks.current().of_first(lambda: 1 / 0)
        for case in CASES:
            run = run_case(*case)
            rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in run.history]
            ends[case] = ([v.clone() for v in run.state.server if v is not None], sorted(run.state.clients), rows)
        with pytest.raises(lamina.BadInput, match="run it without torchrun"):
            simulation("mlp", "fedavg", "stacked", aggregation="median").run(1)
        diverging = simulation("mlp", "fedavg", "stacked", lr=1e200)
        try:
            diverging.run(3)
            ends["error"] = None
        except lamina.Diverged as error:
            ends["error"] = (error.round, error.layer)
        ends["stopped"] = stopped_by_the_last(rank == world - 1)
        results[rank] = ends
    finally:
        dist.destroy_process_group()


def stopped_by_the_last(is_last):
    """Return the rounds of a simulation and of a population that only the last process ends."""

    def on_round(*results):
        if is_last and results[-1]["round"] == 2:
            raise StopIteration

    run = simulation("mlp", "fedavg", "stacked")
    run.run(5, on_round)
    members = [simulation("mlp", "fedavg", "stacked", lr=lr) for lr in (0.01, 0.02)]
    lamina.Population(members).run(5, on_round)
    return [len(each.history) for each in (run, *members)]


@pytest.mark.long
def test_torchrun_on_the_command_line(tmp_path):
    """Two processes write one run folder, with the metrics and the clients' models of a single process."""
    overrides = ["train.rounds=3", "train.participation=1.0", "train.private=['*bias']"]
    command = [
        "run",
        str(ROOT / "experiments" / "digits.toml"),
        *(word for one in overrides for word in ("--set", one)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lamina"]
    runs = {}
    for name, how in (("two", start), ("one", [sys.executable, "-m", "lamina"])):
        done = subprocess.run(
            [*how, *command, "--out", name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("records and model in") == 1
        runs[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(runs["two"], runs["one"], strict=True):
        assert a["accuracy"] == b["accuracy"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["bytes_up"] == b["bytes_up"]
    two, one = (lamina.load(tmp_path / name, device="cpu") for name in ("two", "one"))
    for client in range(4):  # every process keeps those of its own clients
        modules = two.client(client).model, one.client(client).model, one.model
        for value, other, shared in zip(*(module.parameters() for module in modules), strict=True):
            torch.testing.assert_close(value, other)
            assert value.dim() > 1 or not torch.equal(value, shared)


def test_a_process_does_not_show_what_another_one_keeps(monkeypatch):
    run = simulation("mlp", "fedavg", "loop", private=["output.*"])
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(0, 2))
    run.client_model(2)
    with pytest.raises(lamina.BadInput, match=r"another process of torchrun keeps what client 1 has: ask process 1"):
        run.client_model(1)


@pytest.mark.long
def test_ranks_give_the_trajectory_of_one_process():
    world = 3
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(worker, args=(world, port, results), nprocs=world, start_method=START)
        results = dict(results)
    assert len(results) == world
    for case in CASES:
        alone = run_case(*case)
        expected = [v for v in alone.state.server if v is not None]
        for rank in range(world):
            vectors, clients, rows = results[rank][case]
            for a, b in zip(vectors, expected, strict=True):
                assert float((a - b).abs().max()) <= 1e-9 * float(b.abs().max()), case
            assert all(i % world == rank for i in clients)
            for row, own in zip(rows, alone.history, strict=True):
                assert row == {k: pytest.approx(own[k], rel=1e-6, abs=1e-12) for k in row}
    assert all(results[rank]["stopped"] == [2, 2, 2] for rank in range(world))
    assert {results[rank]["error"] for rank in range(world)} == {results[0]["error"]}
    assert results[0]["error"] is not None


@pytest.mark.parametrize("shares", [[[0, 3], [1, 2, 4]], [[0, 1, 2, 3, 4], []], [[2], [0, 1, 3, 4]]], ids=str)
def test_ranks_add_up_the_spread_of_their_clients(shares, monkeypatch):
    """Two threads, whose all-reduce meets at a barrier, against one process that adds client after client."""
    weights = [0.1, 0.3, 0.2, 0.15, 0.25]
    deltas = 1 + 1e-4 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    exact = deltas.double()
    mean = (torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * exact).sum(0)
    expected = sum(w * float((row - mean).square().sum()) for w, row in zip(weights, exact, strict=True))
    barrier, parts = threading.Barrier(2), {}

    def add(self, vector):
        parts[self.rank] = vector
        barrier.wait(10)
        total = parts[0] + parts[1]
        barrier.wait(10)
        return total

    def work(rank):
        sums = RoundSums(weights=weights)
        for c in shares[rank]:
            sums.add_client(c, lamina.FedAvg(), Displacement(deltas[c]), {}, loss=0.0, steps=1, by_examples=False)
        Ranks(rank, 2).combine([sums], [(Displacement(torch.zeros(1000)), torch.zeros(0))], {})
        spreads[rank] = sums.spread

    monkeypatch.setattr(Ranks, "add", add)
    spreads = {}
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert spreads == {0: pytest.approx(expected, rel=1e-3), 1: pytest.approx(expected, rel=1e-3)}
