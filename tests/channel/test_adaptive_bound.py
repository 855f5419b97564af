"""The bound that follows a quantile of the norms: its update, its noise, and the same numbers in all engines."""

import math

import numpy as np
import pytest
import torch

import lamina
from lamina.algorithms.contract import Displacement
from lamina.base.errors import BadInput
from lamina.channel.privacy import Noise, Privacy
from lamina.privacy.accounting import Accountant
from private_runs import X, Y, private_runs


@pytest.fixture
def run_of(tmp_path):
    return private_runs(tmp_path, quantile=0.5)


def test_the_update_is_the_papers(run_of, monkeypatch):
    """C ← C exp(-η (b̃ - γ)), with the uploads clipped to the C of their round, in numpy."""
    norms, clip = [], Privacy.clip

    def watch(self, up, bound=None):
        clipped = clip(self, up, bound)
        norms.append((np.linalg.norm(up.delta.numpy()), np.linalg.norm(clipped.delta.numpy())))
        return clipped

    monkeypatch.setattr(Privacy, "clip", watch)
    privacy = Privacy(0.05, 1e-3, 1.0, quantile=0.7, bound_rate=0.4, noise=Noise(b"fixed", 0.1, count_deviation=0.03))
    bound = 0.05
    run = lamina.Simulation(
        run_of().model,
        (X, Y),
        "fedavg",
        clients=40,
        participation=0.25,
        local_steps=3,
        lr=0.5,
        engine="loop",
        privacy=privacy,
        device="cpu",
    )  # fmt: skip
    parts = []
    for number in range(1, 8):
        norms.clear()
        row = run.run(1)[-1]
        before, after = np.array(norms).T
        assert row["clip_bound"] == pytest.approx(bound, rel=1e-12)
        np.testing.assert_allclose(after, np.minimum(before, bound), rtol=1e-5)
        parts.append(np.mean(before <= bound))
        noise = 0.03 * float(Noise(b"fixed", 1.0).of_round("#within", number, torch.zeros(1)))
        bound *= math.exp(-0.4 * (parts[-1] + noise - 0.7))
        assert run.state.clip_bound == pytest.approx(bound, rel=1e-12)


def test_the_noise_is_split_so_that_epsilon_is_that_of_the_multiplier(run_of):
    """Both mechanisms together move by one unit of the requested noise: 1/z² = 1/z_Δ² + 1/(2 σ_b)²."""
    for cohort, options, count_noise in [
        (10, {}, 2.0),
        (10, {"count_noise": 1.25}, 1.25),
        (10, {"noise_multiplier": 0.3}, 0.5),
    ]:
        run = run_of(privacy=options)
        privacy = run.protocol.privacy
        uploads, count = privacy.noise.deviation * cohort, privacy.noise.count_deviation * cohort
        assert count == pytest.approx(count_noise)
        assert uploads**-2 + (2 * count) ** -2 == pytest.approx(privacy.noise_multiplier**-2)
        accountant = Accountant(privacy.noise_multiplier, 1e-3, 40, participation=0.25)
        assert run.run(1)[-1]["epsilon"] == accountant.epsilon(1)


def test_the_noise_on_the_count_has_its_deviation():
    privacy = Privacy(1.0, 1e-3, 1.0, quantile=0.5, bound_rate=1.0, noise=Noise(b"key", 0.1, count_deviation=0.2))
    noises = [-math.log(privacy.next_bound(number, 0.5, 1.0)) for number in range(1, 1001)]
    assert np.std(noises) == pytest.approx(0.2, rel=0.1)
    assert abs(np.mean(noises)) < 0.02


def test_the_bound_converges_to_the_quantile_of_known_norms():
    norms = np.exp(np.random.default_rng(0).normal(size=101))
    up = Displacement(torch.tensor(norms)[:, None] * torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    for quantile, start in [(0.5, 100.0), (0.8, 1e-3)]:
        privacy = Privacy(start, 1e-3, 1.0, quantile=quantile, noise=Noise(b"key", 0.1, count_deviation=0.02))
        bounds = []
        for number in range(1, 401):
            within = float(privacy.within(up, privacy.adaptive_bound).mean())
            assert within == np.mean(norms <= privacy.bound)
            privacy = privacy.at(privacy.next_bound(number, within, 1.0))
            bounds.append(privacy.bound)
        assert np.mean(bounds[200:]) == pytest.approx(np.quantile(norms, quantile), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedlamb"])
def test_the_engines_agree(run_of, algorithm, sampling):
    privacy = {"bound": 0.1, "secret_cohorts": sampling == "bernoulli"}  # exact and secret: not for clients with state
    make = lambda engine: run_of(algorithm, engine, sampling=sampling, privacy=privacy)  # noqa: E731
    one, other = make("loop"), make("stacked")
    for run in (one, other):
        run.run(4)
    assert one.history.column("clip_bound") == pytest.approx(other.history.column("clip_bound"), rel=1e-12)
    assert len(set(one.history.column("clip_bound"))) == 4
    torch.testing.assert_close(one.state.server.x, other.state.server.x, rtol=1e-9, atol=1e-11)


def test_members_of_a_population_have_bounds_of_their_own(run_of, tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 32)
    shared = {"secret": str(tmp_path / "secret")}
    together = [run_of("scaffold", "stacked", seed=i, sampling="bernoulli", privacy=shared) for i in range(3)]
    lamina.Population(together).run(3)
    for i, one in enumerate(together):
        alone = run_of("scaffold", "stacked", seed=i, sampling="bernoulli")
        alone.run(3)
        assert one.state.clip_bound == pytest.approx(alone.state.clip_bound, rel=1e-12)
        torch.testing.assert_close(one.state.server.x, alone.state.server.x, rtol=1e-9, atol=1e-11)
    assert len({one.state.clip_bound for one in together}) == 3


def test_a_resumed_run_keeps_its_bound(run_of, tmp_path):
    shared = {"secret": str(tmp_path / "secret")}
    whole = run_of(out=tmp_path / "whole", privacy=shared)
    whole.run(4)
    run_of(out=tmp_path / "part", privacy=shared).run(2)
    part = run_of(out=tmp_path / "part", privacy=shared)
    assert part.state.clip_bound == run_of(privacy=shared).run(3)[-1]["clip_bound"]
    part.run(4)
    assert part.state.clip_bound == whole.state.clip_bound
    assert torch.equal(part.state.server.x, whole.state.server.x)


def test_a_round_without_clients_moves_the_bound_by_noise_alone():
    privacy = Privacy(1.0, 1e-3, 1.0, quantile=0.5, noise=Noise(b"key", 0.1, count_deviation=0.2))
    assert privacy.next_bound(1, 1.0, 0.0) == privacy.next_bound(1, 0.0, 0.0)
    assert privacy.next_bound(1, 1.0, 0.5) < privacy.next_bound(1, 0.0, 0.5)


def test_another_bound_or_count_is_another_release():
    tags = []

    class Tags:
        can_repeat = False

        def enter(self, number, tag):
            tags.append(tag)
            return 0, ""

    privacy = Privacy(1.0, 1e-3, 1.0, quantile=0.5, noise=Noise(b"key", 0.1, count_deviation=0.2, releases=Tags()))
    up = Displacement(torch.ones(2))
    for each, within in [(privacy, 0.5), (privacy, 0.6), (privacy.at(1.1), 0.5), (privacy, 0.5)]:
        each.enter(up, 1, 1.0, within)
    assert tags[0] == tags[3]
    assert len(set(tags)) == 3


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"bound": {"delta": 1.0}}, "a quantile adapts one bound"),
        ({"quantile": 1.0}, "privacy: quantile = 1"),
        ({"bound_rate": 0.0}, "privacy: bound_rate = 0"),
        ({"count_noise": 1.0}, "count_noise = 1 leaves no noise multiplier of 2"),
        ({"quantile": None, "count_noise": 3.0}, "privacy: count_noise acts on a bound that follows a quantile"),
        ({"quantile": None, "bound_rate": 0.5}, "privacy: bound_rate acts on a bound that follows a quantile"),
        ({"secret": 5}, "privacy: secret = 5 is not the name of a file"),
        ({"secret": "/"}, "cannot read the secret '/': Is a directory"),
    ],
)
def test_what_is_impossible_is_refused_in_one_line(run_of, privacy, message):
    with pytest.raises(BadInput) as error:
        run_of(privacy=privacy)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
