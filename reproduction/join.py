"""Join records of one study that ran on several machines: ``python reproduction/join.py RECORD … --into INTO``.

Each RECORD is a folder that ``collect.py`` wrote, of the same preset with the same settings and with other methods.
INTO is written anew; to add methods to it, name it as a RECORD, too.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch import add_rows
from collect import claim_facts, distinct
from record import judged, read_result

from lamina.base.atomic import write_file
from lamina.experiment.config import Experiment, load
from lamina.experiment.runs.records import read_json
from lamina.experiment.trials import claims, reproduction
from lamina.storage.files import write_json

SUMS = ("seconds", "runs", "tuning_runs", "diverged_runs", "unfinished_runs")
LISTS = ("device", "torch", "lamina", "precision", "tuning_rounds")
NO_CLAIMS = "claims.json, for the methods ran on several machines; the pages' verdicts are computed from this record"


def main() -> None:
    """Join the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--into", type=Path, required=True, help="a folder with the preset's name")
    arguments = parser.parse_args()
    try:
        join(arguments.records, arguments.into, reproduction.find(arguments.into.name))
    except ValueError as error:
        sys.exit(f"error: {error}")


def join(records: Sequence[Path], into: Path, preset: Path) -> None:
    """Write one record of the methods of all `records`."""
    facts = [read_json(record / "facts.json") for record in records]
    for record, each in zip(records[1:], facts[1:], strict=True):
        if settings(record, each) != settings(records[0], facts[0]):
            raise ValueError(f"{record} and {records[0]} have other settings: only runs of one study can be joined")
    named = [(variant, method) for each in facts for variant in each["variants"] for method in methods(each, variant)]
    twice = sorted({method for variant, method in named if named.count((variant, method)) > 1})
    if twice:
        raise ValueError(f"several records have {', '.join(twice)}: their runs cannot be told apart")

    new = into.with_name(f"{into.name}.new")  # so that nothing half-written is left
    shutil.rmtree(new, ignore_errors=True)
    for variant in facts[0]["variants"]:
        folders = [record / variant for record in records]
        (new / variant).mkdir(parents=True)
        write_file(new / variant / "rounds.csv", joined_rounds(folders).encode())
        for folder in folders:
            add_rows(folder / "tuning.csv", new / variant / "tuning.csv")
        configs = [read_json(folder / "config.json") for folder in folders]
        configs[0]["compare"]["algorithms"] = [method for each in facts for method in methods(each, variant)]
        configs[0]["algorithms"] = {name: value for config in configs for name, value in config["algorithms"].items()}
        write_json(new / variant / "config.json", configs[0])
    together = joined_facts(facts, load(preset))
    write_json(new / "facts.json", together)
    findings = judged(read_result(new), preset)
    together["claims"] = [claim_facts(finding, small=together["scale"] == "small") for finding in findings]
    write_json(new / "facts.json", together)
    old = into.with_name(f"{into.name}.old")
    if into.exists():
        into.rename(old)
    new.rename(into)
    shutil.rmtree(old, ignore_errors=True)


def methods(facts: dict[str, Any], variant: str) -> dict[str, Any]:
    """Return the methods of a variant that have finished runs."""
    by_name: dict[str, Any] = facts["variants"][variant]["methods"]
    return by_name


def settings(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what two records must agree in."""
    shared: dict[str, Any] = {key: facts[key] for key in ("scale", "sets", "gpu", "rounds", "select")}
    for name in facts["variants"]:
        config = read_json(folder / name / "config.json")
        compare = {key: value for key, value in config["compare"].items() if key != "algorithms"}
        shared[name] = config["data"], config["model"], config["train"], compare
    return shared


def joined_facts(facts: Sequence[dict[str, Any]], experiment: Experiment) -> dict[str, Any]:
    """Return facts.json of all methods, without the claims."""
    together = {**facts[0], "complete": False}
    together |= {key: sum(each[key] for each in facts) for key in SUMS}
    together |= {key: distinct(value for each in facts for value in each[key]) for key in LISTS}
    together["seconds"] = round(together["seconds"], 1)
    together["variants"] = {
        variant: {
            "seconds": round(sum(each["variants"][variant]["seconds"] for each in facts), 1),
            "runs": sum(each["variants"][variant]["runs"] for each in facts),
            "methods": {name: method for each in facts for name, method in methods(each, variant).items()},
            "every": math.lcm(*(each["variants"][variant]["every"] for each in facts)),
        }
        for variant in facts[0]["variants"]
    }
    together["missing"] = still_missing(together, facts, experiment) or [NO_CLAIMS]
    return together


def still_missing(together: dict[str, Any], facts: Sequence[dict[str, Any]], experiment: Experiment) -> list[str]:
    """Return what no record has finished of what a preset's claims need, in the words of `collect.py`."""
    lines = [line for each in facts for line in each["missing"]]
    first = experiment.train.seed
    missing = []
    for label, names in claims.needed(experiment).items():
        variant = label or reproduction.FOLDER_AS_GIVEN
        if variant not in together["variants"]:
            missing.append(f"{variant} was not begun")
            continue
        for name in names:
            finished = methods(together, variant).get(name, {"seeds": []})["seeds"]
            for seed in range(first, first + experiment.compare.seeds):
                start = f"{variant}: {name}, seed {seed}: "
                begun = [line for line in lines if line.startswith(start) and not line.endswith("not begun")]
                if seed not in finished:
                    missing.append(begun[0] if begun else f"{start}not begun")
    return missing


def joined_rounds(folders: Sequence[Path]) -> str:
    """Return the rows of all tables of rounds; a column that one of them does not have stays empty there."""
    tables = [list(csv.DictReader(io.StringIO((folder / "rounds.csv").read_text()))) for folder in folders]
    text = io.StringIO(newline="")
    columns = dict.fromkeys(column for table in tables for row in table[:1] for column in row)
    writer = csv.DictWriter(text, [*columns], restval="", lineterminator="\n")
    writer.writeheader()
    for table in tables:
        writer.writerows(table)
    return text.getvalue()


if __name__ == "__main__":
    main()
