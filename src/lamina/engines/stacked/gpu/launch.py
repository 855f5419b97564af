"""Launch kernels, or compile many of them at the same time before the first launch.

Triton compiles a kernel when it is first launched, one after another: a deep network would start slowly. Most of a
compilation is Python, so threads hardly help; `forked.py` compiles in processes, whose results lie in Triton's cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lamina.engines.stacked.gpu.forked import Forked, start_compiling

log = logging.getLogger(__name__)

MANY_KERNELS = 10  # that take long enough to say so
Launch = tuple[Any, Any, Any, Any]  # kernel, grid, arguments, options

_recorded: list[Launch] | None = None  # not a context variable: autograd launches from threads of its own
_thread = threading.local()  # is_unrecorded: see `unrecorded`


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; within `recording`, remember it instead."""
    if _recorded is None or getattr(_thread, "is_unrecorded", False):
        kernel[grid](*arguments, **options)
    else:
        _recorded.append((kernel, grid, arguments, options))


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches without running them: for work whose results are not needed."""
    global _recorded
    launches: list[Launch] = []
    _recorded = launches
    try:
        yield launches
    finally:
        _recorded = None


def is_recording() -> bool:
    """Return whether launches are only collected."""
    return _recorded is not None


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Launch from this thread even while another one collects."""
    _thread.is_unrecorded = True
    try:
        yield
    finally:
        _thread.is_unrecorded = False


def start_triton() -> None:
    """Let Triton build its driver in C and hash its own 400 MB, which threads that compile would each do."""
    from triton.runtime import cache, driver

    tasks = [lambda: driver.active.get_current_device(), getattr(cache, "triton_key", lambda: "")]
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda task: task(), tasks))


_started: list[Forked] = []  # processes that compile and have not been waited for


def start_compiling_ahead(launches: Iterable[Launch]) -> None:
    """Start to compile the kernels of launches in other processes. No other thread may compile meanwhile."""
    distinct = _distinct(launches)
    if distinct:
        start_triton()
        _started.append(start_compiling([functools.partial(_compile_one, launched) for launched in distinct]))


def compile_ahead(launches: Iterable[Launch]) -> None:
    """Compile the kernels of all launches at the same time. No other thread may compile meanwhile."""
    distinct = _distinct(launches)
    if len(distinct) >= MANY_KERNELS:
        log.info("loading %d GPU kernels; the first run on a machine compiles them, in a few seconds", len(distinct))
    wait_for_compilers()
    start_compiling_ahead(distinct)
    wait_for_compilers()
    device = torch.cuda.current_device()

    def load_one(launched: Launch) -> None:
        torch.cuda.set_device(device)
        with contextlib.suppress(Exception):  # raised again by the launch, if there is one
            compiled = _compile_one(launched)
            if hasattr(compiled, "_init_handles"):  # Triton would build the launcher at the first launch
                compiled._init_handles()

    with ThreadPoolExecutor(min(len(distinct) or 1, os.cpu_count() or 1)) as pool:
        list(pool.map(load_one, distinct))


def wait_for_compilers() -> None:
    """Wait for the processes that `start_compiling_ahead` has started."""
    while _started:
        _started.pop().wait()


def stop_compilers() -> None:
    """Stop the processes that `start_compiling_ahead` has started: nobody needs their kernels."""
    while _started:
        _started.pop().stop()


def _distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Return one launch for each kernel that Triton compiles."""
    return list({_variant(*launched): launched for launched in launches}.values())


def _compile_one(launched: Launch) -> Any:
    kernel, grid, arguments, options = launched
    return kernel.warmup(*arguments, grid=grid, **options)


def _variant(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what Triton compiles a kernel for: types, alignment and constants."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16
        base = getattr(value, "base", None)
        return (repr(value.block_shape), base.dtype) if isinstance(base, Tensor) else value

    return id(kernel), tuple(map(part, arguments)), tuple(sorted(options.items()))
