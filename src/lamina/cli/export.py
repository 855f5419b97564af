"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.cli.base import app, tell_text
from lamina.experiment.outputs import write_output
from lamina.experiment.records import NO_PART_OF_IDENTITY, Record, find_records
from lamina.experiment.trackers import settings
from lamina.text import csv_cell

IDENTITY = {
    "data": "data.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "learning_rate": "train.lr",
    "seed": "train.seed",
}
FIRST_COLUMNS = ",".join(["run", *IDENTITY]).encode()  # every exported table begins with them


@app.command()
def export(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="a run's folder, or a folder of such folders")],
    out_file: Annotated[Path | None, typer.Option("--out", help="the CSV file; else it is printed")] = None,
) -> None:
    """All rounds of all runs as one CSV table, with the columns that tell the runs apart."""
    text = table(find_records(folders))
    if out_file is None:
        tell_text(text)
        return
    write_output(out_file, text.encode(), is_ours=lambda head: head.startswith(FIRST_COLUMNS), kind="exported table")


def table(records: Sequence[Record]) -> str:
    """The table: which run, its identity, every other setting in which the runs differ, and the round's metrics."""
    all_settings = [settings(record.config) for record in records]
    values: dict[str, set[str]] = {}
    for one in all_settings:
        for name, value in one.items():
            values.setdefault(name, set()).add(json.dumps(value))
    usual = {*IDENTITY.values(), *NO_PART_OF_IDENTITY}
    identity = IDENTITY | {name: name for name, given in values.items() if len(given) > 1 and name not in usual}
    metrics = dict.fromkeys(name for record in records for name in record.history.columns)
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([csv_cell(name) for name in ("run", *identity, *metrics)])
    for record, one in zip(records, all_settings, strict=True):
        run = [csv_cell(short(record.folder)), *(_cell(one.get(name)) for name in identity.values())]
        writer.writerows([*run, *(_cell(row.get(name)) for name in metrics)] for row in record.history)
    return made.getvalue()


def short(folder: Path) -> str:
    """A folder as seen from the current one."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) and folder != here else str(folder)


def _cell(value: Any) -> Any:
    """Empty where there is no number; a list as JSON."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return json.dumps(value) if isinstance(value, list | dict | bool) else csv_cell(value)
