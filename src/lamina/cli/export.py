"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.base.text import csv_text
from lamina.cli.base import Runs, app, echo_text, import_torch

if TYPE_CHECKING:
    from lamina.experiment.runs.records import Record

IDENTITY = {
    "data": "data.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "learning_rate": "train.lr",
    "seed": "train.seed",
}
FIRST_COLUMNS = ",".join(["run", *IDENTITY]).encode()  # of every exported table


@app.command()
def export(
    folders: Runs,
    out_file: Annotated[Path | None, typer.Option("--out", help="the CSV file; else it is printed")] = None,
) -> None:
    """Write all rounds of all runs as one CSV table, with the settings in which the runs differ."""
    import_torch()
    from lamina.experiment.runs.outputs import write_output
    from lamina.experiment.runs.records import find_records

    text = table(find_records(folders))
    if out_file is None:
        echo_text(text)
        return
    write_output(out_file, text.encode(), is_ours=lambda head: head.startswith(FIRST_COLUMNS), kind="exported table")


def table(records: Sequence[Record]) -> str:
    """Return a CSV row for every round: its run, the settings that identify it or differ, and the metrics."""
    from lamina.experiment.runs.records import NO_PART_OF_IDENTITY
    from lamina.experiment.runs.trackers import settings

    all_settings = [settings(record.config) for record in records]
    usual = {*IDENTITY.values(), *NO_PART_OF_IDENTITY}
    texts: dict[str, set[str]] = {}
    for name, value in (item for values in all_settings for item in values.items()):
        texts.setdefault(name, set()).add(json.dumps(value))
    identity = IDENTITY | {name: name for name in texts if len(texts[name]) > 1 and name not in usual}
    metrics = dict.fromkeys(name for record in records for name in record.history.columns)
    rows: list[list[Any]] = [["run", *identity, *metrics]]
    for record, values in zip(records, all_settings, strict=True):
        run = [short(record.folder), *(_cell(values.get(name)) for name in identity.values())]
        rows += [[*run, *(_cell(row.get(name)) for name in metrics)] for row in record.history]
    return csv_text(rows)


def short(folder: Path) -> str:
    """Return a folder relative to the current one, if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) and folder != here else str(folder)


def _cell(value: Any) -> Any:
    """Return a cell: empty if there is no finite value, a list or table as JSON."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value
