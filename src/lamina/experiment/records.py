"""Read run folders: what reports, comparisons and tuning are made from. They hold nothing but JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lamina import algorithms
from lamina.errors import BadInput, is_number, is_whole
from lamina.history import History, Row

FORMAT = 1  # of a run's folder; others are refused
SECTIONS = ("data", "model", "algorithm", "train", "run", "compare")  # tables of a run's configuration


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
    def title(self) -> str:
        """Its algorithm as its paper calls it; one of the user's own as its card did when it ran."""
        known = algorithms.registry()
        if self.algorithm in known:
            return known[self.algorithm].card.title
        stored = self.config.get("title")
        return stored if isinstance(stored, str) and stored else self.algorithm

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
    config = read_json(folder / "config.json")
    refuse_format(folder, config, "read it with that one")
    check_config(folder, config)
    how = read_diverged(folder)
    return Record(
        folder,
        config,
        read_metrics(folder / "metrics.jsonl").history,
        read_environment(folder),
        None if how is None else how["message"],
    )


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks what every run's has."""
    try:
        for section in SECTIONS:
            if not isinstance(config.get(section, {}), Mapping):
                raise TypeError(f"a table [{section}]")
        record = Record(folder, dict(config), History(), {})
        _ = record.algorithm, record.lr, record.seed, record.complete, record.tuning
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"'{folder / 'config.json'}' is not a run's configuration: it lacks {error}") from error


def refuse_format(folder: Path, config: Mapping[str, Any], otherwise: str) -> None:
    """Refuse a folder of another format than this version's; the last words say what to do instead."""
    found = config.get("format", 0)
    if found != FORMAT:
        which = "another" if not is_whole(found) else "an older" if found < FORMAT else "a newer"
        raise BadInput(
            f"the folder '{folder}' was written by {which} lamina (format {found}, this one's is {FORMAT}): {otherwise}"
        )


def read_environment(folder: Path) -> dict[str, Any]:
    """What the environment of a run was; empty if nobody knows, which is no reason to refuse the run."""
    try:
        return read_json(folder / "environment.json")
    except BadInput:
        return {}


def read_diverged(folder: Path) -> dict[str, Any] | None:
    """How a run diverged, with a "message" at least; None if it did not."""
    path = folder / "diverged.json"
    if not path.exists():
        return None
    how = read_json(path)
    return {**how, "message": str(how.get("message", "the training diverged, and diverged.json does not say how"))}


class Metrics(NamedTuple):
    """What a metrics file holds."""

    history: History  # its rounds
    ends: list[int]  # the byte at which each of them ends, after a first 0
    damaged: int | None  # the first line that is not the round it should be; it and all after it are left out


def read_metrics(path: Path) -> Metrics:
    """The rounds of a metrics file; a last line without an end is half-written, which is no damage, and left out."""
    rows: list[Row] = []
    ends = [0]
    for line in _read(path).split(b"\n")[:-1]:
        try:
            row = json.loads(line)
            if row["round"] != len(rows) + 1 or not all(value is None or _is_finite(value) for value in row.values()):
                return Metrics(History(rows), ends, len(rows) + 1)
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Metrics(History(rows), ends, len(rows) + 1)
        ends.append(ends[-1] + len(line) + 1)
    return Metrics(History(rows), ends, None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table."""
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a table")
    return value


def _is_finite(value: Any) -> bool:
    """Whether a value of a row is a number that a float can hold."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"'{path.parent}' is not a run's folder: it has no {path.name}") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror or error}") from error
