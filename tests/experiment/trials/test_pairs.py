"""Paired differences and their intervals, against numbers worked out by hand and published quantiles."""

import math

import pytest

from lamina.experiment.trials.pairs import Difference, paired_difference, t_quantile

# Student's t, two-sided 95 %, as the tables of textbooks print it
PUBLISHED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize("degrees", PUBLISHED)
def test_quantiles_are_the_published_ones(degrees):
    assert t_quantile(degrees) == pytest.approx(PUBLISHED[degrees], abs=5e-4)


def test_a_paired_difference_is_that_of_the_same_seeds():
    # differences 1, 2, 3: mean 2, standard deviation 1, standard error 1 / sqrt(3)
    difference = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {2: 30.0, 1: 20.0, 0: 10.0})
    assert difference is not None
    assert (difference.mean, difference.seeds) == (2.0, 3)
    assert difference.margin == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert difference.low == pytest.approx(2 - 2.484, abs=1e-3)
    assert difference.includes(0.0)


def test_pairing_removes_what_seeds_have_in_common():
    difference = paired_difference({0: 0.5, 1: 0.9, 2: 0.1}, {0: 0.4, 1: 0.8, 2: 0.0})
    assert difference is not None
    assert difference.mean == pytest.approx(0.1)
    assert not difference.includes(0.0)


def test_only_seeds_that_both_have_count():
    assert paired_difference({0: 1.0, 1: 5.0}, {1: 2.0, 2: 9.0}) == Difference(3.0, None, 1)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval():
    difference = paired_difference({0: 1.0}, {0: 0.25})
    assert difference is not None
    assert difference.margin is None
    assert not difference.includes(0.0)
