"""Second moments of a noised mean, less the variance of its noise."""

import math

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms.contract import Displacement, ServerInfo
from lamina.algorithms.primitives import square_less_noise
from lamina.base.errors import BadInput
from lamina.channel.privacy import Noise, Privacy
from lamina.objective.objective import Objective
from lamina.privacy.correlated import relative_deviation, square_root
from private_runs import private_runs


@pytest.fixture
def run_of(tmp_path):
    make = private_runs(tmp_path, hidden=40, debias=True)
    return lambda algorithm="fedadam", engine="loop", **more: make(algorithm, engine, **more)


@pytest.fixture
def means(monkeypatch):
    """The noised mean of every round."""
    seen, original = [], Privacy.private_mean

    def private_mean(self, *arguments):
        seen.append(original(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(Privacy, "private_mean", private_mean)
    return seen


@pytest.mark.parametrize("name", ["fedadam", "fedadam_star"])
def test_the_mean_of_v_is_that_without_noise(name):
    """D = 2 and s = 0.3, in 100,000 coordinates: the mean of the squares is D², not D² + s²."""
    count, deviation = 100_000, 0.3
    algorithm, privacy = lamina.algorithms.create(name, beta2=0.25), Privacy(1.0, 1e-3, 1.0, debias=True)
    privacy = privacy.with_noise(1.0, Noise(b"known", deviation))
    layers = Objective(nn.Linear(count, 1, bias=False).double(), "cross_entropy").layers
    server = algorithm.init(torch.zeros(count, dtype=torch.float64), layers)
    noised = privacy.private_mean(algorithm, Displacement(torch.full((count,), 2.0, dtype=torch.float64)), 1, 1.0)
    means = {}
    for debias in (True, False):
        variance = privacy.noise_variance(algorithm, noised, 1) if debias else 0.0
        after = algorithm.update(server, noised, ServerInfo(1, 0.1, layers, noise_variance=variance))
        means[debias] = float(after.v.mean())
    start, error = 0.25 * algorithm.v_init, 5 * 0.75 * 2 * 2 * deviation / math.sqrt(count)
    assert means[True] == pytest.approx(start + 0.75 * 4, abs=error)
    assert means[False] == pytest.approx(start + 0.75 * (4 + deviation**2), abs=error)
    assert error < 0.75 * deviation**2 / 2


@pytest.mark.parametrize("bands", [1, 3])
def test_the_run_subtracts_the_variance_of_each_rounds_noise(run_of, means, bands):
    run = run_of(privacy={"bands": bands}, min_separation=bands)
    expected = run.state.server.v.clone()
    for number in range(1, 5):
        run.run(1)
        deviation = 2.0 * 0.5 / 10 * relative_deviation(square_root(bands), number)
        square = (means[-1].delta ** 2 - deviation**2).clamp(min=0)
        expected = 0.99 * expected + 0.01 * square
        torch.testing.assert_close(run.state.server.v, expected, rtol=1e-9, atol=1e-15)
        assert 0.1 < float((square == 0).double().mean()) < 0.9


def test_mime_subtracts_the_variance_of_its_gradients_noise(run_of, means):
    bounds = {"delta": 0.5, "gradient": 0.2}
    algorithm = lamina.algorithms.create("mime", v_init=0.5, beta2=0.5)
    run = run_of(algorithm, privacy={"bound": bounds, "secret_cohorts": False})
    run.run(1)
    deviation = 2.0 * 0.2 * math.sqrt(2) / 10  # of two fields
    expected = 0.25 + 0.5 * (means[-1].gradient ** 2 - deviation**2).clamp(min=0)
    torch.testing.assert_close(run.state.server.v, expected)


@pytest.mark.parametrize("algorithm", ["fedadam", "fedadam_star", "mime", "mimelamb"])
def test_the_engines_agree(run_of, algorithm):
    how = {"sampling": "bernoulli"}  # clients of mime and mimelamb keep their momentum
    one, other = run_of(algorithm, **how), run_of(algorithm, "stacked", **how)
    biased = run_of(algorithm, privacy={"debias": False}, **how)
    for run in (one, other, biased):
        run.run(3)
    torch.testing.assert_close(one.state.server.x, other.state.server.x, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(one.state.server.v, other.state.server.v, rtol=1e-8, atol=1e-14)
    assert not torch.allclose(one.state.server.v, biased.state.server.v)


def test_without_it_nothing_changes(run_of, means):
    values = torch.tensor([-1.5, 1e-30, 0.0, 2.0, math.inf])
    assert torch.equal(square_less_noise(values, 0.0), values**2)
    run = run_of(privacy={"debias": False})
    start = run.state.server.v.clone()
    run.run(1)
    assert torch.equal(run.state.server.v, torch.lerp(start, means[0].delta ** 2, 1 - 0.99))
    assert "debias" not in run.protocol.privacy.record()  # the noise of earlier runs stays what it was
    assert run_of().protocol.privacy.record()["debias"] is True


@pytest.mark.parametrize(
    ("algorithm", "debias", "message"),
    [
        ("fedavg", True, "does not: leave it out"),
        ("fedlamb", True, "for servers that square the mean"),
        ("fedadam", "yes", "debias = 'yes' is neither true nor false"),
    ],
)
def test_where_nothing_is_squared_it_is_refused_in_one_line(run_of, algorithm, debias, message):
    with pytest.raises(BadInput) as error:
        run_of(algorithm, privacy={"debias": debias})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
