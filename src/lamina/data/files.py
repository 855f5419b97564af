"""Find the files of a data set, and check that they are those its publisher released."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lamina.errors import BadInput
from lamina.paths import checked_path

ENVIRONMENT_VARIABLE = "LAMINA_DATA"


class Place(NamedTuple):
    """Where the files of a data set are; nothing is read, so a damaged file goes unnoticed."""

    path: Path  # a folder or an archive
    missing: list[str]  # names of the files that it lacks


def find_folder(folders: Iterable[Path], names: Sequence[str], endings: Sequence[str] = ("",)) -> Place | None:
    """Return the first folder that holds any of the named files, each with one of the endings."""
    for folder in folders:
        missing = [name for name in names if not any((folder / f"{name}{ending}").is_file() for ending in endings)]
        if len(missing) < len(names):
            return Place(folder, missing)
    return None


def data_directory(given: str | os.PathLike[str] | None = None, expected: str = "") -> Path:
    """Return the data directory: `given`, else the environment variable LAMINA_DATA, else ./data.

    `expected` says which files belong there, for the error message.
    """
    named = given if given is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if named is None:
        return Path("data")
    root = checked_path(Path(named).expanduser(), "the data directory")
    if not root.is_dir():
        # The user named this directory: falling back to a download would hide the mistake.
        raise BadInput(
            f"the data directory '{root}' does not exist; create it, or correct data.dir, data_dir= or LAMINA_DATA"
            + (f"; expected there: {expected}" if expected else "")
        )
    return root


def verify_md5(path: Path, expected: str | None) -> None:
    """Refuse a file that differs from the published one (md5 identifies the version; it is no security check)."""
    if expected is None:
        return
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != expected:
        raise BadInput(
            f"{path} is damaged or another version: md5 expected {expected}, found {actual}; "
            f"download it again and put the good file at that path"
        )
