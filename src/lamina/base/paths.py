"""Refuse paths that no file system accepts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lamina.base.errors import BadInput, short_repr


def checked_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path that the system can look up, whether or not it exists; `what` names it in a message."""
    given = os.fspath(path)
    try:
        Path(given).stat()
    except ValueError as error:  # a NUL, or a surrogate
        raise BadInput(f"{what} {short_repr(given)} cannot be a path: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise BadInput(f"{what} {short_repr(given)} cannot be a path: {error.strerror}") from error
    return Path(path)
