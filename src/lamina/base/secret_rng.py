"""Random numbers that nobody can guess without the key, for differential privacy.

`base/rng.py` mixes a seed into 64 bits, and torch's generators keep 32 bits of a seed: an attacker who tries all seeds
finds the numbers, and can take the noise away. These numbers come from ChaCha20, with a key of 256 bits for each
tensor.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import missing_extra

KEY_BYTES = 32
BLOCK = 1 << 16  # pairs of numbers at a time, which stay in a core's cache


def derived(key: bytes, *names: str | int) -> bytes:
    """Return the key of a purpose.

    >>> derived(b"key", "cohort", 1) != derived(b"key", "cohort", 2)
    True
    """
    return hmac.new(key, "/".join(map(str, names)).encode(), hashlib.sha256).digest()


def stream(key: bytes, *names: str | int) -> int:
    """Return a random stream for the functions of `base/rng.py`, of which nothing follows for other names."""
    return int.from_bytes(derived(key, *names)[:8], "little", signed=True)


def normal(key: bytes, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers in float64 that follow from a key of 32 bytes, by the Box-Muller transform."""
    count = math.prod(shape)
    pairs = torch.empty(2, -(-count // 2), dtype=torch.float64)
    cipher = _cipher(key)
    for start in range(0, pairs.shape[1], BLOCK):
        radius, angle = _uniform(cipher, pairs[:, start : start + BLOCK].shape)
        radius.log_().mul_(-2).sqrt_()
        angle.mul_(2 * math.pi)
        block = pairs[:, start : start + BLOCK]
        torch.mul(radius, angle.cos(), out=block[0])
        torch.mul(radius, angle.sin_(), out=block[1])
    return pairs.flatten()[:count].reshape(tuple(shape))


def _uniform(cipher: Any, shape: Sequence[int]) -> Tensor:
    """Return the next numbers in (0, 1], with 53 random bits."""
    words = torch.frombuffer(bytearray(cipher.update(bytes(8 * math.prod(shape)))), dtype=torch.int64)
    bits = words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53).reshape(tuple(shape))


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ImportError as error:
        raise missing_extra("cryptography", "privacy", "the noise of differential privacy") from error
    return Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
