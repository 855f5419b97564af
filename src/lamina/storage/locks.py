"""Locks: one process writes to a folder at a time, and notices if the folder is removed or replaced meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lamina.base.errors import BadInput
from lamina.storage.files import writing_to


class Locked(BadInput):
    """Another process writes to the folder."""


class Lock:
    """The exclusive right to write to a folder; the kernel releases it when the process ends, even after SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
            while not is_at(self._file, self.path):  # its last owner deleted it between our two steps
                self._file.close()
                self._file = self._take()
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def _take(self) -> IO[str]:
        file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            what = f"process {owner} is writing to the folder '{self.path.parent}'"
            raise Locked(f"{what}: wait until it ends, or choose another with --out (out=…)") from error
        return file

    def refuse_lost(self) -> None:
        """Raise an error if the folder was removed, emptied or replaced, since the lock is then no longer ours."""
        if not is_at(self._file, self.path):
            raise lost(self.path.parent)

    def release(self, *, delete: bool = False) -> None:
        """Let other processes write to the folder."""
        if delete and is_at(self._file, self.path):
            self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait for a folder that several processes share, and hold it until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its process killed
        yield


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def lost(folder: Path) -> BadInput:
    """Return the error for a folder that no longer holds what was written to it."""
    return BadInput(
        f"the folder '{folder}' was removed, emptied or replaced while this run was writing to it: "
        "nothing more is written there; run the command again"
    )
