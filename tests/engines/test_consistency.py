"""consistency in float32, where clients hardly differ: nothing cancels, in any engine."""

import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.rows import Row
from lamina.engines.stacked.spread import chunk_distances
from lamina.engines.state import RoundSums
from small_simulations import set_chunk

SAMPLES = 30  # of every client


def simulation(clients, noise, dtype, engine="loop", algorithm="fedavg", **more):
    """All clients hold the same samples, up to noise, and take steps over all of them."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(SAMPLES, 20, generator=generator, dtype=torch.float64)
    noises = torch.randn(clients, SAMPLES, 20, generator=generator, dtype=torch.float64)
    x, y = (shared + noise * noises).flatten(0, 1), (torch.arange(SAMPLES) % 5).repeat(clients)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5)).to(dtype)
    parts = [range(SAMPLES * i, SAMPLES * (i + 1)) for i in range(clients)]
    settings = {"clients": parts, "lr": 0.05, "epochs": 5, "batch_size": None, "device": "cpu", "engine": engine}
    return lamina.Simulation(model, (x, y), algorithm, **settings | more)


@pytest.mark.parametrize(("engine", "chunk"), [("loop", None), ("stacked", None), ("stacked", 1), ("stacked", 3)])
@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_clients_that_hardly_differ(engine, chunk, aggregation):
    """It is 1e-8 of ||x+ - x||^2 here, which is the rounding of float32."""
    reference = simulation(4, 1e-4, torch.float64, aggregation=aggregation).run(3)
    run = simulation(4, 1e-4, torch.float32, engine, aggregation=aggregation)
    if chunk is not None:
        set_chunk(run, chunk)
    run.run(3)
    ratio = run.history.last("consistency") / run.history.last("update_norm") ** 2
    assert 1e-9 < ratio < 1e-7
    assert run.history.column("consistency") == pytest.approx(reference.column("consistency"), rel=1e-3)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", ["fedavg", "fedlada", "fedlamb", "localadam"])
def test_a_cohort_of_one_agrees_with_itself(name, engine):
    """x+ = x + delta is the client's own model, up to the rounding of that sum."""
    run = simulation(3, 1.0, torch.float32, engine, algorithm=name, participation=0.3)
    run.run(4)
    for row in run.history:
        assert row["clients"] == 1
        assert row["consistency"] <= (4 * torch.finfo(torch.float32).eps * row["update_norm"]) ** 2


class Up(NamedTuple):
    delta: torch.Tensor


@pytest.mark.parametrize("rows", [1, 3])
def test_an_upload_that_is_not_finite_shows_in_the_distances(rows):
    delta = torch.ones(rows, 4)
    delta[0, -1] = torch.inf
    chunk = [Row(0, c, 1 / rows) for c in range(rows)]
    totals = {0: (Up(delta.mean(0)), {})}
    by_row, _ = chunk_distances(chunk, delta, [RoundSums()], totals, lambda vector: vector)
    assert not torch.isfinite(by_row[0])


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
            sums.add_client(c, lamina.FedAvg(), Up(deltas[c]), {}, loss=0.0, steps=1, by_examples=False)
        Ranks(rank, 2).combine([sums], [(Up(torch.zeros(1000)), torch.zeros(0))], {})
        spreads[rank] = sums.spread

    monkeypatch.setattr(Ranks, "add", add)
    spreads = {}
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert spreads == {0: pytest.approx(expected, rel=1e-3), 1: pytest.approx(expected, rel=1e-3)}
