"""Codecs: what the server reads is right on average, or near enough, in the bytes that are counted."""

import math

import numpy as np
import pytest
import torch

from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.channel.codecs import BF16, FP16, QSGD, RandK, Sign, Sketch, Streams, TopK, as_codecs, decode, encode, make

SIZES = [30, 7, 1, 40]
N = sum(SIZES)
VALUES = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.cat(
    [torch.full((size,), 10.0**-i) for i, size in enumerate(SIZES)]
)
UNBIASED = [QSGD(2, 8), QSGD(4), RandK(0.2), Sketch(0.3), Sketch(0.5, rows=3), [RandK(0.3), QSGD(3, 4)]]
EVERY = [
    BF16(),
    FP16(),
    Sign(),
    Sign("model"),
    TopK(0.1),
    *UNBIASED,
    [TopK(0.4), FP16()],
    [Sketch(0.4, rows=2), QSGD(6)],
]


def streams(draws=None):
    keys = torch.tensor([rng.key(0, "test", i) for i in range(draws or 1)])
    return Streams(*([keys.unsqueeze(-1)] * 2 if draws else [keys] * 2))


def read(codecs, values, keys, sizes=SIZES):
    codecs = as_codecs(codecs)
    numbers = [part.values.to(values.dtype) for part in encode(codecs, values, sizes, keys)]
    return decode(codecs, numbers, sizes, keys)


@pytest.mark.long
@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_the_mean_over_the_draws_is_the_vector(codec):
    draws = 20_000
    got = read(codec, VALUES.expand(draws, N), streams(draws))
    error = (got.mean(0) - VALUES).abs()
    assert (error <= 5 * got.std(0) / math.sqrt(draws) + 1e-12).all()
    assert not torch.allclose(got[0], VALUES)


def test_the_error_of_qsgd_is_as_computed_by_hand():
    """A number between two levels is rounded up with probability f: its variance is f (1 - f) times a level squared."""
    got = read(QSGD(3, 8), VALUES.expand(20_000, N), streams(20_000))
    start = 0
    for size in SIZES:
        for at in range(0, size, 8):
            bucket = slice(start + at, start + min(size, at + 8))
            level = VALUES[bucket].abs().max() / 3
            place = VALUES[bucket] / level
            share = place - place.floor()
            expected = level**2 * share * (1 - share)
            torch.testing.assert_close(got[:, bucket].var(0), expected, rtol=0.05, atol=float(0.003 * level**2))
            multiples = got[:, bucket] / level
            torch.testing.assert_close(multiples, multiples.round(), rtol=0, atol=1e-9)
        start += size


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_error_of_random_numbers_and_of_sketches(share):
    """Of k random numbers, n/k - 1 times the squared norm; of k groups, (n - 1)/k times it."""
    draws, square = 20_000, float(VALUES @ VALUES)
    k = round(share * N)
    kept = ((read(RandK(share), VALUES.expand(draws, N), streams(draws)) - VALUES) ** 2).sum(1).mean()
    assert float(kept) == pytest.approx((N / k - 1) * square, rel=0.05)
    sketched = ((read(Sketch(share), VALUES.expand(draws, N), streams(draws)) - VALUES) ** 2).sum(1).mean()
    assert float(sketched) == pytest.approx((N - 1) / k * square, rel=0.05)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_with_feedback_the_error_is_smaller_than_the_vector(codec):
    """So the rest that a client keeps cannot grow without end."""
    codecs = tuple(each.for_feedback() for each in as_codecs(codec))
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(N, dtype=torch.float64, generator=generator) ** (1 + 2 * (seed % 3))
        error = read(codecs, values, Streams(*[torch.tensor([rng.key(seed, "feedback")])] * 2)) - values
        assert float(error @ error) < float(values @ values)


def test_top_numbers_and_signs_by_hand():
    values = torch.tensor([3.0, -1.0, 0.5, -4.0])
    assert read(TopK(0.5), values, streams(), [4]).tolist() == [3.0, 0.0, 0.0, -4.0]
    assert read(Sign(), values, streams(), [2, 2]).tolist() == [2.0, -2.0, 2.25, -2.25]
    assert read(Sign("model"), values, streams(), [2, 2]).tolist() == [2.125, -2.125, 2.125, -2.125]
    n = float(values @ values)
    error = read(Sign(), values, streams(), [4]) - values  # card 3 of FedCAMS: ||w||^2 - ||w||_1^2 / d
    assert float(error @ error) == pytest.approx(n - 8.5**2 / 4)


def test_half_precision_keeps_what_is_far_below_its_smallest_number():
    tiny = torch.tensor([1e-20, -3e-20, 2e-20], dtype=torch.float64)
    torch.testing.assert_close(read(FP16(), tiny, streams(), [3]), tiny, rtol=1e-3, atol=0)


def test_sketches_can_be_added_before_they_are_read():
    codecs, others = as_codecs(Sketch(0.4, rows=2)), torch.linspace(-1, 1, N, dtype=torch.float64)
    sent = [encode(codecs, each, SIZES, streams())[0].values for each in (VALUES, others)]
    both = decode(codecs, [sent[0] + sent[1]], SIZES, streams())
    torch.testing.assert_close(both, read(codecs, VALUES + others, streams()))


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_rows_are_read_as_single_vectors(codec):
    rows = torch.stack([VALUES, -2 * VALUES, torch.zeros(N, dtype=torch.float64)])
    together = read(codec, rows, streams(3))
    for r, row in enumerate(rows):
        alone = read(codec, row, Streams(*[torch.tensor([rng.key(0, "test", r)])] * 2))
        torch.testing.assert_close(together[r], alone)
        assert torch.isfinite(alone).all()


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("bf16", 2 * N),
        ("fp16", 2 * N + 4 * 4),
        (QSGD(3, 10), math.ceil(3 * N / 8) + 4 * (3 + 1 + 1 + 4)),
        ("sign", math.ceil(N / 8) + 4 * 4),
        (Sign("model"), math.ceil(N / 8) + 4),
        (TopK(0.1), 4 * 8 + 7),  # 8 numbers, and 8 places of 7 bits
        (RandK(0.1), 4 * 8),
        (Sketch(0.5, rows=3), 4 * 39),
        ([TopK(0.1), QSGD(2, 4)], math.ceil(2 * 8 / 8) + 4 * 2 + 7),
    ],
    ids=str,
)
def test_the_bytes_are_as_counted_by_hand(codec, size):
    parts = encode(as_codecs(codec), VALUES.float(), SIZES, streams())
    assert sum(part.size for part in parts) == size
    for part in parts:
        if part.most is not None:
            assert part.values.min() >= 0
            assert part.values.max() <= part.most < 2**part.bits


def test_nothing_is_lost_where_all_numbers_are_alike():
    """The largest magnitude of a bucket is a code of its own, also where rounding errors push beyond it."""
    values = torch.full((1000,), np.float32(0.1))
    torch.testing.assert_close(read(QSGD(8, 100), values, streams(), [1000]), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gzip", "unknown codec 'gzip'"),
        ({"name": "qsgd", "bits": 1}, "bits = 1 is not a whole number >= 2"),
        ({"name": "qsgd", "bits": 17}, "bits = 17 exceeds the limit of 16"),
        ({"name": "qsgd", "bit": 4}, "did you mean 'bits'"),
        ({"name": "qsgd", "at_random": "no"}, "at_random = 'no' is neither true nor false"),
        ({"name": "randk", "scaled": 3}, "scaled = 3 is neither true nor false"),
        ({"name": "sketch", "scaled": 3}, "scaled = 3 is neither true nor false"),
        ({"name": "sign", "scale": "bucket"}, "codec 'sign': scale = 'bucket' must be 'layer' or 'model'"),
        ({"name": "topk", "share": 0}, "codec 'topk': share = 0"),
        ({"name": "topk", "bits": 3}, "'bits' is an option of qsgd"),
        (["qsgd", "topk"], "'topk' cannot follow 'qsgd'"),
        (5, "5 is no codec"),
    ],
)
def test_bad_input_is_one_line(given, message):
    with pytest.raises(BadInput) as error:
        as_codecs(given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_make_names_what_it_makes():
    assert make("topk", share=0.5) == TopK(0.5)
