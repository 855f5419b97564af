"""Join the records of a reproduction that ran on several machines: ``python reproduction/join.py RECORD … INTO``.

Each RECORD is a folder that ``collect.py`` wrote, of the same preset with the same settings. INTO gets the methods that
it does not have; it may be new. A RECORD whose methods INTO has is left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
from pathlib import Path
from typing import Any

from batch import add_rows
from collect import claim_facts, distinct
from record import judged, read_result

from lamina.base.atomic import write_file
from lamina.experiment.runs.records import read_json
from lamina.experiment.trials import reproduction
from lamina.storage.files import write_json

SUMS = ("seconds", "runs", "tuning_runs", "diverged_runs", "unfinished_runs")
NO_CLAIMS = "claims.json, for the methods ran on several machines; the pages' verdicts are computed from this record"
LISTS = ("device", "torch", "lamina", "precision", "tuning_rounds")


def main() -> None:
    """Join the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("into", type=Path, metavar="INTO", help="its name is the preset's")
    arguments = parser.parse_args()
    for record in arguments.records:
        try:
            join(record, arguments.into)
        except ValueError as error:
            parser.error(str(error))


def join(record: Path, into: Path) -> None:
    """Add a record's methods to another record."""
    if not (into / "facts.json").exists():
        shutil.copytree(record, into)
        return
    facts, more = read_json(into / "facts.json"), read_json(record / "facts.json")
    if settings(into, facts) != settings(record, more):
        raise ValueError(
            f"{record} and {into} have other settings or variants: only runs of the same study can be joined"
        )
    added = 0
    for name, variant in facts["variants"].items():
        other = more["variants"][name]
        new = {method: known for method, known in other["methods"].items() if method not in variant["methods"]}
        if not new:
            continue
        added += len(new)
        if len(new) < len(other["methods"]):
            raise ValueError(f"{record} has methods that {into} has, too: its runs cannot be counted apart")
        variant["methods"] |= new
        variant["seconds"], variant["runs"] = variant["seconds"] + other["seconds"], variant["runs"] + other["runs"]
        variant["every"] = max(variant["every"], other["every"])
        write_file(into / name / "rounds.csv", joined_rounds(into / name, record / name).encode())
        add_rows(record / name / "tuning.csv", into / name / "tuning.csv")
        config = read_json(into / name / "config.json")
        config["compare"]["algorithms"] = list(variant["methods"])
        config["algorithms"] |= read_json(record / name / "config.json")["algorithms"]
        write_json(into / name / "config.json", config)
    if not added:
        return
    facts["missing"] = [line for line in facts["missing"] if line in more["missing"]] or [NO_CLAIMS]
    facts |= {key: facts[key] + more[key] for key in SUMS}
    facts |= {key: distinct([*facts[key], *more[key]]) for key in LISTS}
    write_json(into / "facts.json", facts)
    findings = judged(read_result(into), reproduction.find(into.name))
    facts["claims"] = [claim_facts(finding, small=False) for finding in findings]
    write_json(into / "facts.json", facts)


def settings(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what two records must agree in."""
    found: dict[str, Any] = {key: facts[key] for key in ("scale", "sets", "gpu", "rounds", "select")}
    for name in facts["variants"]:
        config = read_json(folder / name / "config.json")
        compare = {key: value for key, value in config["compare"].items() if key != "algorithms"}
        found[name] = config["data"], config["model"], config["train"], compare
    return found


def joined_rounds(one: Path, other: Path) -> str:
    """Return the rows of two tables of rounds; a column that one of them does not have stays empty there."""
    tables = [list(csv.DictReader(io.StringIO((folder / "rounds.csv").read_text()))) for folder in (one, other)]
    text = io.StringIO(newline="")
    columns = dict.fromkeys(column for table in tables for row in table[:1] for column in row)
    writer = csv.DictWriter(text, [*columns], restval="", lineterminator="\n")
    writer.writeheader()
    for table in tables:
        writer.writerows(table)
    return text.getvalue()


if __name__ == "__main__":
    main()
