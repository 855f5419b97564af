"""Measure the memory of a model: its parameters when it is created, its activations when it is called."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lamina.base.dispatch import WatchingMode
from lamina.base.limits import MODEL_COPIES, check_memory


class BoundedMemory(WatchingMode):
    """A context that refuses a tensor too large to be trained before it is allocated.

    Creating the model on torch's meta device first would run a user's factory twice, and not every factory runs there.
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the size of the result of an operation without inputs (torch.empty, torch.zeros, ...)."""
        kwargs = kwargs or {}
        if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) and "device" in kwargs:
            like: Any = None
            with contextlib.suppress(Exception):  # operations that the meta device lacks are not checked
                like = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
            if isinstance(like, Tensor):
                size, shape = like.numel() * like.element_size(), list(like.shape)
                check_memory(
                    f"training {self.what} with a tensor of shape {shape}", MODEL_COPIES * size, "take a smaller model"
                )
        return func(*args, **kwargs)


class LargestActivation(WatchingMode):
    """A context that records the largest tensor with a row per sample, in bytes per sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.bytes = samples, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the size of the result of an operation."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and len(result) == self.samples:
            self.bytes = max(self.bytes, result.numel() * result.element_size() // self.samples)
        return result
