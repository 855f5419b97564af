"""Files that a user names with ``--out``: what may be replaced there, and what may not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput

ENDS_BYTES = 4096  # that are read at either end of a file to recognise it


def write_output(
    path: Path, data: bytes | Iterable[bytes], *, is_ours: Callable[[bytes], bool], kind: str, option: str = "--out"
) -> None:
    """Write a file the user named; refuse the files of a run, and files that lamina did not write.

    Args:
        path: The file; a link is followed.
        data: Its content, whole or in parts.
        is_ours: Whether a file with these bytes at its beginning and end is an earlier output of the same kind.
        kind: What lamina writes there, for the error: "report".
        option: The option that names the file or its folder, for the error.
    """
    refuse_in_run_folder(path, option)
    try:
        # Never a pipe or a device, since reading one may not end. A file without content, as of mktemp, is replaced.
        ends = b""
        if path.is_file():
            with path.open("rb") as file:
                ends = file.read(ENDS_BYTES)
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - ENDS_BYTES))
                ends += file.read(ENDS_BYTES)
        if ends.strip(b"\0 \t\r\n") and not is_ours(ends):
            raise BadInput(f"'{path}' is there and is no {kind}: choose another place with {option}")
        write_file(path, data)
    except OSError as error:
        raise BadInput(f"cannot write '{path}': {error.strerror or error}") from error


def refuse_in_run_folder(path: Path, option: str = "--out") -> None:
    """Refuse a path inside a run's folder, which may hold nothing but the run's own files."""
    for folder in Path(os.path.realpath(path)).parents:
        if (folder / "config.json").exists() and (folder / "metrics.jsonl").exists():
            raise BadInput(f"'{path}' is inside the run folder '{folder}': choose another place with {option}")
