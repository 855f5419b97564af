"""Let `transformers` and torch's own encoders use attention masks without looking at their values.

They skip a mask without padding (``if mask.all()``) or one that is causal, which would decide for all clients of a
batch at once, and cannot be captured. Within the block they compute with every mask; the result is the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.modules import transformer


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Keep torch and `transformers`, if it is loaded, from reading masks within the block."""
    replaced: list[tuple[Any, str, Callable[..., bool]]] = [
        (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)),
        (sys.modules.get("transformers.masking_utils"), "is_tracing", lambda tensor=None: True),
    ]
    usual = [(module, name, getattr(module, name)) for module, name, _ in replaced if hasattr(module, name)]
    try:
        for module, name, function in replaced:
            if hasattr(module, name):
                setattr(module, name, function)
        yield
    finally:
        for module, name, function in usual:
            setattr(module, name, function)
