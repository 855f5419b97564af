"""Robust means: the definitions, the same result in every engine, and hostile clients in a simulation."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.experiment import build as building
from lamina.experiment.config import parse
from lamina.rounds import aggregation
from lamina.rounds.aggregation import CentredClipping, Mean, Median, TrimmedMean

ROBUST = [Median(), TrimmedMean(0.2), CentredClipping(), CentredClipping(0.1, 2)]
EQUAL = torch.full((5,), 0.2, dtype=torch.float64)
ROWS = torch.tensor([[1.0, 5.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [90.0, -70.0]], dtype=torch.float64)
PARTS = [list(range(0, 8)), list(range(8, 20)), list(range(20, 34)), list(range(34, 40)), list(range(40, 60))]


def test_the_definitions():
    assert Mean().combine(ROWS, EQUAL).tolist() == pytest.approx(ROWS.mean(0).tolist())
    assert Median().combine(ROWS, EQUAL).tolist() == [3.0, 2.0]
    assert Median().combine(ROWS[:4], EQUAL[:4] * 1.25).tolist() == [2.5, 2.5]
    assert TrimmedMean(0.2).combine(ROWS, EQUAL).tolist() == pytest.approx([3.0, 2.0])  # one client at either end
    assert TrimmedMean(0.1).combine(ROWS, EQUAL).tolist() == pytest.approx([(0.5 + 2 + 3 + 4 + 45) / 4,
                                                                           (2.5 + 1 + 2 + 3 - 35) / 4])  # fmt: skip
    assert (CentredClipping().combine(ROWS, EQUAL) - ROWS[:4].mean(0)).norm() < 2
    torch.testing.assert_close(CentredClipping(1e9, 1).combine(ROWS, EQUAL), ROWS.mean(0))


@pytest.mark.parametrize("kind", [Median(), TrimmedMean(0.2), TrimmedMean(0.13)], ids=str)
def test_a_client_of_double_weight_counts_as_two(kind):
    twice = torch.cat([ROWS, ROWS[1:2]])
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64) / 6
    alone = kind.combine(twice, torch.full((6,), 1 / 6, dtype=torch.float64))
    torch.testing.assert_close(kind.combine(ROWS, weights), alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_even_number_of_equal_weights_shares_the_middle(dtype):
    """1/6 and 1/10 in float32 sum to more than one half, and in bfloat16 six of them are far from one."""
    for clients in range(1, 31):
        rows = torch.arange(clients, dtype=torch.float64).unsqueeze(1)
        weights = torch.full((clients,), 1 / clients, dtype=dtype)
        assert Median().combine(rows, weights).item() == (clients - 1) / 2
    unequal = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=dtype)
    if dtype.itemsize >= 4:  # 0.1 + 0.4 is one half
        assert Median().combine(rows[:4], unequal).item() == 1.5


@pytest.mark.parametrize("kind", ROBUST, ids=str)
def test_second_moments_stay_non_negative(kind):
    rows = torch.rand(7, 200) ** 12
    rows[0] *= 1e6
    weights = torch.rand(7, dtype=torch.float64)
    assert bool((kind.combine(rows, weights / weights.sum()) >= 0).all())
    assert torch.equal(kind.combine(torch.zeros(3, 4), EQUAL[:3] / 0.6), torch.zeros(4))


def model(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(6, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).double()


def the_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (60,), generator=generator)


def simulation(engine, kind, algorithm="fedlamb", *, norm=True, **more):
    settings = {"clients": PARTS, "participation": 0.8, "batch_size": 4, "seed": 1, "device": "cpu", **more}
    chosen = lamina.create(*algorithm) if isinstance(algorithm, tuple) else algorithm
    return lamina.Simulation(model(norm), the_data(), chosen, engine=engine, aggregation=kind, **settings)


def vectors(run):
    return [v for v in run.state.server if v is not None] + list(run.state.buffers.values())


def assert_close(a, b):
    for own, other in zip(vectors(a), vectors(b), strict=True):
        assert float((own - other).abs().max()) <= 1e-10 * float(other.abs().max())
    for row, other in zip(a.history, b.history, strict=True):
        assert row["consistency"] == pytest.approx(other["consistency"], rel=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("weighting", ["clients", "examples"])
@pytest.mark.parametrize("kind", ROBUST, ids=str)
def test_the_engines_agree(kind, weighting):
    loop, stacked = (simulation(engine, kind, weighting=weighting) for engine in ("loop", "stacked"))
    stacked.engine.rows_per_chunk = 2  # the rows of all chunks count
    for run in (loop, stacked):
        run.run(3)
    assert_close(stacked, loop)
    plain = simulation("loop", "mean", weighting=weighting)
    plain.run(3)
    assert not torch.allclose(plain.state.server.x, loop.state.server.x)


@pytest.mark.parametrize("algorithm", [("mime", "mime"), "scaffold", "fedlada"], ids=str)
def test_the_engines_agree_on_every_kind_of_upload(algorithm):
    """Mime's mean gradient is combined in the same way."""
    loop, stacked = (simulation(engine, "median", algorithm, norm=False) for engine in ("loop", "stacked"))
    for run in (loop, stacked):
        run.run(3)
    assert_close(stacked, loop)


def test_a_population_ends_as_its_members_do_alone():
    rates = (0.01, 0.05)
    alone = [simulation("stacked", TrimmedMean(0.3), lr=lr) for lr in rates]
    for run in alone:
        run.run(3)
    together = [simulation("stacked", TrimmedMean(0.3), lr=lr) for lr in rates]
    lamina.Population(together).run(3)
    for a, b in zip(together, alone, strict=True):
        assert_close(a, b)
    with pytest.raises(BadInput, match=r"differ in aggregation \(Median\(\) and Mean\(\)\)"):
        lamina.Population([simulation("stacked", "median"), simulation("stacked", "mean")])


class Reversed(lamina.FedAvg):
    """FedAvg on which the clients with fewer than three local steps upload a large step in the wrong direction."""

    def finish(self, local, down, client, info):
        up, client = super().finish(local, down, client, info)
        hostile = torch.as_tensor(info.steps) < 3
        return up._replace(delta=torch.where(hostile, -100.0, 1.0) * up.delta), client


@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "centred_clipping"])
def test_a_hostile_client_cannot_move_a_robust_mean(kind):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    parts = [list(range(10 * i, 10 * i + (10 if i else 4))) for i in range(5)]

    def accuracy(chosen):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            start = nn.Linear(4, 2)
        run = lamina.Simulation(start, (x, y), Reversed(), test=(x, y), clients=parts, batch_size=3, lr=0.3, seed=0,
                                aggregation=chosen)  # fmt: skip
        return run.run(8)[-1]["accuracy"]

    assert accuracy(kind) > 0.8
    assert accuracy("mean") < 0.6


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: aggregation.make("mediam"), "did you mean 'median'"),
        (lambda: aggregation.make("trimmed_mean", shar=0.1), "did you mean 'share'"),
        (lambda: TrimmedMean(0.5), r"share = 0.5 is not a number >= 0 and < 0.5"),
        (lambda: CentredClipping(0.0), "radius = 0.0 is not a number > 0"),
        (lambda: CentredClipping(iterations=0), "iterations = 0 is not a whole number >= 1"),
        (lambda: simulation("loop", Median), "or an object such as lamina.aggregation.Median"),
        (lambda: simulation("loop", 3), "or an object such as lamina.aggregation.Median"),
    ],
)
def test_wrong_settings_are_one_line(make, why):
    with pytest.raises(BadInput, match=why) as error:
        make()
    assert "\n" not in str(error.value)


def test_an_experiment_file_names_the_aggregation():
    small = {"data": {"clients": 4}, "model": {"name": "mlp", "hidden": 4}, "train": {"rounds": 1}}
    small["train"]["aggregation"] = {"name": "trimmed_mean", "share": 0.25}
    experiment = parse(small)
    run = building.build(experiment)
    assert run.protocol.aggregation == TrimmedMean(0.25)
    assert building.resolved(experiment, run)["train"]["aggregation"] == {"name": "trimmed_mean", "share": 0.25}
    short = parse({**small, "train": {"aggregation": "median"}})
    assert building.settings_of(short)["aggregation"] == Median()
    plain = parse({**small, "train": {}})
    assert building.resolved(plain, building.build(plain))["train"]["aggregation"] == {"name": "mean"}
    with pytest.raises(BadInput, match="aggregation 'trimmed_mean' has no option 'shar'; did you mean 'share'"):
        building.settings_of(parse({**small, "train": {"aggregation": {"name": "trimmed_mean", "shar": 1}}}))


def test_weights_are_those_of_the_clients_that_answered():
    weights = np.array([0.5, 0.3, 0.2])
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    assert aggregation.combine_vectors(Median(), list(rows), weights.tolist()).item() == 1.5
