"""The round plan is a pure function of (seed, round), and deals every sample once per epoch."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.algorithms import FedAvg
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.rounds.clients import Clients
from lamina.rounds.clock import Clock
from lamina.rounds.plan import Demand, Plan
from lamina.rounds.settings import TrainSettings
from ragged_clients import ragged

plans = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 30), min_size=1, max_size=8),
        "batch_size": st.integers(1, 40),
        "epochs": st.integers(1, 3),
        "participation": st.floats(0.01, 1.0),
        "seed": st.integers(-(2**70), 2**70),
        "number": st.integers(1, 10_000),
    }
)


def make(p, **more):
    length = {} if "local_steps" in more else {"epochs": p["epochs"]}
    settings = {"participation": p["participation"], "batch_size": p["batch_size"], "seed": p["seed"]}
    return Plan(ragged(p["sizes"]), TrainSettings(0.1, **settings, **length, **more))


@given(plans)
def test_every_epoch_visits_every_sample_exactly_once(p):
    plan = make(p).round(p["number"])
    for c, own in enumerate(plan.samples):
        per_epoch = -(-len(own) // p["batch_size"])
        assert plan.examples[c] == len(own)
        assert plan.steps[c] == p["epochs"] * per_epoch  # K_i = epochs * ceil(n_i / B)
        assert (plan.filled[c] > 0).sum() == plan.steps[c]
        for epoch in range(p["epochs"]):
            seen = [plan.batch(c, k) for k in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
            assert sorted(np.concatenate(seen)) == sorted(own)
            assert all(len(b) == p["batch_size"] for b in seen[:-1])  # only the last batch may be short


@given(plans)
def test_padding_repeats_the_clients_own_samples(p):
    plan = make(p).round(p["number"])
    for c, own in enumerate(plan.samples):
        assert set(plan.index[c].ravel()) <= set(own)


@given(plans)
def test_a_plan_is_a_pure_function_of_seed_and_round(p):
    first, again = make(p).round(p["number"]), make(p).round(p["number"])
    for name in ("cohort", "index", "filled", "streams"):
        assert np.array_equal(getattr(first, name), getattr(again, name))


@given(plans)
def test_cohort_has_the_asked_size_and_no_client_twice(p):
    plan = make(p)
    cohort = plan.cohort(p["number"])
    n = len(p["sizes"])
    assert len(cohort) == max(1, round(p["participation"] * n))
    assert len(set(cohort)) == len(cohort)
    assert list(cohort) == sorted(cohort)
    assert 0 <= cohort.min() <= cohort.max() < n


@given(plans, st.integers(1, 50))
def test_local_steps_fixes_k_for_everyone(p, steps):
    plan = make(p, local_steps=steps).round(p["number"])
    assert (plan.steps == steps).all()
    assert (plan.filled > 0).all()


def test_a_clients_batches_do_not_depend_on_who_else_is_active():
    alone = Plan(ragged([9, 7, 5]), TrainSettings(0.1, batch_size=2, seed=3))
    some = Plan(ragged([9, 7, 5]), TrainSettings(0.1, batch_size=2, seed=3, participation=0.34))
    for number in range(1, 30):
        part, full = some.round(number), alone.round(number)
        (i,) = part.cohort
        for k in range(part.steps[0]):
            assert np.array_equal(part.batch(0, k), full.batch(i, k))
        assert part.streams[0] == full.streams[i]


def test_rounds_seeds_and_clients_differ():
    plan = Plan(ragged([64, 64]), TrainSettings(0.1, batch_size=64))
    orders = [tuple(plan.round(r).index[0, 0]) for r in range(1, 6)]
    orders.append(tuple(Plan(ragged([64, 64]), TrainSettings(0.1, batch_size=64, seed=1)).round(1).index[0, 0]))
    orders.append(tuple(plan.round(1).index[1, 0] - 64))
    assert len(set(orders)) == len(orders)


def test_two_epochs_have_different_orders():
    plan = Plan(ragged([64]), TrainSettings(0.1, batch_size=64, epochs=2)).round(1)
    assert not np.array_equal(plan.index[0, 0], plan.index[0, 1])


def test_sampling_is_fair():
    """Over 4000 rounds with 3 of 10 active, each client is active 1200 times, up to 5 standard deviations (29)."""
    plan = Plan(ragged([1] * 10), TrainSettings(0.1, participation=0.3, seed=5))
    counts = np.bincount(np.concatenate([plan.cohort(r) for r in range(1, 4001)]), minlength=10)
    assert counts.sum() == 12_000
    assert np.abs(counts - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)


def test_bernoulli_cohorts_vary_and_are_never_empty():
    plan = Plan(ragged([1] * 10), TrainSettings(0.1, participation=0.15, sampling="bernoulli"))
    sizes = [len(plan.cohort(r)) for r in range(1, 2001)]
    assert min(sizes) == 1
    assert len(set(sizes)) > 3
    # an empty draw is repeated: E[size] = Np / (1 - (1-p)^N)
    assert np.mean(sizes) == pytest.approx(1.5 / (1 - 0.85**10), rel=0.05)


def test_a_round_whose_coins_choose_nobody_says_so():
    """The expected number of them is 2000 · 0.85^10, up to 5 standard deviations."""
    settings = {"participation": 0.15, "sampling": "bernoulli"}
    plan, apart = (
        Plan(ragged([1] * 10), TrainSettings(0.1, **settings, **more)) for more in ({}, {"min_separation": 2})
    )
    rate = 0.85**10
    assert abs(sum(map(plan.chooses_nobody, range(1, 2001))) - 2000 * rate) < 5 * math.sqrt(2000 * rate * (1 - rate))
    rate = 0.7**5
    assert abs(sum(map(apart.chooses_nobody, range(1, 2001))) - 2000 * rate) < 5 * math.sqrt(2000 * rate * (1 - rate))
    exact = Plan(ragged([1] * 10), TrainSettings(0.1, participation=0.1))
    assert not any(map(exact.chooses_nobody, range(1, 100)))


def test_a_cap_takes_a_random_subset_and_leaves_smaller_cohorts_alone():
    free, capped = (
        Plan(Clients.elsewhere(20), TrainSettings(0.1, participation=0.3, sampling="bernoulli", cohort_cap=cap))
        for cap in (None, 6)
    )
    counts = np.zeros(20)
    for number in range(1, 2001):
        whole, cohort = free.cohort(number), capped.cohort(number)
        assert set(cohort) <= set(whole)
        assert len(cohort) == min(6, len(whole))
        assert list(cohort) == sorted(cohort)
        counts[cohort] += 1
    mean = counts.sum() / 20
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)  # no client is preferred


@pytest.mark.parametrize("settings", [{}, {"sampling": "bernoulli"}, {"sampling": "bernoulli", "cohort_cap": 2}])
@pytest.mark.parametrize(("clients", "separation"), [(23, 5), (20, 5), (7, 7), (6, 1)])
def test_rounds_of_a_client_are_as_far_apart_as_asked(clients, separation, settings):
    participation = 1 / clients if separation == 7 else 0.1
    protocol = TrainSettings(0.1, participation=participation, min_separation=separation, seed=4, **settings)
    plan, last, active = Plan(Clients.elsewhere(clients), protocol), {}, set()
    for number in range(1, 400):
        cohort = plan.cohort(number)
        assert list(cohort) == sorted(set(cohort))
        for client in cohort.tolist():
            assert number - last.get(client, -separation) >= separation
            last[client] = number
        active |= set(cohort.tolist())
    assert active == set(range(clients))  # nobody is left out


def test_separation_keeps_the_size_of_cohorts_and_draws_groups_at_random():
    def cohorts(**settings):
        plan = Plan(Clients.elsewhere(100), TrainSettings(0.1, participation=0.04, **settings))
        return [plan.cohort(number).tolist() for number in range(1, 401)]

    exact = cohorts(min_separation=10)
    assert {len(cohort) for cohort in exact} == {4}
    coins = cohorts(min_separation=10, sampling="bernoulli")
    empty = 0.6**10  # such a cohort is drawn again: each of 10 clients with probability 0.04 · 100 / 10
    assert np.mean(list(map(len, coins))) == pytest.approx(4 / (1 - empty), rel=0.1)
    groups = [set().union(*exact[first::10]) for first in range(10)]
    assert sorted(map(len, groups)) == [10] * 10  # in 40 rounds each, everyone has a turn
    neighbours = sum(client + 1 in group for group in groups for client in group)
    assert neighbours < 30  # 9.9 of the 99 pairs are expected to share a group
    assert cohorts(min_separation=10, seed=1) != exact


def test_everyone_of_a_group_takes_part_if_the_cohort_is_that_large():
    plan = Plan(Clients.elsewhere(12), TrainSettings(0.1, participation=0.25, min_separation=4))
    for first in range(1, 30):
        assert sorted(np.concatenate([plan.cohort(first + k) for k in range(4)])) == list(range(12))


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
@pytest.mark.parametrize(("clients", "separation"), [(100, 11), (5, 6)])
def test_a_separation_that_leaves_too_few_clients_is_refused(sampling, clients, separation):
    settings = TrainSettings(0.1, participation=0.1, min_separation=separation, sampling=sampling)
    with pytest.raises(BadInput, match=f"min_separation = {separation} leaves {clients // separation} to draw from"):
        Plan(Clients.elsewhere(clients), settings).cohort(1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_cohort_of_a_size_is_equally_likely(size):
    """The possible cohorts of 5 clients: chi-square with k - 1 degrees of freedom, mean k - 1, variance 2 (k - 1)."""
    plan = Plan(Clients.elsewhere(5), TrainSettings(0.1, participation=size / 5, seed=11))
    _, counts = np.unique([plan.cohort(r) for r in range(1, 5001)], axis=0, return_counts=True)
    k = math.comb(5, size)
    assert len(counts) == k
    assert ((counts - 5000 / k) ** 2 / (5000 / k)).sum() < (k - 1) + 5 * math.sqrt(2 * (k - 1))


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_cohorts_at_the_edges(sampling):
    def cohort(clients, participation):
        plan = Plan(Clients.elsewhere(clients), TrainSettings(0.1, participation=participation, sampling=sampling))
        return plan.cohort(1)

    assert cohort(1, 1.0).tolist() == [0]
    assert cohort(1, 0.3).tolist() == [0]
    assert cohort(1000, 1.0).tolist() == list(range(1000))
    large = cohort(1000, 0.9)
    assert len(np.unique(large)) == len(large)
    assert 850 < len(large) < 950


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_a_cohort_of_a_million_clients_reaches_them_all_and_costs_its_size(sampling):
    plan = Plan(Clients.elsewhere(1_000_000), TrainSettings(0.1, participation=1e-4, sampling=sampling))
    started = time.process_time()
    cohorts = [plan.cohort(r) for r in range(1, 201)]
    assert time.process_time() - started < 2  # sorting a million clients 200 times takes 30 seconds
    for cohort in cohorts:
        assert len(np.unique(cohort)) == len(cohort)
    everyone = np.concatenate(cohorts)
    assert 0 <= everyone.min() < 1000
    assert 999_000 < everyone.max() < 1_000_000
    counts, _ = np.histogram(everyone, bins=10, range=(0, 1_000_000))
    assert (np.abs(counts - len(everyone) / 10) < 5 * math.sqrt(len(everyone) / 10)).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Plan(ragged([1]), TrainSettings(0.1, participation=0.0)), "participation"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, participation=1.5)), "participation"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, batch_size=0)), "batch_size"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, epochs=0)), "epochs"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, local_steps=0)), "local_steps"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, min_separation=0)), "min_separation"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, sampling="bernoulli", cohort_cap=0)), "cohort_cap"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, cohort_cap=3)), "cohort_cap = 3 needs sampling"),
        (lambda: Plan(ragged([1]), TrainSettings(float("nan"))), "lr"),
        (lambda: Plan(ragged([1]), TrainSettings(-1.0)), "lr"),
        (lambda: Plan(ragged([1]), TrainSettings(0.1, sampling="bernouli")), "did you mean 'bernoulli'"),
    ],
)
def test_bad_plans_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- rounds that do not wait for all ----------------------------------------------------------------------------------


def chosen(clock, sizes=(5, 60, 8, 33, 2, 21, 13, 40), **more):
    """Return a plan with a clock, for clients that take n_i steps of a sample each."""
    settings = {"participation": 0.5, "batch_size": 1, "clock": clock, **more}
    return Plan(ragged(sizes), TrainSettings(0.1, **settings), Demand(0, 0, FedAvg().needs))


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
@pytest.mark.parametrize("clock", [Clock(step_seconds=1.0), Clock(step_seconds=1.0, deadline=1e9)])
def test_a_clock_that_waits_for_all_changes_no_round(clock, sampling):
    for number in range(1, 20):
        one, other = chosen(None, sampling=sampling).round(number), chosen(clock, sampling=sampling).round(number)
        for field in dataclasses.fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)) or field.name == "samples"


def test_a_deadline_leaves_out_those_that_would_be_late():
    everyone, in_time = chosen(None), chosen(Clock(step_seconds=1.0, deadline=30.0))
    dropped = 0
    for number in range(1, 30):
        before, after = everyone.round(number), in_time.round(number)
        assert after.cohort.tolist() == [c for c in before.cohort.tolist() if c not in (1, 3, 7)]  # 60, 33, 40 s
        assert after.participation == len(after.cohort) / 8
        kept = np.isin(before.cohort, after.cohort)
        assert np.array_equal(after.index, before.index[kept, : after.index.shape[1]])  # the same batches
        dropped += len(before.cohort) - len(after.cohort)
    assert dropped > 10


def test_a_round_in_which_all_are_late_keeps_the_fastest():
    plan = chosen(Clock(step_seconds=1.0, deadline=2.0))  # client 4 alone is ever in time
    for number in range(1, 20):
        drawn = chosen(None).cohort(number)
        sizes = plan.clients.parts.sizes[drawn]
        assert plan.cohort(number).tolist() == [int(drawn[np.argmin(sizes)])]


def test_over_selection_keeps_the_fastest_of_those_drawn():
    clock = Clock(step_seconds=1.0, over_select=1.5)
    seen = set()
    for number in range(1, 40):
        drawn = rng.sample(rng.key(0, "cohort", number), 8, 6)  # 1.5 times the four of an exact cohort
        sizes = chosen(clock).clients.parts.sizes[drawn]
        assert chosen(clock).cohort(number).tolist() == sorted(drawn[np.argsort(sizes)[:4]].tolist())
        seen |= set(chosen(clock).cohort(number).tolist())
    assert 1 not in seen  # the slowest client never takes part
    assert chosen(Clock(step_seconds=1.0, over_select=9.0)).cohort(1).tolist() == [0, 2, 4, 6]  # of all eight


def test_clocks_that_cannot_plan_are_refused():
    with pytest.raises(BadInput, match="even the fastest client needs 2 s: raise it"):
        chosen(Clock(step_seconds=1.0, deadline=1.5)).check_clock()
    with pytest.raises(BadInput, match=r"clock.upload lists 2 clients, and there are 8"):
        chosen(Clock(upload=[1, 2])).check_clock()
    with pytest.raises(BadInput, match=r"over_select .* needs sampling = 'exact'"):
        chosen(Clock(step_seconds=1.0, over_select=2.0), sampling="bernoulli")
    elsewhere = dataclasses.replace(chosen(Clock(step_seconds=1.0, deadline=9.0)), clients=Clients.elsewhere(8))
    with pytest.raises(
        BadInput, match=r"how many steps a client takes is not known before the round.*give local_steps"
    ):
        elsewhere.cohort(1)
    fixed = dataclasses.replace(elsewhere, protocol=dataclasses.replace(elsewhere.protocol, local_steps=3))
    assert len(fixed.cohort(1)) == 4
