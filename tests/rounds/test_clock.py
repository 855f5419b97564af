"""The clock against numbers computed by hand, and the rules for what comes late."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.base.errors import BadInput
from lamina.rounds.clock import PRESETS, Clock, Lognormal, Task, as_clock, make_clock, shared_ends

MEGABYTE = 1e6


def ready(clock, gradients, down=0.0, up=0.0, *, cohort=None, clients=None, seed=0, exchanges=1):
    gradients = np.asarray(gradients)
    ones = np.ones(len(gradients))
    cohort = np.arange(len(gradients)) if cohort is None else np.asarray(cohort)
    task = Task(gradients, down * ones, up * ones, exchanges)
    return clock.ready(task, cohort, clients or len(gradients), seed)


def test_a_table_by_client():
    clock = Clock(step_seconds=[0.1, 0.2, 1.0], download=[8, 80, 1], upload=[4, 8, 1], latency=0.5, overhead=3)
    # clients 0 and 1 of three: 3 + 0.25 + 8/8 + 5 * 0.1 + 8/4 + 0.25, and 3 + 0.25 + 8/80 + 2 * 0.2 + 8/8 + 0.25
    seconds = ready(clock, [5, 2], MEGABYTE, MEGABYTE, cohort=[0, 1], clients=3)
    np.testing.assert_allclose(seconds, [7.0, 5.0])
    # a second exchange is a second round trip
    np.testing.assert_allclose(ready(clock, [5, 2], cohort=[0, 1], clients=3, exchanges=2), [4.5, 4.4])


def test_the_four_figures_of_the_issue():
    """70 % on CIFAR-10 with ResNet-18 (44.7 MB): 72 rounds of FedLADA, 108 of FedAvg, with 50 steps of 0.2 s each."""
    model = 44.7 * MEGABYTE
    for links, lada, avg in [
        ({"download": 1000, "upload": 1000}, 849, 1157),
        ({"download": 100, "upload": 20}, 4067, 3397),
    ]:
        clock = Clock(step_seconds=0.2, **links)
        assert round(72 * float(ready(clock, [50], 3 * model, 2 * model)[0])) == lada
        assert round(108 * float(ready(clock, [50], model, model)[0])) == avg


# --- a shared link ----------------------------------------------------------------------------------------------------


def test_transfers_share_a_link_while_both_run():
    # alone until 1 s (2 of 6 bits pass), then 1 bit/s each: the first ends at 5 s, and leaves the other 2 bits at 2/s
    ends = shared_ends(np.array([0.0, 1.0]), np.array([6.0, 6.0]), np.array([9.0, 9.0]), capacity=2.0)
    np.testing.assert_allclose(ends, [5.0, 6.0])


def test_a_slow_client_leaves_the_others_the_rest():
    # 1, 2.5 and 2.5 of 6 bit/s; the second ends at 4 s, and the third then has 5 bit/s
    ends = shared_ends(np.zeros(3), np.array([10.0, 10.0, 20.0]), np.array([1.0, 99.0, 99.0]), capacity=6.0)
    np.testing.assert_allclose(ends, [10.0, 4.0, 6.0])


def test_uploads_that_begin_at_other_times_share_less():
    clock = Clock(step_seconds=[1.0, 3.0], download=None, upload=None, server_link=8)
    # uploads of 8 Mbit begin at 1 and 3 s and last 1 s each: they never meet
    np.testing.assert_allclose(ready(clock, [1, 1], up=MEGABYTE), [2.0, 4.0])
    # 24 Mbit: 16 have passed when the second begins; the rest of the first takes 2 s, and then 16 are left for 2 s
    np.testing.assert_allclose(ready(clock, [1, 1], up=3 * MEGABYTE), [5.0, 7.0])


transfers = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0, 1e8), st.one_of(st.floats(1e3, 1e9), st.just(math.inf))),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100)
@given(transfers, st.floats(1e4, 1e8))
def test_a_shared_link_neither_wastes_nor_exceeds_its_capacity(each, capacity):
    starts, bits, speeds = (np.array(column) for column in zip(*each, strict=True))
    ends = shared_ends(starts, bits, speeds, capacity)
    alone = starts + bits / np.minimum(speeds, capacity)
    assert (ends >= alone * (1 - 1e-6)).all()
    # never later than one after the other, and never faster than the link
    assert ends.max() <= (starts.max() + (bits / np.minimum(speeds, capacity)).sum()) * (1 + 1e-6) + 1e-6
    assert ends.max() - starts.min() >= bits.sum() / capacity * (1 - 1e-6) - 1e-6


@settings(max_examples=100)
@given(transfers)
def test_a_link_that_is_wide_enough_is_not_felt(each):
    starts, bits, speeds = (np.array(column) for column in zip(*each, strict=True))
    speeds = np.minimum(speeds, 1e9)
    np.testing.assert_allclose(shared_ends(starts, bits, speeds, speeds.sum()), starts + bits / speeds, rtol=1e-6)


# --- clients that differ ----------------------------------------------------------------------------------------------


def test_a_lognormal_has_its_median_and_spread():
    clock = Clock(step_seconds={"median": 0.5, "sigma": 0.8})
    logs = np.log(ready(clock, np.ones(40_000)))
    assert np.median(logs) == pytest.approx(math.log(0.5), abs=0.02)
    assert logs.std() == pytest.approx(0.8, rel=0.02)


def test_what_is_drawn_belongs_to_the_client_and_the_seed():
    clock = Clock(step_seconds=Lognormal(0.5, 1.0), upload=Lognormal(10.0, 1.0))
    everyone = ready(clock, np.ones(50), up=MEGABYTE, seed=3)
    some = ready(clock, np.ones(3), up=MEGABYTE, seed=3, cohort=[7, 20, 49], clients=50)
    np.testing.assert_array_equal(some, everyone[[7, 20, 49]])
    assert not np.allclose(everyone, ready(clock, np.ones(50), up=MEGABYTE, seed=4))


def test_a_poor_link_is_poor_in_both_directions_and_says_nothing_of_the_processor():
    down = ready(Clock(download=Lognormal(10.0, 1.0)), np.zeros(500), down=MEGABYTE)
    up = ready(Clock(upload=Lognormal(10.0, 1.0)), np.zeros(500), up=MEGABYTE)
    steps = ready(Clock(step_seconds=Lognormal(0.1, 1.0)), np.ones(500))
    np.testing.assert_allclose(down, up)
    assert abs(np.corrcoef(np.log(down), np.log(steps))[0, 1]) < 0.15


# --- rounds that do not wait for all ----------------------------------------------------------------------------------


def test_who_is_asked():
    seconds = np.array([3.0, 1.0, 9.0, 2.0])
    clock = Clock(step_seconds=1.0)
    assert clock.kept(seconds, 4).tolist() == [0, 1, 2, 3]
    assert clock.kept(seconds, 2).tolist() == [1, 3]  # the fastest two, in the order of the cohort
    late = dataclasses.replace(clock, deadline=3.0)
    assert late.kept(seconds, 4).tolist() == [0, 1, 3]  # 3 s is in time
    assert late.kept(seconds, 2).tolist() == [1, 3]
    assert late.kept(seconds + 5, 4).tolist() == [1]  # all are late: the fastest


# --- clocks by name, and bad input ------------------------------------------------------------------------------------


def test_presets_are_networks_from_fast_to_slow():
    seconds = {}
    for name in PRESETS:
        clock = make_clock(name)
        assert clock.step_seconds == 0
        assert not clock.chooses
        seconds[name] = float(ready(clock, np.zeros(501), 10 * MEGABYTE, 10 * MEGABYTE).max())
    one = {name: float(ready(make_clock(name), [0], 10 * MEGABYTE, 10 * MEGABYTE)[0]) for name in PRESETS}
    assert one["lan"] < one["fibre"] < one["home"] < one["4g"]
    assert seconds["mixed"] > 5 * seconds["home"]  # the slowest of many clients decides
    assert seconds["lan"] > 400 * one["lan"]  # one link for all


def test_ways_to_give_a_clock():
    clock = make_clock("home", step_seconds=0.2)
    assert as_clock({"name": "home", "step_seconds": 0.2}) == as_clock(clock) == clock
    assert as_clock("home") == make_clock("home")
    assert as_clock(None) is None
    assert make_clock(**make_clock("mixed", deadline=3.0).record()) == make_clock("mixed", deadline=3.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("5g", r"unknown clock '5g'.*known: .*4g"),
        (5, r"clock is 5: give a name \(lan, fibre, home, 4g, mixed\), a table"),
        ({}, "the clock counts nothing: name one"),
        ({"deadline": 3.0}, "the clock counts nothing: name one"),
        ({"speed": 3}, "the clock has no option 'speed'"),
        ({"name": "4g", "upload": -1}, "clock.upload = -1 is not a number > 0"),
        ({"name": "4g", "upload": "fast"}, "clock.upload = 'fast': give a number, a list with a number for every"),
        ({"upload": {"median": 3}}, "clock.upload = .*give a number, a list"),
        ({"upload": {"median": 0, "sigma": 1}}, "clock.upload.median = 0 is not a number > 0"),
        ({"upload": {"median": 3, "sigma": -1}}, "clock.upload.sigma = -1 is not a number >= 0"),
        ({"upload": [3, 0]}, r"clock.upload\[1\] = 0 is not a number > 0"),
        ({"step_seconds": None}, "clock.step_seconds = None: give a number"),
        ({"step_seconds": math.nan}, "clock.step_seconds = nan is not a number >= 0"),
        ({"name": "4g", "over_select": 0.5}, "clock.over_select = 0.5 is not a number >= 1"),
        ({"name": "4g", "deadline": 0}, "clock.deadline = 0 is not a number > 0"),
        ({"step_seconds": 1, "flops_per_second": 1e9}, "both say how fast clients compute: give one"),
    ],
    ids=str,
)
def test_bad_clocks_are_one_line(given, message):
    with pytest.raises(BadInput, match=message) as error:
        as_clock(given)
    assert "\n" not in str(error.value)


def test_a_table_for_other_clients_and_flops_that_nobody_counted_are_refused():
    with pytest.raises(BadInput, match=r"clock.upload lists 2 clients, and there are 3"):
        ready(Clock(upload=[1, 2]), [1, 1, 1])
    with pytest.raises(BadInput, match="the FLOPs of a step are not known here: give step_seconds"):
        ready(Clock(flops_per_second=1e9), [1])


def test_flops_become_seconds_per_step():
    assert Clock(flops_per_second=1e9).with_flops(5e8) == Clock(step_seconds=0.5)
    assert Clock(flops_per_second=[1e9, 1e8]).with_flops(5e8) == Clock(step_seconds=[0.5, 5.0])
    assert Clock(flops_per_second=Lognormal(1e9, 0.3)).with_flops(5e8) == Clock(step_seconds=Lognormal(0.5, 0.3))
