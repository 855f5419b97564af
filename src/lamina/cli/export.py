"""``lamina export``: the rounds of any number of runs as one CSV table."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.base.text import csv_text
from lamina.cli.base import Runs, app, echo_text

if TYPE_CHECKING:
    from lamina.base.columns import Columns

IDENTITY = {
    "data": "data.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "learning_rate": "train.lr",
    "seed": "train.seed",
}
SECTIONS = ("data", "model", "algorithm", "train", "run")  # of a run's configuration
ROWS_AT_A_TIME = 1 << 12
FIRST_COLUMNS = ",".join(["run", *IDENTITY]).encode()  # of every exported table


@app.command()
def export(
    folders: Runs,
    out_file: Annotated[Path | None, typer.Option("--out", help="the CSV file; else it is printed")] = None,
) -> None:
    """Write all rounds of all runs as one CSV table, with the settings in which the runs differ."""
    from lamina.experiment.runs.outputs import write_output
    from lamina.experiment.runs.records import find_folders

    parts = table_parts(find_folders(folders))
    if out_file is None:
        for part in parts:
            echo_text(part.decode())
        return
    write_output(out_file, parts, is_ours=lambda ends: ends.startswith(FIRST_COLUMNS), kind="exported table")


def table_parts(folders: Sequence[Path]) -> Iterator[bytes]:
    """Return a CSV table in parts: a row for every round, with its run, the settings that differ, and the metrics."""
    from lamina.experiment.runs.metrics_file import MetricsFile
    from lamina.experiment.runs.records import NO_PART_OF_IDENTITY, flatten, read_config

    configs = [read_config(folder) for folder in folders]
    all_settings = [flatten({name: config.get(name, {}) for name in SECTIONS}) for config in configs]
    usual = {*IDENTITY.values(), *NO_PART_OF_IDENTITY}
    texts: dict[str, set[str]] = {}
    for name, value in (item for values in all_settings for item in values.items()):
        texts.setdefault(name, set()).add(json.dumps(value))
    identity = IDENTITY | {name: name for name in texts if len(texts[name]) > 1 and name not in usual}
    histories = [MetricsFile(folder / "metrics.jsonl").read().rows for folder in folders]
    metrics = list(dict.fromkeys(name for history in histories for name in history.names))
    runs = [
        csv_text([[short(folder), *(_cell(values.get(name)) for name in identity.values())]]).rstrip("\n")
        for folder, values in zip(folders, all_settings, strict=True)
    ]
    head = csv_text([["run", *identity, *metrics]]).encode()
    lines = (_lines(run, history, metrics) for run, history in zip(runs, histories, strict=True))
    return itertools.chain([head], itertools.chain.from_iterable(lines))


def _lines(run: str, history: Columns, metrics: Sequence[str]) -> Iterator[bytes]:
    """Yield CSV lines that begin with the cells of the run; missing and non-finite numbers are empty.

    Numbers are written as JSON, which is ten times faster than Python's own `csv`, and brackets then become lines.
    """
    from pydantic_core import to_json

    for start in range(0, len(history), ROWS_AT_A_TIME):
        rows = history[start : start + ROWS_AT_A_TIME]
        cells = list(zip(*map(rows.cells, metrics), strict=True))
        text = to_json(cells, inf_nan_mode="null").decode()[2:-2]
        yield (f"{run}," + text.replace("null", "").replace("],[", f"\n{run},") + "\n").encode()


def short(folder: Path) -> str:
    """Return a folder relative to the current one, if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) and folder != here else str(folder)


def _cell(value: Any) -> Any:
    """Return a cell: empty if there is no finite value, a list or table as JSON."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value
