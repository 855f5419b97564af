"""Launch kernels, or compile many of them at the same time before the first launch.

Triton compiles a kernel when it is first launched, one after another: a deep network would start slowly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_launches: ContextVar[list[tuple[Any, Any, Any, Any]] | None] = ContextVar("launches", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; within `compile_ahead`, remember it instead."""
    launches = _launches.get()
    if launches is None:
        kernel[grid](*arguments, **options)
    else:
        launches.append((kernel, grid, arguments, options))


def compile_ahead(work: Callable[[], None]) -> None:
    """Run work without its kernels, whose results are then undefined, and compile all of them in parallel."""
    launches: list[tuple[Any, Any, Any, Any]] = []
    token = _launches.set(launches)
    try:
        work()
    finally:
        _launches.reset(token)
    distinct = {_variant(*launched): launched for launched in launches}
    device = torch.cuda.current_device()

    def compile_one(launched: tuple[Any, Any, Any, Any]) -> None:
        kernel, grid, arguments, options = launched
        torch.cuda.set_device(device)
        kernel.warmup(*arguments, grid=grid, **options)

    with ThreadPoolExecutor(min(len(distinct) or 1, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, distinct.values()))


def _variant(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what Triton compiles a kernel for: types, alignment and constants."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16
        base = getattr(value, "base", None)
        return (repr(value.block_shape), base.dtype) if isinstance(base, Tensor) else value

    return id(kernel), tuple(map(part, arguments)), tuple(sorted(options.items()))
