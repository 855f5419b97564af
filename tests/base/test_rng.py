"""Counter-based randomness: streams that differ, fair draws, and the same bits from numpy and torch."""

import itertools
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import lamina
from lamina.base import rng

SOURCES = Path(lamina.__file__).parent
PURPOSE = re.compile(r'(?:rng\.(?:key|torch_seed|generator)|self\._stream)\([^"\n]*"([^"]+)"')


def test_every_purpose_has_a_stream_of_its_own():
    purposes = {name for file in SOURCES.rglob("*.py") for name in PURPOSE.findall(file.read_text())}
    assert {"batches", "client", "cohort", "dropout", "holdout", "partition-iid", "reallocate", "weights"} <= purposes
    assert len({zlib.crc32(name.encode()) for name in purposes}) == len(purposes)
    counters = [(), *((a,) for a in range(-2, 30)), *itertools.product(range(-2, 30), repeat=2)]
    words = [rng.key(seed, name, *given) for seed in (0, 1) for name in purposes for given in counters]
    assert len(set(words)) == len(words)


def test_forks_are_no_keys_and_no_forks_of_other_streams():
    """Except that a fork by 0 is the key with a further counter 0: no purpose may use both."""
    counters = np.array([-2, -1, *range(1, 40)])
    keys = [[rng.key(0, "cohort", a, int(b)) for b in counters] for a in range(20)]
    streams = np.array([rng.key(0, "cohort", a) for a in range(20)])[:, None]
    forks = rng.fork(streams, counters)
    families = [streams, np.array(keys), forks, rng.words(streams, counters), rng.fork(forks[..., None], counters),
                rng.words(forks[..., None], counters)]  # fmt: skip
    words = np.concatenate([family.ravel() for family in families])
    assert len(np.unique(words)) == len(words)


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_bernoulli_coins_are_fair_and_independent(p):
    """Over 4000 draws of 6 coins, each shows heads with probability p, and each pair with probability p^2."""
    heads = np.zeros((4000, 6))
    for i, row in enumerate(heads):
        row[rng.coins(rng.key(3, "test", i), 6, p)] = 1
    together = heads.T @ heads / len(heads)
    expected = np.where(np.eye(6), p, p * p)
    assert (np.abs(together - expected) < 5 * np.sqrt(expected * (1 - expected) / len(heads))).all()


def test_permutations_are_uniform():
    """All 24 orders of 4 things appear equally often: chi-square with 23 degrees of freedom, 99.99 % point 57."""
    orders = [tuple(rng.permutation(rng.key(0, "test", i), 4)) for i in range(6_000)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 250) ** 2 / 250).sum() < 57


def test_numpy_and_torch_draw_the_same_bits():
    streams = np.array([rng.key(1, "a"), rng.key(-7, "b", 3)], dtype=np.int64)
    counters = np.arange(100, dtype=np.int64)
    with_numpy = rng.bits(streams[:, None], counters)
    with_torch = rng.bits(torch.from_numpy(streams)[:, None], torch.from_numpy(counters))
    assert np.array_equal(with_numpy, with_torch.numpy())
    assert with_numpy.min() >= 0
    assert with_numpy.max() < 2**53


def test_equal_keys_keep_their_order():
    keys = np.array([[3, 1, 3, 0, 1], [5, 4, 3, 2, 1]])
    assert rng.order(keys).tolist() == [[3, 1, 4, 0, 2], [4, 3, 2, 1, 0]]
    many = np.random.default_rng(0).integers(0, 50, (3, 2000))  # far more samples than keys
    assert np.array_equal(rng.order(many), np.argsort(many, axis=-1, kind="stable"))
