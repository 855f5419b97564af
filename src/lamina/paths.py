"""Paths as a user gives them: what no file system takes is refused in one line, and what is no file is not read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lamina.errors import BadInput, short_repr


def checked_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path that the system can look up, whether or not there is anything.

    Args:
        path: as it was given.
        what: how to call it in a message.
    """
    given = os.fspath(path)
    try:
        Path(given).stat()
    except ValueError as error:  # a NUL, or a surrogate
        raise BadInput(f"{what} {short_repr(given)} cannot be a path: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise BadInput(f"{what} {short_repr(given)} cannot be a path: {error.strerror}") from error
    return Path(path)


def refuse_special(path: Path) -> None:
    """Refuse what is there but is no regular file: to read a FIFO or a device may never end."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is not a regular file: put the file itself there")
