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

    A link stays and its target is replaced. A pipe, a device or an open file (``/dev/stdout``) is written into.
    """
    target, parts = _replaceable(path), [data] if isinstance(data, bytes) else data
    if target is None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.writelines(parts)
        return
    if target.is_dir():  # "." and "/" have no name that a partial file's could be made of
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
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


def _replaceable(path: Path) -> Path | None:
    """Return the file at the end of a chain of links; None if it can only be written into."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return None
    while path.is_symlink():  # links in a circle have been refused above
        if Path(os.path.realpath(path.parent)).is_relative_to("/proc"):  # an open file, whose name others may hold
            return None
        path = path.parent / path.readlink()
    return path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
