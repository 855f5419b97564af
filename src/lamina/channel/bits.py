"""Codes of a few bits each, one after another in bytes: what a federation sends of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 20  # codes at a time; a multiple of 8, so that every piece ends with a full byte


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return the bytes of codes [n] of `bits` bits each, the lowest bit first.

    >>> pack_bits(torch.tensor([1, 2, 3]), 2)
    tensor([57], dtype=torch.uint8)
    """
    places = np.arange(bits)
    packed = [
        np.packbits(((piece.numpy()[:, None] >> places) & 1).astype(np.uint8).reshape(-1), bitorder="little")
        for piece in torch.split(codes.detach().cpu().to(torch.int64), PIECE)
    ]
    return torch.from_numpy(np.concatenate(packed))


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes [count] in bytes that `pack_bits` has written.

    >>> unpack_bits(torch.tensor([57], dtype=torch.uint8), 2, 3)
    tensor([1, 2, 3])
    """
    weights, codes = 1 << np.arange(bits, dtype=np.int64), []
    for start in range(0, count, PIECE):
        length = min(PIECE, count - start)
        first = start * bits // 8
        piece = np.unpackbits(data.numpy()[first:], count=length * bits, bitorder="little")
        codes.append(piece.reshape(length, bits).astype(np.int64) @ weights)
    return torch.from_numpy(np.concatenate(codes))
