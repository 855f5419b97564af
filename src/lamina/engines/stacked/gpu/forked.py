"""Compile Triton's kernels in forked processes, which leave them in Triton's cache on disk.

The children never touch the GPU: Triton prepares a compilation in the parent, and the child only runs its compiler.
Where anything of this fails (another operating system, another version of Triton, no memory for a child), nothing is
lost but time: the parent compiles what it does not find in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LONGEST_S = 120  # a child that takes longer is stopped
POLL_S = 0.003

Job = Callable[[], Any]


def compile_in_processes(prepare: Sequence[Job]) -> None:
    """Compile kernels at the same time; each of `prepare` makes Triton ask for one."""
    with contextlib.suppress(Exception):  # the parent compiles then
        jobs = _collect(prepare)
        if len(jobs) > 1 and hasattr(os, "fork"):
            run_forked([functools.partial(_compile, job) for job in jobs])


def _collect(prepare: Sequence[Job]) -> list[Job]:
    """Return the compilations that Triton would start, without those that its cache holds."""
    from triton.runtime import _async_compile, cache

    jobs: list[Job] = []

    class Collector(_async_compile.AsyncCompileMode):  # type: ignore[misc]
        """Takes Triton's compilations, each of which is left unfinished."""

        def submit(self, key: str, compile_fn: Job, finalize_fn: Any) -> Any:
            folder = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir
            if not any(Path(folder).glob("*.json")):
                jobs.append(compile_fn)
            return super().submit(key, compile_fn, finalize_fn)

    with Collector(_Never(), ignore_errors=True):
        for each in prepare:
            with contextlib.suppress(Exception):  # raised again by the launch, if there is one
                each()
    return jobs


class _Never(Executor):
    """Fails everything at once, so that Triton does not take it for compiled."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(NotImplementedError("compiled elsewhere"))
        return future


def _compile(job: Job) -> None:
    """Compile a kernel and, in C, what launches it."""
    from triton.runtime import driver

    compiled = job()
    driver.active.launcher_cls(compiled.src, compiled.metadata)


def run_forked(jobs: Sequence[Job]) -> None:
    """Run jobs in forked processes, as many as there are cores; what fails or takes too long is left out."""
    count = min(len(jobs), os.cpu_count() or 1)
    children: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they hold no lock that a compiler takes
        for first in range(count):
            try:
                child = os.fork()
            except OSError as error:  # the parent compiles this child's share
                log.info("kernels are compiled in %d processes instead of %d: %s", len(children), count, error)
                break
            if child == 0:
                try:
                    for job in jobs[first::count]:
                        with contextlib.suppress(Exception):
                            job()
                finally:
                    os._exit(0)  # without the parent's cleanup, above all CUDA's
            children.append(child)
    end = time.monotonic() + LONGEST_S
    for child in children:
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > end:
                    log.warning("a process that compiles kernels took over %g s and is stopped", LONGEST_S)
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(POLL_S)
