"""The place of this process among the workers that one command started."""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "LAMINA_WORKER"  # of the environment of a worker


@dataclass(frozen=True)
class Worker:
    """A process that shares the runs of a command; a process that nobody started as a worker is the only one."""

    number: int = 1  # the first one shows progress and results
    here: int = 1  # how many share the cores of this machine

    def environment(self) -> dict[str, str]:
        """Return the variable that tells a process that it is this worker."""
        return {VARIABLE: f"{self.number}/{self.here}"}


def is_worker() -> bool:
    """Return whether this process was started as a worker."""
    return VARIABLE in os.environ


def this_worker() -> Worker:
    """Return the place of this process."""
    return Worker(*map(int, os.environ[VARIABLE].split("/"))) if is_worker() else Worker()
