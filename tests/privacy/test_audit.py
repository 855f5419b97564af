"""Audits of simulated federations: bounds below the true ε with their confidence, and above it for wrong mechanisms."""

import dataclasses
import math

import numpy as np
import pytest

from lamina.base.errors import BadInput
from lamina.privacy.accounting import Accountant
from lamina.privacy.audit import error_bound, gaussian_epsilon, membership_bound, one_shot_epsilon, shown_noise

COHORT, DIMENSION, BOUND = 50, 40, 1.0


def normal_cdf(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def gaussian_delta(epsilon, noise):
    """Balle & Wang 2018, theorem 8, for sensitivity 1."""
    return normal_cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * normal_cdf(-0.5 / noise - epsilon * noise)


def gaussian_truth(noise, delta):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, noise) > delta else (low, middle)
    return high


def clipped(rows):
    return rows / np.maximum(1, np.linalg.norm(rows, axis=-1, keepdims=True) / BOUND)


def right(uploads, noise, rng):
    total = clipped(uploads).sum(1)
    return (total + noise * BOUND * rng.standard_normal(total.shape)) / COHORT


def noise_divided_by_the_cohort(uploads, noise, rng):
    total = clipped(uploads).sum(1)
    return (total + noise * BOUND / COHORT * rng.standard_normal(total.shape)) / COHORT


def mean_clipped_instead_of_clients(uploads, noise, rng):
    mean = clipped(uploads.mean(1))
    return mean + noise * BOUND / COHORT * rng.standard_normal(mean.shape)


def scores(mechanism, noise, runs, seed):
    """Scores of one round of many federations with and without a canary, whose upload is far too large."""
    rng = np.random.default_rng(seed)
    canary = np.eye(DIMENSION)[0] * 100
    present, absent = [], []
    for results, last in ((present, canary), (absent, np.zeros(DIMENSION))):
        for _ in range(runs // 500):
            uploads = 0.3 * rng.standard_normal((500, COHORT, DIMENSION)) / math.sqrt(DIMENSION)
            uploads[:, -1] = last
            results.extend(mechanism(uploads, noise, rng)[:, 0])
    return np.array(present), np.array(absent)


def test_the_right_mechanism_stays_below_the_accounted_epsilon_and_is_not_trivial():
    noise, delta = 1.0, 1e-5
    present, absent = scores(right, noise, 4000, seed=1)
    truth = gaussian_truth(noise, delta)
    assert truth == pytest.approx(4.377, abs=1e-3)
    assert 0.5 < membership_bound(present, absent, delta) < truth
    # all other clients move the score as well, so the canary is a little less visible than the noise alone permits
    estimate = gaussian_epsilon((present.mean(), present.std()), (absent.mean(), absent.std()), delta)
    assert 0.85 * truth < estimate < 1.03 * truth


@pytest.mark.parametrize("mechanism", [noise_divided_by_the_cohort, mean_clipped_instead_of_clients])
def test_a_wrong_mechanism_exceeds_the_accounted_epsilon(mechanism):
    noise, delta = 1.5, 1e-5
    present, absent = scores(mechanism, noise, 2000, seed=2)
    truth = gaussian_truth(noise, delta)
    assert membership_bound(present, absent, delta, confidence=0.99) > truth
    assert gaussian_epsilon((present.mean(), present.std()), (absent.mean(), absent.std()), delta) > 5 * truth


def test_a_bound_misses_no_more_often_than_its_confidence_says():
    """At δ = 0.1 a threshold exists that shows all of ε, so that a bound of 90 % does miss now and then."""
    noise, delta, runs = 1.0, 0.1, 2000
    truth, rng = gaussian_truth(noise, delta), np.random.default_rng(3)
    bounds = np.array(
        [
            membership_bound(1 + noise * rng.standard_normal(runs), noise * rng.standard_normal(runs), delta, 0.9)
            for _ in range(300)
        ]
    )
    assert (bounds > truth).mean() < 0.1
    assert bounds.mean() > 0.5 * truth


@pytest.mark.parametrize(("tp", "fp"), [(80, 5), (100, 0), (0, 100), (50, 50)])
def test_the_intervals_are_those_of_clopper_and_pearson(tp, fp):
    """The ends of the intervals are the rates at which the counts have probability 2.5 % in the binomial tails."""
    from scipy import stats

    tpr = stats.binomtest(tp, 100).proportion_ci(0.95, "exact").low
    fpr = stats.binomtest(fp, 100).proportion_ci(0.95, "exact").high
    ratios = ((tpr - 0.01) / fpr, (1 - fpr - 0.01) / (1 - tpr))
    assert error_bound(tp, fp, 100, 100, 0.01) == pytest.approx(max(0.0, math.log(max(*ratios, 1e-9))), abs=1e-9)


def test_equal_scores_show_nothing():
    assert membership_bound([1.0] * 50, [1.0] * 50, 1e-5) == 0


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_shown_noise_is_little_more_than_the_noise_and_never_less(noise):
    """Also where a bound at the δ of the guarantee says nothing: 1,000 runs show ε = 5 at most, and the truth is 10."""
    rounds, accountant, rng = 4, Accountant(noise, 1e-5, 10), np.random.default_rng(8)
    shift = rounds**0.5 / noise
    seen = [
        shown_noise(shift + rng.standard_normal(1000), rng.standard_normal(1000), accountant, rounds, 0.99)
        for _ in range(50)
    ]
    assert min(seen) > noise
    assert np.median(seen) < 1.6 * noise


def test_shown_noise_of_rounds_in_which_few_take_part():
    rng, accountant = np.random.default_rng(9), Accountant(0.7, 1e-5, 100, participation=0.1, sampling="bernoulli")
    takes_part = rng.random((3000, 5)) < 0.1
    present, absent = (rows + 0.7 * rng.standard_normal((3000, 5)) for rows in (takes_part, 0.0))
    present, absent = (np.logaddexp(0, np.log(1 / 9) + (2 * r - 1) / 0.98).sum(1) for r in (present, absent))
    assert 0.7 < shown_noise(present, absent, accountant, 5) < 1.1
    halved = dataclasses.replace(accountant, noise_multiplier=1.4)
    assert shown_noise(present, absent, halved, 5) == pytest.approx(shown_noise(present, absent, accountant, 5))


def test_equal_scores_leave_any_noise_possible():
    assert shown_noise([1.0] * 50, [1.0] * 50, Accountant(1.0, 1e-5, 10), 5) == math.inf


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_two_gaussians_of_equal_spread_are_the_gaussian_mechanism(noise, delta):
    assert gaussian_epsilon((5 + 2.0, 2 * noise), (5.0, 2 * noise), delta) == pytest.approx(
        gaussian_truth(noise, delta), rel=1e-6
    )


@pytest.mark.parametrize("spread", [0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_two_gaussians_agree_with_numerical_integration(spread, shift):
    delta = 1e-3
    x = np.linspace(-30, 30, 600_001)
    p = np.exp(-0.5 * ((x - shift) / spread) ** 2) / spread
    q = np.exp(-0.5 * x**2)
    width = (x[1] - x[0]) / math.sqrt(2 * math.pi)
    epsilon = gaussian_epsilon((shift, spread), (0.0, 1.0), delta)
    worst = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * width for a, b in ((p, q), (q, p)))
    assert worst == pytest.approx(delta, rel=1e-3)


def test_gaussians_without_a_difference_show_nothing():
    assert gaussian_epsilon((0.3, 1.0), (0.3, 1.0), 1e-5) == 0


def test_one_shot_estimate_of_a_gaussian_mechanism():
    """300 canaries in one federation of a model with 20,000 parameters; the noise alone hides each of them."""
    rng, dimension, noise, delta = np.random.default_rng(7), 20_000, 1.0, 1e-5
    canaries = rng.standard_normal((300, dimension))
    canaries /= np.linalg.norm(canaries, axis=1, keepdims=True)
    change = canaries.sum(0) + noise * rng.standard_normal(dimension)
    seen = canaries @ change / np.linalg.norm(change)
    unseen = rng.standard_normal((300, dimension)) @ change / np.linalg.norm(change) / math.sqrt(dimension)
    assert 0.7 * 4.377 < one_shot_epsilon(seen, dimension, delta) < 1.4 * 4.377
    assert one_shot_epsilon(unseen, dimension, delta) < 1.5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: membership_bound([1.0], [0.0, 1.0], 1e-5), "'present' has 1"),
        (lambda: membership_bound([1.0, 2.0], [0.0, math.nan], 1e-5), "'absent' has 1"),
        (lambda: membership_bound([1.0, 2.0], [0.0, 1.0], 1.5), "delta"),
        (lambda: membership_bound([1.0, 2.0], [0.0, 1.0], 1e-5, confidence=95), "confidence"),
        (lambda: gaussian_epsilon((1.0, 0.0), (0.0, 1.0), 1e-5), "standard deviation"),
    ],
)
def test_impossible_audits_are_refused(call, text):
    with pytest.raises(BadInput, match=text):
        call()
