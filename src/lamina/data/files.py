"""Finding a data set's files and proving that they are what their publisher released."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lamina.errors import BadInput
from lamina.paths import checked_path

ENVIRONMENT_VARIABLE = "LAMINA_DATA"


def data_directory(given: str | os.PathLike[str] | None = None, expected: str = "") -> Path:
    """Where data files are looked for: `given`, else the environment variable LAMINA_DATA, else ./data.

    Which files are expected there is for the line that is said if there is no such directory.
    """
    named = given if given is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if named is None:
        return Path("data")
    root = checked_path(Path(named).expanduser(), "the data directory")
    if not root.is_dir():
        # A directory somebody named on purpose: going on to a download would hide the mistake.
        raise BadInput(
            f"the data directory '{root}' does not exist; create it, or correct data.dir, data_dir= or LAMINA_DATA"
            + (f"; expected there: {expected}" if expected else "")
        )
    return root


def verify_md5(path: Path, expected: str | None) -> None:
    """Refuse a file that differs from the published one (md5 names versions here; it is not a security check)."""
    if expected is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise BadInput(
            f"{path} is damaged or another version: md5 expected {expected}, found {found}; "
            f"download it again and put the good file at that path"
        )
