"""Stop the processes of a local federation when its parent exits, even after ``kill -9``.

Runs as a script of its own, ``guard.py MARK``, with nothing but the standard library. It reads process group ids from
its standard input, a pipe whose other end only the owner holds; when that end is closed, by the owner or by the kernel,
the groups still there are ended, and on Linux every process whose environment holds the mark: Flower starts some of its
helpers in sessions of their own, where no group reaches them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "LAMINA_FEDERATION"  # holds the mark, in the environment of every process of the federation
PATIENCE_S = 5.0  # from asking to killing


def marked(mark: str) -> list[int]:
    """Return the other processes that carry the mark; none where there is no /proc."""
    wanted = f"{VARIABLE}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def end_all(groups: Iterable[int], mark: str) -> None:
    """End process groups and marked processes: ask first, then kill."""
    groups = list(groups)
    deadline = time.monotonic() + PATIENCE_S
    _signal(groups, marked(mark), signal.SIGTERM)
    while time.monotonic() < deadline and (marked(mark) or any(map(_exists, groups))):
        time.sleep(0.05)
    while left := marked(mark):  # a process may start another one while it is being killed
        _signal([], left, signal.SIGKILL)
        time.sleep(0.02)
    _signal(groups, [], signal.SIGKILL)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # gone, or its number is another user's by now
        return False
    return True


def _signal(groups: Iterable[int], pids: Iterable[int], number: int) -> None:
    for send, targets in ((os.killpg, groups), (os.kill, pids)):
        for target in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(target, number)


def main(mark: str) -> None:
    """Read ``+group`` and ``-group`` lines until the owner is gone; end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end_all(groups, mark)


if __name__ == "__main__":
    main(sys.argv[1])
