"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from lamina.base.text import csv_text
from lamina.cli.base import Runs, app, echo_text, import_torch

IDENTITY = {
    "data": "data.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "learning_rate": "train.lr",
    "seed": "train.seed",
}
COPIED_BYTES = 1 << 20  # at a time
FIRST_COLUMNS = ",".join(["run", *IDENTITY]).encode()  # of every exported table


@app.command()
def export(
    folders: Runs,
    out_file: Annotated[Path | None, typer.Option("--out", help="the CSV file; else it is printed")] = None,
) -> None:
    """Write all rounds of all runs as one CSV table, with the settings in which the runs differ."""
    import_torch()
    from lamina.experiment.runs.metrics_file import collector_paused
    from lamina.experiment.runs.outputs import write_output
    from lamina.experiment.runs.records import find_folders
    from lamina.storage.files import writing_to

    with tempfile.TemporaryFile() as file:
        with writing_to(Path(tempfile.gettempdir())), collector_paused():
            head = write_table(find_folders(folders), file)
        parts = itertools.chain([head], iter(lambda: b"".join(file.readlines(COPIED_BYTES)), b""))
        if out_file is None:
            for part in parts:
                echo_text(part.decode())
            return
        write_output(out_file, parts, is_ours=lambda ends: ends.startswith(FIRST_COLUMNS), kind="exported table")


def write_table(folders: Sequence[Path], file: BinaryIO) -> bytes:
    """Write a CSV row for every round to a file: its run, the settings that identify it or differ, and the metrics.

    Return the heading. The file is then at its first row.
    """
    from lamina.experiment.runs.metrics_file import read_rows
    from lamina.experiment.runs.records import NO_PART_OF_IDENTITY, read_config
    from lamina.experiment.runs.trackers import settings

    all_settings = [settings(read_config(folder)) for folder in folders]
    usual = {*IDENTITY.values(), *NO_PART_OF_IDENTITY}
    texts: dict[str, set[str]] = {}
    for name, value in (item for values in all_settings for item in values.items()):
        texts.setdefault(name, set()).add(json.dumps(value))
    identity = IDENTITY | {name: name for name in texts if len(texts[name]) > 1 and name not in usual}
    metrics: list[str] = []
    known = -1
    while known < len(metrics):  # start again if there was a new name below rows that have no cell for it
        known = len(metrics)
        file.seek(0)
        file.truncate()
        for folder, values in zip(folders, all_settings, strict=True):
            cells = [short(folder), *(_cell(values.get(name)) for name in identity.values())]
            for rows in read_rows(folder / "metrics.jsonl"):
                metrics += _new_names(rows, set(metrics))
                known = len(metrics) if file.tell() == 0 else known
                file.write(_lines(csv_text([cells]).rstrip("\n"), rows, metrics).encode())
    file.seek(0)
    return csv_text([["run", *identity, *metrics]]).encode()


def _new_names(rows: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Return the names of metrics that are not known yet, in their order."""
    odd = (row for row in rows if not row.keys() <= known)
    return list(dict.fromkeys(name for row in odd for name in row if name not in known))


def _lines(run: str, rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> str:
    """Return CSV lines that begin with the cells of the run; missing and non-finite numbers are empty.

    Numbers are written as JSON, which is ten times faster than Python's own `csv`, and brackets then become lines.
    """
    from pydantic_core import to_json

    cells: list[tuple[Any, ...]] = []
    if len(metrics) > 1:
        with contextlib.suppress(KeyError):  # all rows have all metrics, as is usual: faster
            cells = list(map(operator.itemgetter(*metrics), rows))
    cells = cells or [tuple(map(row.get, metrics)) for row in rows]
    text = to_json(cells).decode()[2:-2]
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
