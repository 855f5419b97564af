"""The spread of the uploads, for `consistency`: nothing cancels in float32, in any engine."""

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms.contract import Displacement
from lamina.engines.stacked import spread
from lamina.engines.stacked.rows import Row
from lamina.engines.stacked.spread import chunk_distances, squared_distances
from lamina.engines.state import RoundSums
from small_simulations import assert_same, reference, set_chunk, take_gpu_path
from small_simulations import simulation as small_simulation

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


@pytest.mark.long
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


@pytest.mark.parametrize("rows", [1, 3])
def test_an_upload_that_is_not_finite_shows_in_the_distances(rows):
    delta = torch.ones(rows, 4)
    delta[0, -1] = torch.inf
    chunk = [Row(0, c, 1 / rows) for c in range(rows)]
    totals = {0: (Displacement(delta.mean(0)), {})}
    by_row, _ = chunk_distances(chunk, delta, [RoundSums()], totals, lambda vector: vector)
    assert not torch.isfinite(by_row[0])


def test_updates_whose_squares_overflow_are_measured_as_in_the_loop():
    """Their consistency is finite in float64, and no client has diverged."""
    settings = {"dtype": torch.float32, "lr": 1e22, "local_steps": 1}
    loop, run = reference("mlp", "fedavg", 1, **settings), small_simulation("mlp", "fedavg", "stacked", **settings)
    take_gpu_path(run)
    run.run(1)
    assert_same(run.state, loop.state, 1e-5)
    assert run.history.column("consistency") == pytest.approx(loop.history.column("consistency"), rel=1e-5)


def test_distances_are_taken_in_pieces_from_every_rows_own_centre(monkeypatch):
    monkeypatch.setattr(spread, "PIECE_ELEMENTS", 6)  # two columns of three rows at a time
    rows, centres = torch.randn(3, 5), torch.randn(2, 5)
    expected = (rows - centres[[1, 0, 1]]).square().sum(1)
    torch.testing.assert_close(squared_distances(rows, centres, [1, 0, 1]), expected)


def test_half_precision_is_squared_in_float32():
    rows = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert squared_distances(rows, torch.zeros(1, 4), [0]).tolist() == [360_000.0]
