"""Let Hugging Face's `transformers` use attention masks without looking at their values.

It skips a mask without padding (``if mask.all()``), which would decide for all clients of a batch at once. While it
believes that it is being traced, it computes with every mask; the result is the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Keep `transformers`, if it is loaded, from reading masks within the block."""
    masking = sys.modules.get("transformers.masking_utils")
    usual = getattr(masking, "is_tracing", None)
    if masking is None or usual is None:
        yield
        return
    masking.is_tracing = lambda tensor=None: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.is_tracing = usual  # type: ignore[attr-defined]
