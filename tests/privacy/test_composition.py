"""Composed privacy losses against dp_accounting's own composition and against exact ones."""

import math

import pytest

from lamina.privacy.composition import Composition

distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
pld_pmf = pytest.importorskip("dp_accounting.pld.pld_pmf")


@pytest.mark.parametrize(
    ("fraction", "noise", "grid"), [(0.01, 1.0, 3e-3), (0.3, 0.4, 1e-2), (1.0, 0.9, 1e-2), (0.05, 8, 1e-4)]
)
@pytest.mark.parametrize("rounds", [1, 2, 40, 300])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_dp_accounting_gives_the_same_epsilon(fraction, noise, grid, rounds, delta):
    pld = distributions.from_gaussian_mechanism(noise, sampling_prob=fraction, value_discretization_interval=grid)
    ours = max(Composition(pmf).epsilon(rounds, delta) for pmf in (pld._pmf_remove, pld._pmf_add))
    assert ours == pytest.approx(pld.self_compose(rounds).get_epsilon_for_delta(delta), rel=1e-6, abs=1e-9)


def test_a_huge_epsilon_is_still_that_of_the_gaussian_mechanism():
    """The loss of 300 rounds is N(μ²/2, μ²) with μ = √300 / 0.3; δ = 1e-3 is nearly its upper tail, at 3.09 μ."""
    pmf = distributions.from_gaussian_mechanism(0.3, value_discretization_interval=1e-2)._pmf_remove
    mu = math.sqrt(300) / 0.3
    assert Composition(pmf).epsilon(300, 1e-3) == pytest.approx(mu**2 / 2 + 3.0902 * mu, rel=1e-3)


def test_randomised_response_twice():
    """The loss is ±1 with probabilities p = e/(1+e) and 1 - p. Twice, ε in (0, 2) has δ = p² - e^ε (1 - p)²."""
    p = math.e / (1 + math.e)
    twice = Composition(pld_pmf.create_pmf({-10: 1 - p, 10: p}, 0.1, 0.0, True))
    for epsilon in (0.3, 1.0, 1.9):
        delta = p**2 - math.exp(epsilon) * (1 - p) ** 2
        assert twice.epsilon(2, delta) == pytest.approx(epsilon, abs=1e-9)
    assert twice.epsilon(2, p**2) == 0  # more than δ(0)


def test_a_loss_that_may_be_infinite_has_no_epsilon_below_its_probability():
    pmf = pld_pmf.create_pmf({0: 0.99}, 0.1, 0.01, True)
    assert Composition(pmf).epsilon(1, 0.02) == 0
    assert Composition(pmf).epsilon(3, 0.02) == math.inf
