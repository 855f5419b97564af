"""Replace files on disk so that a run killed at any moment, or a full disk, leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is still being written


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace a file at once by some bytes, or by many parts of it; it is on disk when this returns.

    A link stays and its target is replaced. What is not a file (a folder, a pipe, a device) is refused.
    """
    target, parts = Path(os.path.realpath(path)), [data] if isinstance(data, bytes) else data
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a file")
    partial = target.with_name(target.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)  # of a killed process
        with partial.open("xb") as file:
            file.writelines(parts)
            file.flush()
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
