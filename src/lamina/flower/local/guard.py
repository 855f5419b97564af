"""Stop the processes of a local federation when its owner closes it or exits, even after ``kill -9``.

Runs as a script of its own, ``guard.py MARK``, with nothing but the standard library. Its standard input is a pipe
whose other end only the owner holds. When that end is closed, by the owner or by the kernel, the guard ends every
process whose environment holds the mark, those that Flower starts in sessions of their own included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "LAMINA_FEDERATION"  # holds the mark, in the environment of every process of the federation
PATIENCE_S = 5.0  # from asking to killing


def marked(mark: str) -> list[int]:
    """Return the processes that carry the mark."""
    wanted, pids = f"{VARIABLE}={mark}".encode(), []
    if not Path("/proc/self/environ").exists():  # as on macOS
        listing = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, check=False).stdout
        return [int(line.split()[0]) for line in listing.splitlines() if wanted in line.split()]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def end_all(mark: str) -> None:
    """End the marked processes: ask first, then kill."""
    deadline = time.monotonic() + PATIENCE_S
    _signal(mark, signal.SIGTERM)
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.05)
    while _signal(mark, signal.SIGKILL):  # a process may start another one while it is being killed
        time.sleep(0.02)


def _signal(mark: str, number: int) -> bool:
    """Send a signal to the marked processes; return whether there are any."""
    pids = marked(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(pids)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()  # until the owner is gone
    end_all(sys.argv[1])
