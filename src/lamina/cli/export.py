"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

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

    with collector_paused():
        parts = table_parts(find_folders(folders))
        if out_file is None:
            for part in parts:
                echo_text(part.decode())
            return
        write_output(out_file, parts, is_ours=lambda ends: ends.startswith(FIRST_COLUMNS), kind="exported table")


def table_parts(folders: Sequence[Path]) -> Iterator[bytes]:
    """Yield a CSV table in parts: a row for every round with its run, the settings that identify it, and the metrics.

    The files are read twice, first for the names of all metrics: they may be larger than the memory.
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
    metrics: dict[str, None] = {}
    for folder in folders:
        for rows in read_rows(folder / "metrics.jsonl"):
            metrics |= dict.fromkeys(itertools.chain.from_iterable(rows))
    yield csv_text([["run", *identity, *metrics]]).encode()
    for folder, values in zip(folders, all_settings, strict=True):
        run = csv_text([[short(folder), *(_cell(values.get(name)) for name in identity.values())]]).rstrip("\n")
        for rows in read_rows(folder / "metrics.jsonl"):
            yield _lines(run, rows, metrics).encode()


def _lines(run: str, rows: Iterable[dict[str, Any]], metrics: Iterable[str]) -> str:
    """Return CSV lines that begin with the cells of the run; missing and non-finite numbers are empty.

    Numbers are written as JSON, which is ten times faster than Python's own `csv`, and brackets then become lines.
    """
    from pydantic_core import to_json

    text = to_json([tuple(map(row.get, metrics)) for row in rows]).decode()[2:-2]
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
