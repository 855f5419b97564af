"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.base.text import csv_text
from lamina.cli.base import Runs, app, echo_text, import_torch

if TYPE_CHECKING:
    from lamina.experiment.runs.records import Record
    from lamina.training.history import History

IDENTITY = {
    "data": "data.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "learning_rate": "train.lr",
    "seed": "train.seed",
}
ROUNDS_AT_ONCE = 10_000
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

    parts = table(find_records(folders))
    if out_file is None:
        for part in parts:
            echo_text(part)
        return
    encoded = (part.encode() for part in parts)
    write_output(out_file, encoded, is_ours=lambda head: head.startswith(FIRST_COLUMNS), kind="exported table")


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield, many lines at a time, a CSV row for every round: its run, settings that identify it or differ, metrics."""
    from lamina.experiment.runs.records import NO_PART_OF_IDENTITY
    from lamina.experiment.runs.trackers import settings

    all_settings = [settings(record.config) for record in records]
    usual = {*IDENTITY.values(), *NO_PART_OF_IDENTITY}
    texts: dict[str, set[str]] = {}
    for name, value in (item for values in all_settings for item in values.items()):
        texts.setdefault(name, set()).add(json.dumps(value))
    identity = IDENTITY | {name: name for name in texts if len(texts[name]) > 1 and name not in usual}
    metrics = dict.fromkeys(name for record in records for name in record.history.columns)
    yield csv_text([["run", *identity, *metrics]])
    for record, values in zip(records, all_settings, strict=True):
        run = csv_text([[short(record.folder), *(_cell(values.get(name)) for name in identity.values())]]).rstrip("\n")
        for start in range(0, len(record.history), ROUNDS_AT_ONCE):
            yield _lines(run, record.history[start : start + ROUNDS_AT_ONCE], list(metrics))


def _lines(run: str, history: History, metrics: Sequence[str]) -> str:
    """Return CSV lines that begin with the cells of the run; missing and non-finite numbers are empty.

    Numbers are written as JSON, which is ten times faster than Python's own `csv`, and brackets then become lines.
    """
    from pydantic_core import to_json

    rows = list(zip(*map(history.cells, metrics), strict=True))
    text = to_json(rows, inf_nan_mode="null").decode()[2:-2]
    return f"{run}," + text.replace("null", "").replace("],[", f"\n{run},") + "\n"


def short(folder: Path) -> str:
    """Return a folder relative to the current one, if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) and folder != here else str(folder)


def _cell(value: Any) -> Any:
    """Return a cell: empty if there is no finite value, a list or table as JSON."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value
