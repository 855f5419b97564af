"""Numbers that follow from a key: ChaCha20 as RFC 8439 has it, and the normal distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lamina.base import secret_rng

KEY = bytes(range(32))


def rotated(value, by):
    return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF


def quarter_round(state, a, b, c, d):
    for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] = (state[x] + state[y]) & 0xFFFFFFFF
        state[z] = rotated(state[z] ^ state[x], by)


def chacha20_block(key, counter, nonce):
    """Section 2.3 of RFC 8439."""
    words = [int.from_bytes(part, "little") for part in (key[i : i + 4] for i in range(0, 32, 4))]
    more = [int.from_bytes(nonce[i : i + 4], "little") for i in range(0, 12, 4)]
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *words, counter, *more]
    state = list(start)
    for _ in range(10):
        for i in range(4):
            quarter_round(state, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter_round(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return b"".join(((a + b) & 0xFFFFFFFF).to_bytes(4, "little") for a, b in zip(state, start, strict=True))


def test_the_block_function_of_this_file_is_that_of_the_rfc():
    block = chacha20_block(KEY, 1, bytes.fromhex("000000090000004a00000000"))  # section 2.3.2
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4")


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_numbers_are_those_of_chacha20_and_box_muller(count):
    half = -(-count // 2)
    blocks = b"".join(chacha20_block(KEY, i, bytes(12)) for i in range(math.ceil(16 * half / 64)))
    words = np.frombuffer(blocks[: 16 * half], dtype="<u8") >> np.uint64(11)
    radius, angle = ((words.astype(np.float64) + 0.5) / 2**53).reshape(2, half)
    radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    np.testing.assert_allclose(secret_rng.normal(KEY, [count]).numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bit", range(0, 256, 5))
def test_every_bit_of_a_key_counts(bit):
    """Torch's generators keep 32 bits of a seed, which can be tried one by one."""
    other = (int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")
    assert abs(secret_rng.normal(KEY, [4]) - secret_rng.normal(other, [4])).min() > 0
    assert secret_rng.stream(KEY, "cohort", 1) != secret_rng.stream(other, "cohort", 1)


def test_purposes_have_keys_of_their_own():
    names = [("cohort", 1), ("cohort", 2), ("cap", 1), ("cohort", 1, 0), ("cohort",)]
    assert len({secret_rng.derived(KEY, *name) for name in names}) == len(names)
    assert secret_rng.stream(KEY, "cohort", 1) == secret_rng.stream(KEY, "cohort", 1)


def test_numbers_are_normal_and_independent(monkeypatch):
    monkeypatch.setattr(secret_rng, "BLOCK", 1 << 12)
    numbers = secret_rng.normal(KEY, [3, 33_333])
    assert (numbers.shape, numbers.dtype) == ((3, 33_333), torch.float64)
    flat = numbers.flatten().numpy()
    assert stats.kstest(flat, "norm").pvalue > 0.01
    assert len(np.unique(flat)) == len(flat)
    for lag in (1, 1 << 12, len(flat) // 2):
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 4 / math.sqrt(len(flat) - lag)
