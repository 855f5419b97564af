"""``lamina predict``: the predictions of a trained model for new data, as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.base.errors import BadInput
from lamina.base.text import csv_text, plural
from lamina.cli.base import app, echo, echo_text


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="a CSV or Parquet file, a .npz or .safetensors file, or pictures")
    ],
    out_file: Annotated[Path | None, typer.Option("--out", help="the CSV file; else it is printed")] = None,
    best: Annotated[bool, typer.Option("--best", help="the model of the best round, not that of the last")] = False,
) -> None:
    """Write the predictions of a trained model for new data: a row for every sample, with its probabilities."""
    from lamina.api.trained import load
    from lamina.experiment.runs.outputs import write_output

    run = load(folder, best=best)
    new = run.read(data)
    predictions = run.predict(new.x)
    rows = list(predictions.rows())
    taken = [name for name in rows[0] if name in new.columns]
    if taken:
        raise BadInput(f"{data} has a column '{taken[0]}', as the predictions have: rename it")
    cells = ([*given, *row.values()] for given, row in zip(zip(*new.columns.values(), strict=True), rows, strict=True))
    text = csv_text([[*new.columns, *rows[0]], *cells])
    if out_file is None:
        echo_text(text)
        return
    write_output(
        out_file,
        text.encode(),
        is_ours=lambda ends: b"prediction" in ends.partition(b"\n")[0],
        kind="table of predictions",
    )
    echo(f"{plural(len(rows), 'prediction')} in {out_file}")
