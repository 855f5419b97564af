"""Counter-based randomness: every random number is a pure function of (seed, purpose, counters).

There is no generator object and no hidden position: a client's batches in round 7 are
the same whether the cohort runs in a loop, stacked, on three processes or on a phone, and
whether or not the run was killed in round 6. The mixing function is SplitMix64's finaliser
(Steele, Lea & Flood 2014), applied to each counter in turn. It is written with int64
operations that numpy and torch share, so the host and a GPU draw the same numbers.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = Any  # an int, a numpy int64 array or a torch int64 tensor: all go through the same arithmetic

_WORD = 1 << 64


def _signed(value: int) -> int:
    """Fold a Python int into the range of a signed 64-bit word."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(h: Ints, by: int) -> Ints:
    """Logical right shift of a signed word (numpy and torch only offer the arithmetic one)."""
    return (h >> by) & ((1 << (64 - by)) - 1)


def _mix(h: Ints) -> Ints:
    h = (h ^ _shift(h, 30)) * _MIX1
    h = (h ^ _shift(h, 27)) * _MIX2
    return h ^ _shift(h, 31)


def _mix_int(h: int) -> int:
    """`_mix` on one Python int, where products do not wrap by themselves."""
    h = _signed((h ^ _shift(h, 30)) * _MIX1)
    h = _signed((h ^ _shift(h, 27)) * _MIX2)
    return int(h ^ _shift(h, 31))


def key(seed: int, purpose: str, *counters: int) -> int:
    """Hash a seed, a purpose and integer counters into one word: the name of a random stream.

    >>> key(0, "cohort", 1) == key(0, "cohort", 1) != key(0, "cohort", 2)
    True
    """
    h = _mix_int(_signed(seed + _GOLDEN))
    for word in (zlib.crc32(purpose.encode()), *counters):
        h = _mix_int(_signed((h ^ _signed(word)) + _GOLDEN))
    return h


def fork(stream: Ints, counter: Ints) -> Ints:
    """Return the streams below a stream: one new word for every ``stream`` x ``counter`` (numpy or torch, broadcast).

    One of the two must be an array or a tensor: only those wrap around at 64 bits as the mixing needs. Forking a key by
    0 gives the key with a further counter 0, so no purpose may use both.
    """
    moved = _signed(counter * _MIX2) if isinstance(counter, int) else counter * _MIX2
    return _mix((stream ^ moved) + _GOLDEN)


def words(stream: Ints, counter: Ints) -> Ints:
    """Return one random word for every ``stream`` x ``counter``, faster than `fork` and not to be forked further."""
    return _mix(stream ^ counter)


def words_into(out: torch.Tensor, scratch: torch.Tensor, stream: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Write `words` of two tensors into `out` and return it; `scratch` is another tensor of that shape."""
    torch.bitwise_xor(stream, counter, out=out)
    for by, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):  # `_mix`
        torch.bitwise_right_shift(out, by, out=scratch)
        out.bitwise_xor_(scratch.bitwise_and_((1 << (64 - by)) - 1))
        if factor != 1:
            out.mul_(factor)
    return out


def bits(stream: Ints, counter: Ints) -> Ints:
    """Return 53 bits for every ``stream`` x ``counter`` as non-negative int64, so that sorting agrees everywhere."""
    return _shift(fork(stream, counter), 11)


def uniform(stream: int, n: int) -> NDArray[np.float64]:
    """Return `n` numbers in [0, 1)."""
    return np.asarray(bits(stream, np.arange(n, dtype=np.int64)) * 2.0**-53, dtype=np.float64)


def permutation(stream: int, n: int) -> NDArray[np.int64]:
    """Return a random order of ``range(n)``.

    >>> sorted(permutation(key(0, "doc"), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return order(np.asarray(bits(stream, np.arange(n, dtype=np.int64))))


def sample(stream: int, n: int, size: int) -> NDArray[np.int64]:
    """Return `size` different numbers of ``range(n)``, ascending, in O(size) time; every subset is equally likely.

    >>> sample(key(0, "doc"), 3, 3)
    array([0, 1, 2])
    """
    if 2 * size > n:  # leave out the others, which are fewer
        chosen = np.ones(n, dtype=bool)
        chosen[sample(stream, n, n - size)] = False
        return np.flatnonzero(chosen)
    draws = 2 * size  # contain `size` different numbers nearly always
    while True:
        numbers, first_draws = np.unique(bits(stream, np.arange(draws, dtype=np.int64)) % n, return_index=True)
        if len(numbers) >= size:
            return np.sort(numbers[np.argsort(first_draws)[:size]])
        draws *= 2


def coins(stream: int, n: int, p: float) -> NDArray[np.int64]:
    """Return the numbers of ``range(n)`` whose coin shows heads, each with probability `p`, in O(n p) time.

    It draws the gaps between heads, which have a geometric distribution, instead of n coins.
    """
    if p >= 1:
        return np.arange(n, dtype=np.int64)
    draws = 16 + int(1.5 * n * p)
    while True:
        tails = np.floor(np.log(1 - uniform(stream, draws)) / math.log1p(-p))  # before the next head
        heads = np.cumsum(np.minimum(tails, n) + 1) - 1
        if heads[-1] >= n:
            return heads[heads < n].astype(np.int64)
        draws *= 2


def order(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts keys along the last axis. Ties, which practically never occur, keep their order."""
    quick = np.argsort(keys, axis=-1)  # many times as fast as a stable sort, and the same if no two keys are equal
    ranked = np.take_along_axis(keys, quick, axis=-1)
    if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
        return np.argsort(keys, axis=-1, kind="stable")
    return quick


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return a numpy generator for the few draws with no simple closed form (Dirichlet proportions).

    Create one for each (seed, purpose, counters) and discard it, so that it carries no position.
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *counters) % _WORD))


def torch_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a non-negative seed for `torch.manual_seed` (initial weights, dropout)."""
    return key(seed, purpose, *counters) & ((1 << 63) - 1)


# --- the process-wide generators, for modules that draw from them -----------------------------------------------------


@contextmanager
def forked(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore the process-wide generators of torch, numpy and Python at the end; seed them if a seed is given."""
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            if seed is not None:
                seed_generators(device, seed)
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)  # noqa: NPY002


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the process-wide generators of torch, numpy and Python; `torch.manual_seed` would visit every device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def generator_states(device: torch.device) -> list[Any]:
    """Return the states of the process-wide generators of torch, numpy and Python, to compare them later."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    kind, words, *position = np.random.get_state()  # noqa: NPY002  (of modules that use it)
    return [*states, kind, np.asarray(words).tobytes(), position]
