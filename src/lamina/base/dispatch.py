"""The base of contexts that watch torch's operations."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `TorchDispatchMode` that does not import torch's compiler, which takes seconds, to protect itself from it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
