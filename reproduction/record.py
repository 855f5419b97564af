"""Read the records that reproduction/collect.py has written."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collect import called

from lamina.experiment.runs.records import read_json
from lamina.experiment.trials import reproduction
from lamina.training.history import History


@dataclass(frozen=True)
class Result:
    """The record of one reproduction."""

    name: str
    facts: dict[str, Any]
    histories: dict[tuple[str, str], list[History]]  # by variant folder and algorithm; one history per seed
    digest: str = ""  # of the files that the histories were read from


def read_results(folder: Path) -> list[Result]:
    """Read all records, sorted by name."""
    return [read_result(path.parent) for path in sorted(folder.glob("*/facts.json"))]


def read_result(folder: Path) -> Result:
    """Read one record; its histories have an empty row for each round that was not kept."""
    facts = read_json(folder / "facts.json")
    histories: dict[tuple[str, str], list[History]] = {}
    digest = hashlib.sha256()
    for variant, known in facts["variants"].items():
        rows: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
        digest.update((folder / variant / "rounds.csv").read_bytes())
        with (folder / variant / "rounds.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                numbers = {key: float(row[key] or "nan") for key in row if key not in ("algorithm", "seed", "round")}
                number = int(row["round"])
                rows.setdefault((row["algorithm"], int(row["seed"])), {})[number] = {"round": number, **numbers}
        for name, method in known["methods"].items():
            runs = [rows.get((name, seed), {}) for seed in method["seeds"]]
            histories[variant, name] = [
                History([run.get(number, {"round": number}) for number in range(1, max(run, default=0) + 1)])
                for run in runs
            ]
    return Result(folder.name, facts, histories, digest.hexdigest())


def labelled(algorithm: str, variant: str) -> str:
    """Return the label of a method in a variant."""
    return called(algorithm if variant == reproduction.FOLDER_AS_GIVEN else f"{algorithm}@{variant}")
