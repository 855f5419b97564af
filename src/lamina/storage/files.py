"""Write JSON and CSV files, and check the folders they go to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.base.text import csv_text


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file."""
    write_file(path, (json.dumps(as_json(value), indent=2, allow_nan=False) + "\n").encode())


def as_json(value: Any) -> Any:
    """Return a value as JSON would read it back; infinite numbers, which JSON lacks, become strings."""
    value = value.item() if getattr(value, "shape", None) == () else value  # a number of numpy, which is not imported
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, a folder that could not be made or written to."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = f"{error.strerror or error}: '{place}'"
        raise BadInput(f"cannot write to the folder '{folder}': {why}; choose another with --out (out=…)") from error


def state_folder() -> Path:
    """Return lamina's folder for what programs keep between runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lamina"


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn the system's refusal to write to a folder into one line."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot write to the folder '{folder}': {error.strerror or error}") from error


def write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Replace a CSV file."""
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    write_file(path, csv_text(lines, line_end="\r\n").encode())
