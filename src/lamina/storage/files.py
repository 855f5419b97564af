"""Writing to disk so that a run killed at any moment, or a full disk, leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.errors import BadInput
from lamina.text import csv_text

PARTIAL = ".partial"  # how the name of a file ends that is being written
MOST_LINKS = 40  # in a chain, as in the kernel


def write_file(path: Path, data: bytes) -> None:
    """Replace a file at once; it is on disk when this returns.

    A link stays and its target is replaced. A pipe, a device or an open file (``/dev/stdout``) is written into.
    """
    target = _replaceable(path)
    if target is None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.write(data)
        return
    if target.is_dir():  # "." and "/" have no name that a partial file's could be made of
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    partial = target.with_name(target.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)  # of a killed process
        with partial.open("xb") as file:
            file.write(data)
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
    target = path
    for _ in range(MOST_LINKS):
        if not target.is_symlink():
            return target
        if Path(os.path.realpath(target.parent)).is_relative_to("/proc"):  # an open file, whose name others may hold
            return None
        target = target.parent / target.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file."""
    write_file(path, (json.dumps(as_json(value), indent=2, allow_nan=False) + "\n").encode())


def as_json(value: Any) -> Any:
    """Return a value as JSON would read it back; infinite numbers, which JSON lacks, become strings."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, a folder that could not be made or written to."""
    try:
        place = folder.absolute()
        while not place.exists():
            if place.is_symlink():
                what = f"'{place}' is a link to '{place.readlink()}', which does not exist"
                raise BadInput(f"{what}: choose another with --out (out=…)")
            place = place.parent
        if not place.is_dir():
            raise BadInput(f"'{place}' is a file, not a folder: choose another with --out (out=…)")
        usable = os.access(place, os.R_OK | os.W_OK | os.X_OK)
        read_only = bool(os.statvfs(place).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise cannot_write(folder, error) from error
    if read_only or not usable:
        why = f"'{place}' is on a read-only file system" if read_only else f"no permission in '{place}'"
        raise BadInput(f"cannot write to the folder '{folder}': {why}; choose another with --out (out=…)")


def cannot_write(folder: Path, error: OSError) -> BadInput:
    """Return the error for a folder that the system refuses to write to."""
    return BadInput(f"cannot write to the folder '{folder}': {error.strerror or error}")


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raise `cannot_write` where the system refuses to write to a folder."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from error


def write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Replace a CSV file."""
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    write_file(path, csv_text(lines, line_end="\r\n").encode())
