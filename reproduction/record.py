"""Read the records that reproduction/collect.py has written."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collect import called

from lamina.experiment.config import load
from lamina.experiment.runs.records import Record, read_json
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.trial import Trial
from lamina.report.curves import algorithm_of
from lamina.training.history import History


@dataclass(frozen=True)
class Result:
    """The record of one reproduction."""

    name: str
    facts: dict[str, Any]
    histories: dict[tuple[str, str], list[History]]  # by variant folder and algorithm; one history per seed
    digest: str = ""  # of the files that the histories were read from
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the comparisons, by variant folder
    held_out: dict[tuple[str, str], float] = field(default_factory=dict)  # accuracy of the chosen tuning run; as above
    lists_tuning: bool = True  # whether there are tables of the tuning runs


def read_results(folder: Path) -> list[Result]:
    """Read all records, sorted by name."""
    return [read_result(path.parent) for path in sorted(folder.glob("*/facts.json"))]


def read_result(folder: Path) -> Result:
    """Read one record; a row of its histories has the values that were kept of that round."""
    facts = read_json(folder / "facts.json")
    histories: dict[tuple[str, str], list[History]] = {}
    digest = hashlib.sha256()
    for variant, known in facts["variants"].items():
        rows: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
        digest.update((folder / variant / "rounds.csv").read_bytes())
        with (folder / variant / "rounds.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                texts = {key: text for key, text in row.items() if text and key not in ("algorithm", "seed", "round")}
                numbers = {key: float(text) for key, text in texts.items()}
                number = int(row["round"])
                rows.setdefault((row["algorithm"], int(row["seed"])), {})[number] = {"round": number, **numbers}
        for name, method in known["methods"].items():
            runs = [rows.get((name, seed), {}) for seed in method["seeds"]]
            histories[variant, name] = [
                History([run.get(number, {"round": number}) for number in range(1, max(run, default=0) + 1)])
                for run in runs
            ]
    configs = {variant: read_json(folder / variant / "config.json") for variant in facts["variants"]}
    held_out = {
        (variant, row["algorithm"]): float(row["final_validation_accuracy"])
        for variant in facts["variants"]
        for row in tuning_runs(folder / variant / "tuning.csv")
        if row["chosen"] == "True" and row.get("final_validation_accuracy")
    }
    lists_tuning = any((folder / variant / "tuning.csv").exists() for variant in facts["variants"])
    return Result(folder.name, facts, histories, digest.hexdigest(), configs, held_out, lists_tuning)


def tuning_runs(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of tuning runs; none if there is no such table."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def judged(result: Result, preset: Path) -> list[claims.Finding]:
    """Check the claims that a preset has now against a record; a method counts only if all its seeds have finished."""
    experiment = load(preset)
    entries = {}
    for (variant, name), histories in result.histories.items():
        config, method = result.configs[variant], result.facts["variants"][variant]["methods"][name]
        if len(histories) == config["compare"]["seeds"]:
            label = name if variant == reproduction.FOLDER_AS_GIVEN else f"{name}@{variant}"
            entries[label] = trial(name, config, method, histories)
    return [claims.evaluate(claim, entries) for claim in experiment.claim]


def trial(name: str, config: dict[str, Any], method: dict[str, Any], histories: list[History]) -> Trial:
    """Return a method of a comparison with its final runs, as they were before they were collected."""
    diverged = dict(line.removeprefix("seed ").split(": ", 1) for line in method["diverged"])
    records = []
    for seed, history in zip(method["seeds"], histories, strict=True):
        train = {**config["train"], "seed": seed, "lr": method["settings"]["lr"]}
        settings = {**config, "algorithm": {"name": algorithm_of(config["compare"], name)}, "train": train}
        records.append(Record(Path(), settings, history, {}, diverged.get(str(seed))))
    return Trial(name, method["settings"], records, len(records))


def labelled(algorithm: str, variant: str) -> str:
    """Return the label of a method in a variant."""
    return called(algorithm if variant == reproduction.FOLDER_AS_GIVEN else f"{algorithm}@{variant}")
