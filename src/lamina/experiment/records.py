"""Read run folders: what reports, comparisons and tuning are made from. Needs nothing but JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import BadInput
from lamina.history import History, Row


@dataclass(frozen=True)
class Record:
    """One run as its folder tells it, finished or not."""

    folder: Path
    config: dict[str, Any]  # as resolved: sections data, model, algorithm, train, run
    history: History
    environment: dict[str, Any]  # versions, machine, start; empty if it was not written
    diverged: str | None = None  # the line that says how, if the training did

    @property
    def algorithm(self) -> str:
        """Its algorithm's name."""
        return str(self.config["algorithm"]["name"])

    @property
    def lr(self) -> float:
        """Its learning rate, before any schedule."""
        return float(self.config["train"]["lr"])

    @property
    def seed(self) -> int:
        """The seed all its randomness follows from."""
        return int(self.config["train"]["seed"])

    @property
    def complete(self) -> bool:
        """Whether it ran all its rounds."""
        return self.diverged is None and len(self.history) >= int(self.config["train"]["rounds"])

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do: it is complete, or it diverged."""
        return self.complete or self.diverged is not None

    @property
    def on_validation_data(self) -> bool:
        """Whether its accuracy is on held-out training data, not on the test data."""
        return self.config["data"].get("validation") is not None

    @property
    def tuning(self) -> bool:
        """Whether it is one of a comparison's runs that only choose a learning rate."""
        return self.on_validation_data or "tuning" in self.folder.parts[-3:-1]


def find_records(paths: Iterable[str | Path]) -> list[Record]:
    """Every run in the given folders, at any depth; a folder given twice counts once."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise BadInput(f"no folder '{path}'")
        found = sorted(metrics.parent for metrics in path.rglob("metrics.jsonl"))
        if not found:
            raise BadInput(f"no run in '{path}': a run's folder holds config.json and metrics.jsonl")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    return [read_record(folder) for folder in folders]


def read_record(folder: str | Path) -> Record:
    """Read one run's folder; it may be running now."""
    folder = Path(folder)
    environment, diverged = folder / "environment.json", folder / "diverged.json"
    return Record(
        folder,
        read_json(folder / "config.json"),
        read_metrics(folder / "metrics.jsonl")[0],
        read_json(environment) if environment.exists() else {},
        str(read_json(diverged)["message"]) if diverged.exists() else None,
    )


def read_metrics(path: Path) -> tuple[History, list[int]]:
    """The rounds of a metrics file, and the byte at which each ends; a half-written last line is left out."""
    rows: list[Row] = []
    ends = [0]
    for line in _read(path).split(b"\n")[:-1]:  # what follows the last line's end is torn, or empty
        try:
            row = json.loads(line)
            if row["round"] != len(rows) + 1:
                break
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
        except (ValueError, TypeError, KeyError):
            break  # what was damaged, and all after it, is run again
        ends.append(ends[-1] + len(line) + 1)
    return History(rows), ends


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table."""
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a table")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"'{path.parent}' is not a run's folder: it has no {path.name}") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror or error}") from error
