"""Compile Triton's kernels in forked processes, which leave them in Triton's cache on disk.

The children never touch the GPU: Triton prepares a compilation in the parent, and the child only runs its compiler.
Where anything of this fails (another operating system, another version of Triton, no memory for a child), nothing is
lost but time: the parent compiles what it does not find in the cache.
"""

from __future__ import annotations

import atexit
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LONGEST_S = 120  # processes that take longer are stopped
POLL_S = 0.003

Job = Callable[[], Any]


def start_compiling(prepare: Sequence[Job]) -> Forked:
    """Start to compile kernels in other processes; each of `prepare` makes Triton ask for one."""
    with contextlib.suppress(Exception):  # the parent compiles then
        jobs = _collect(prepare)
        if len(jobs) > 1 and hasattr(os, "fork"):
            return start_forked([functools.partial(_compile, job) for job in jobs])
    return Forked(None)


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


@dataclass
class Forked:
    """Processes that run jobs: one child of this process, and its children."""

    child: int | None  # None: there is none
    _end: float = field(default_factory=lambda: time.monotonic() + LONGEST_S, repr=False)

    def __post_init__(self) -> None:
        if self.child is not None:  # else they would outlive a run that ends early, and hold its output open
            atexit.register(self.stop)

    def wait(self) -> None:
        """Wait until all jobs have ended; processes that take too long are stopped."""
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            while self.child is not None:
                ended, status = os.waitpid(self.child, os.WNOHANG)
                if ended and status == 0:
                    break
                if ended:  # it or one of the others was killed, whose children may still work
                    self.stop()
                elif time.monotonic() > self._end:
                    log.warning("processes that compile kernels took over %g s and are stopped", LONGEST_S)
                    self.stop()
                else:
                    time.sleep(POLL_S)
        self._forget()

    def stop(self) -> None:
        """Stop all of them."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
        self._forget()

    def _forget(self) -> None:
        self.child = None
        atexit.unregister(self.stop)


def start_forked(jobs: Sequence[Job]) -> Forked:
    """Start to run jobs in as many processes as there are cores; a job that fails is left out.

    This process forks once, and the others fork each other, because a copy of a process with a GPU takes long.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they hold no lock that a compiler takes
        try:
            child = os.fork()
        except OSError as error:
            log.info("kernels are compiled in one process: %s", error)
            return Forked(None)
    if child == 0:
        have_ended = False
        try:
            os.setpgid(0, 0)  # so that all of them can be stopped together
            have_ended = _run_shared(jobs, os.cpu_count() or 1)
        finally:
            os._exit(0 if have_ended else 1)  # without the parent's cleanup, above all CUDA's
    with contextlib.suppress(OSError):  # the child may have been first, or have ended
        os.setpgid(child, child)
    return Forked(child)


def _run_shared(jobs: Sequence[Job], processes: int) -> bool:
    """Run jobs in this process and its children; return whether no child was killed, whose own may still work.

    The jobs of a child that cannot be forked run here.
    """
    children: list[int] = []
    while processes > 1 and len(jobs) > 1:
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            children, jobs, processes = [], jobs[1::2], processes // 2
        else:
            children, jobs, processes = [*children, child], jobs[::2], processes - processes // 2
    for job in jobs:
        with contextlib.suppress(Exception):
            job()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)
