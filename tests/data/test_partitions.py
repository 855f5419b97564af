"""Partitions: every sample exactly once, pure in the seed, sizes as promised, refusals in one line."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lamina import Simulation
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.data import (
    IID,
    ByColumn,
    Classes,
    Dataset,
    Dirichlet,
    Reallocate,
    label_counts,
    make,
    split_dataset,
)
from lamina.data.partitions import PARTITIONS, Shards, describe

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(-(2**63), 2**64)
label_arrays = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(lambda v: np.array(v, np.int64))
labels_and_clients = label_arrays.flatmap(lambda labels: st.tuples(st.just(labels), st.integers(1, len(labels))))
alphas = st.floats(1e-4, 1e6)
random_partitions = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, alphas, st.sampled_from(["equal", "natural"])),
    st.builds(Reallocate, st.builds(Dirichlet, alphas)),
)


def assert_exact_cover(parts, n):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    for part in parts:
        assert len(part) > 0
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def balanced(classes=10, each=100):
    return np.tile(np.arange(classes), each)


@quick
@given(random_partitions, labels_and_clients, seeds)
def test_every_sample_goes_to_exactly_one_client(partition, shared, seed):
    labels, clients = shared
    parts = partition.split(labels, clients, seed)
    assert len(parts) == clients
    assert_exact_cover(parts, len(labels))
    assert same(parts, partition.split(labels.copy(), clients, seed))


@quick
@given(st.sampled_from([IID(), Dirichlet(0.3), Dirichlet(1e-4)]), labels_and_clients, seeds)
def test_equal_sizes_differ_by_at_most_one(partition, shared, seed):
    labels, clients = shared
    sizes = [len(part) for part in partition.split(labels, clients, seed)]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 8), seeds, st.integers(0, 20))
def test_classes_are_dealt_evenly(k, clients, classes, seed, spare):
    assume(k <= classes <= clients * k)
    most_holders = -(-clients * k // classes)
    labels = np.repeat(np.arange(classes) * 3, most_holders + spare)  # labels with gaps
    parts = Classes(k).split(labels, clients, seed)
    assert_exact_cover(parts, len(labels))
    counts = label_counts(parts, labels)[:, ::3]
    assert np.all((counts > 0).sum(axis=1) == k)
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for kind in range(classes):
        shares = counts[counts[:, kind] > 0, kind]
        assert shares.max() - shares.min() <= 1
    assert same(parts, Classes(k).split(labels, clients, seed))


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.5), Dirichlet(0.5, "natural"), Classes(2)])
def test_another_seed_gives_other_parts(partition):
    assert not same(partition.split(balanced(), 20, 0), partition.split(balanced(), 20, 1))


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.5), Dirichlet(5.0, "natural"), Classes(1)])
def test_samples_of_one_class_are_dealt_at_random(partition):
    """A file is often sorted by something else too (writer, date): neighbours must not stay together."""
    parts = partition.split(np.zeros(1000, np.int64), 4, 0)
    for part in parts:
        # Of m random samples among 1000, about m * m / 1000 are followed by their neighbour.
        assert (np.diff(part) == 1).mean() < len(part) / 1000 + 0.15


def test_classes_go_together_in_many_ways():
    counts = label_counts(Classes(2).split(balanced(), 50, 0), balanced())
    assert len({tuple(np.flatnonzero(row)) for row in counts}) > 15  # of 45 pairs


def test_a_clients_number_says_nothing_about_its_size_or_mix():
    """The ones served last take the leftovers; over many seeds no position may show it."""
    labels = np.repeat(np.arange(7), 40)
    sizes = np.mean([[len(p) for p in Classes(2).split(labels, 10, seed)] for seed in range(200)], axis=0)
    assert np.ptp(sizes) < 1.5, sizes  # unshuffled: from 29.8 for the first to 26 for the last
    unevenness = [label_counts(Dirichlet(100).split(labels, 10, seed), labels).std(axis=1) for seed in range(200)]
    assert np.ptp(np.mean(unevenness, axis=0)) < 1, unevenness  # unshuffled: from 2.0 to 4.2 for the last


def test_dirichlet_equal_has_the_moments_of_its_distribution():
    """A client draws q ~ Dir(a p), a = alpha times 3 classes: E q_c = p_c, Var q_c = p_c (1 - p_c) / (alpha + 1).

    With few samples taken from large pools the pools do not matter; a count of m draws has the
    variance m p (1 - p) (alpha + m) / (alpha + 1) (Dirichlet-multinomial).
    """
    labels = np.repeat([0, 1, 2], [3000, 2000, 1000])
    clients, share, alpha = 600, 10, 2.0
    prior = np.array([1 / 2, 1 / 3, 1 / 6])
    counts = label_counts(Dirichlet(alpha / 3).split(labels, clients, 5), labels)
    expected = share * prior * (1 - prior) * (alpha + share) / (alpha + 1)
    # Emptying the pools exactly ties the clients together, which costs a little variance at the end.
    assert np.allclose(counts.var(axis=0), expected, rtol=0.15)
    assert np.allclose(counts.mean(axis=0), share * prior)  # exact: every sample is used


def test_dirichlet_natural_splits_every_class_by_its_own_proportions():
    """A client's fraction of a class is Beta(alpha, (n - 1) alpha): variance (n - 1) / (n^2 (n alpha + 1))."""
    classes, clients, alpha, each = 200, 10, 0.5, 1000
    labels = np.repeat(np.arange(classes), each)
    fractions = label_counts(Dirichlet(alpha, "natural").split(labels, clients, 3), labels) / each
    assert np.allclose(fractions.sum(axis=0), 1)
    assert np.isclose(fractions.var(), (clients - 1) / (clients**2 * (clients * alpha + 1)), rtol=0.15)


def test_alpha_orders_the_heterogeneity():
    held = [
        (label_counts(Dirichlet(alpha).split(balanced(), 20, 0), balanced()) > 0).sum(axis=1).mean()
        for alpha in (1e-4, 1.0, 1e6)
    ]
    # In the limit of small alpha a client of 50 takes half of one class of 100; its opposite limit is iid.
    assert held[0] == 1
    assert 2 < held[1] < 9
    assert held[2] > 9


def dealt_one_by_one(labels, clients, alpha, seed):
    """The split of FedLADA's first author, sample after sample, with lamina's random numbers."""
    values, pools = np.unique(labels, return_counts=True)
    concentrations = alpha * len(values) * pools / len(labels)
    priors = rng.generator(seed, "partition-dirichlet").dirichlet(concentrations, size=clients)
    order = rng.permutation(rng.key(seed, "partition-deal"), len(labels))
    lists = [[int(sample) for sample in order if labels[sample] == value] for value in values]
    left = [list(samples) for samples in lists]
    room = [len(labels) // clients + (client < len(labels) % clients) for client in range(clients)]
    draws = iter(rng.uniform(rng.key(seed, "partition-draws"), len(labels)))
    parts = [[] for _ in range(clients)]
    for turn in itertools.count():
        if not any(room):
            return [sorted(part) for part in parts]
        client = int(rng.bits(rng.key(seed, "partition-turns"), np.array([turn]))[0]) % clients
        if not room[client]:
            continue
        room[client] -= 1
        kind = min(int((np.cumsum(priors[client]) <= next(draws)).sum()), len(values) - 1)
        left[kind] = left[kind] or list(lists[kind])
        parts[client].append(left[kind].pop(0))


@settings(deadline=None, max_examples=40)
@given(labels_and_clients, st.floats(0.05, 100), seeds)
def test_refilled_pools_are_dealt_sample_by_sample(shared, alpha, seed):
    labels, clients = shared
    parts = Dirichlet(alpha, refill=True).split(labels, clients, seed)
    assert [part.tolist() for part in parts] == dealt_one_by_one(labels, clients, alpha, seed)


def test_refill_follows_the_priors_and_uses_some_samples_twice():
    """Without pools that run out, a client's counts are a multinomial draw of its own Dirichlet proportions."""
    labels, clients, alpha, share = balanced(each=5000), 1000, 0.6, 50
    parts = Dirichlet(alpha, refill=True).split(labels, clients, 3)
    assert set(parts.sizes) == {share}
    counts = label_counts(parts, labels)
    # Dirichlet-multinomial, with the concentrations' sum 10 alpha; 1000 clients leave 5 % of noise
    variance = share * 0.1 * 0.9 * (10 * alpha + share) / (10 * alpha + 1)
    assert counts.var(axis=0).mean() == pytest.approx(variance, rel=0.1)
    times = np.bincount(parts.samples, minlength=len(labels))
    of_class = counts.sum(axis=0)
    assert times.sum() == len(labels)
    for kind, dealt in enumerate(of_class):  # 5000 + e samples of a class of 5000: e are used twice, or -e never
        seen = np.bincount(times[labels == kind], minlength=3)
        assert (seen[0], seen[2]) == (max(5000 - dealt, 0), max(dealt - 5000, 0))


def test_samples_that_are_used_twice_train_and_are_not_evaluated_on():
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    settings = {"clients": 4, "partition": Dirichlet(0.1, refill=True), "batch_size": 5, "lr": 0.1, "device": "cpu"}
    ends = []
    for engine in ("loop", "stacked"):
        torch.manual_seed(0)
        simulation = Simulation(torch.nn.Linear(3, 2).double(), (x.double(), y), "scaffold", engine=engine, **settings)
        simulation.run(2)
        ends.append(simulation.state.server.x)
    assert np.bincount(simulation.plan.clients.parts.samples).max() > 1
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)
    for held_out in ({"heldout_clients": 0.5}, {"local_test": 0.5}):
        with pytest.raises(BadInput, match="share no sample"):
            Simulation(torch.nn.Linear(3, 2), (x, y), "fedavg", **settings, **held_out)


def test_dirichlet_at_scale():
    """100,000 samples, 10,000 clients: a loop over samples would not end in this test's patience."""
    labels = np.random.default_rng(0).integers(0, 10, 100_000)
    for sizes in ("equal", "natural"):
        assert_exact_cover(Dirichlet(0.5, sizes).split(labels, 10_000, 0), 100_000)
    assert set(Dirichlet(0.5, refill=True).split(labels, 10_000, 0).sizes) == {10}


@quick
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 9), st.integers(0, 99), seeds)
def test_shards_are_disjoint_and_of_equal_size(clients, per_client, unused, more, seed):
    shards = clients * per_client + unused
    labels = np.arange(shards + more) % 7
    partition = Shards(shards, per_client)
    parts = partition.split(labels, clients, seed)
    assert [len(part) for part in parts] == [per_client * (len(labels) // shards)] * clients
    for part in parts:
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
    assert len(np.unique(np.concatenate(parts))) == sum(len(part) for part in parts)
    assert same(parts, partition.split(labels.copy(), clients, seed))


def test_fifty_clients_with_two_of_200_shards_use_half_of_mnist():
    labels = np.tile(np.arange(10), 6000)
    parts = make("shards", shards=200, per_client=2).split(labels, 50, 0)
    assert [len(part) for part in parts] == [600] * 50
    counts = label_counts(parts, labels)
    # 20 pieces of 300 make up a class of 6000 exactly, so that every piece is of one class
    assert set(np.unique(counts)) <= {0, 300, 600}
    assert {1, 2} == set((counts > 0).sum(axis=1))
    assert not same(parts, Shards().split(labels, 50, 1))


def test_a_shard_is_a_stretch_of_the_sorted_labels():
    """Pieces of 7 of the labels 000001111122222...: neighbouring labels only, and all pieces dealt cover all but 2."""
    labels = np.repeat(np.arange(6), 5)
    parts = Shards(4, 1).split(labels, 4, 3)
    held = sorted((labels[part].min(), labels[part].max()) for part in parts)
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(held))
    assert sum(len(part) for part in parts) == 28


def test_by_column_makes_one_client_per_value():
    columns = {"writer": np.array(["b", "a", "b", "c", "a"])}
    parts = ByColumn("writer").split(None, None, 0, columns)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2], [3]]
    assert same(parts, ByColumn("writer").split(None, 3, 99, columns))


def test_regression_data_can_be_shared_iid():
    assert_exact_cover(IID().split(None, 4, 0, samples=10), 10)


def test_split_dataset_passes_everything_on():
    torch = pytest.importorskip("torch")
    data = Dataset(torch.zeros(4, 1), torch.tensor([0.5, 1.0, 2.0, 3.0]), columns={"site": np.array([1, 0, 1, 0])})
    assert [part.tolist() for part in split_dataset(ByColumn("site"), data, None, 0)] == [[1, 3], [0, 2]]
    assert_exact_cover(split_dataset(IID(), data, 2, 0), 4)


def test_reallocate_splits_as_its_base():
    labels = balanced()
    assert same(Reallocate(Classes(2)).split(labels, 25, 8), Classes(2).split(labels, 25, 8))


LABELS = np.array([0, 0, 0, 1, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: IID().split(LABELS, 9, 0), "9 clients cannot share 8 samples"),
        (lambda: Dirichlet().split(LABELS, 9, 0), "9 clients cannot share 8 samples"),
        (lambda: IID().split(LABELS, 0, 0), "clients = 0 is not a whole number >= 1"),
        (lambda: IID().split(LABELS, 2.5, 0), "whole number"),
        (lambda: IID().split(LABELS, None, 0), "clients = None is not a whole number"),
        (lambda: IID().split(None, 2, 0), "cannot share 0 samples"),
        (lambda: Dirichlet().split(None, 2, 0), "regression"),
        (lambda: Classes().split(None, 2, 0), "regression"),
        (lambda: Dirichlet().split(LABELS / 2, 2, 0), "needs one class per sample, .* several targets lack"),
        (lambda: Dirichlet(alpha=0), "alpha"),
        (lambda: Dirichlet(alpha=-1.0), "alpha"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha"),
        (lambda: Dirichlet(alpha=float("inf")), "alpha"),
        (lambda: Dirichlet(alpha="0.5"), "alpha"),
        (lambda: Dirichlet(sizes="even"), "'equal' or 'natural'"),
        (lambda: Dirichlet(refill=1), "refill must be true or false"),
        (lambda: Dirichlet(sizes="natural", refill=True), "refill deals clients of equal size"),
        (lambda: make("reallocate", base="dirichlet", refill=True), "leaves some out: set refill = false"),
        (lambda: Classes(k=0), "k = 0 is not a whole number"),
        (lambda: Classes(k=1.5), "k = 1.5 is not a whole number"),
        (lambda: Classes(k=4).split(LABELS, 2, 0), "only 3"),
        (lambda: Classes(k=1).split(LABELS, 2, 0), "at least 3 clients"),
        (lambda: Classes(k=3).split(LABELS, 3, 0), "class 2 has 2 samples for 3 clients"),
        (lambda: Shards(shards=0), "shards = 0 is not a whole number"),
        (lambda: Shards(per_client=1.5), "per_client = 1.5 is not a whole number"),
        (lambda: Shards(9, 1).split(LABELS, 2, 0), "8 samples cannot be cut into 9 shards"),
        (lambda: Shards(4, 2).split(LABELS, 3, 0), "3 clients with 2 shards each need 6, but there are 4"),
        (lambda: Shards(4, 2).split(None, 2, 0, samples=8), "regression"),
        (lambda: make("shards", per_clients=2), "did you mean 'per_client'"),
        (lambda: make("reallocate", base="shards"), "base must be"),
        (lambda: ByColumn("writer").split(LABELS, None, 0), "columns: none"),
        (lambda: ByColumn("write").split(LABELS, None, 0, {"writer": LABELS}), "did you mean 'writer'"),
        (lambda: ByColumn("w").split(LABELS, 4, 0, {"w": LABELS}), "makes 3 clients, not 4"),
        (lambda: ByColumn("w").split(None, None, 0, {"w": np.array(["a", None], object)}), "misses some .*NoneType"),
        (lambda: ByColumn("w").split(None, None, 0, {"w": np.array([1.0, np.nan])}), "misses some"),
        (lambda: ByColumn("w").split(None, None, 0, {"w": np.array([])}), "one value per sample"),
        (lambda: ByColumn(""), "name of a column"),
        (lambda: Reallocate(ByColumn("w")), "natural clients"),
        (lambda: Reallocate(Reallocate()), "base must be"),
        (lambda: make("dirichet"), "did you mean 'dirichlet'"),
        (lambda: make("dirichlet", alhpa=1), "did you mean 'alpha'"),
        (lambda: make("iid", alpha=1), "it has none"),
        (lambda: make("by-column"), "needs the option 'column'"),
        (lambda: make("reallocate", base="clases"), "did you mean 'classes'"),
        (lambda: make("reallocate", k=2), "'reallocate' has no option 'k'"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(attempt, message):
    with pytest.raises(BadInput, match=message) as refused:
        attempt()
    assert "\n" not in str(refused.value)


def test_make_and_the_registry_agree():
    assert make("iid") == IID()
    assert make("dirichlet", alpha=0.3, sizes="natural") == Dirichlet(0.3, "natural")
    assert make("by-column", column="user") == ByColumn("user")
    assert make("reallocate", base="dirichlet", alpha=2) == Reallocate(Dirichlet(2))
    assert make("reallocate", base=Classes(1)) == Reallocate(Classes(1))
    lines = describe()
    assert lines.keys() == PARTITIONS.keys()
    assert all(line.endswith(".") or ":" in line for line in lines.values())
