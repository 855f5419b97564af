"""``lamina predict``: the predictions of a trained model for new data, as CSV or Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.base.errors import BadInput, missing_extra
from lamina.base.text import csv_text, plural
from lamina.cli.base import app, echo, echo_text


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="a CSV or Parquet file, a .npz or .safetensors file, or pictures")
    ],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="the .csv or .parquet file; else CSV is printed")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="the model of the best round, not that of the last")] = False,
    client: Annotated[
        str | None, typer.Option("--client", help="the own model of this client: its name or number")
    ] = None,
) -> None:
    """Write the predictions of a trained model for new data: a row for every sample, with its probabilities."""
    from lamina.api.trained import load
    from lamina.data.preprocessing import PARQUET_SUFFIXES, is_parquet

    if out_file is not None and out_file.suffix.lower() not in ("", ".csv", *PARQUET_SUFFIXES):
        raise BadInput(f"--out {out_file}: predictions are written as .csv or .parquet, not as '{out_file.suffix}'")
    run = load(folder, best=best)
    run = run if client is None else run.client(client)
    new = run.read(data)
    predictions = run.predict(new.x)
    rows = list(predictions.rows())
    taken = [name for name in rows[0] if name in new.columns]
    if taken:
        raise BadInput(f"{data} has a column '{taken[0]}', as the predictions have: rename it")
    if out_file is not None and is_parquet(out_file):
        columns = new.columns | {name: [row[name] for row in rows] for name in rows[0]}
        _write(out_file, _parquet(columns, f"--out {out_file}"), len(rows))
        return
    cells = ([*given, *row.values()] for given, row in zip(zip(*new.columns.values(), strict=True), rows, strict=True))
    text = csv_text([[*new.columns, *rows[0]], *cells])
    if out_file is None:
        echo_text(text)
        return
    _write(out_file, text.encode(), len(rows))


def _write(path: Path, data: bytes, count: int) -> None:
    """Write a table of predictions, over an earlier one at most."""
    from lamina.experiment.runs.outputs import write_output

    def is_ours(ends: bytes) -> bool:
        head = ends if ends.startswith(b"PAR1") else ends.partition(b"\n")[0]  # Parquet has the columns at its end
        return b"prediction" in head

    write_output(path, data, is_ours=is_ours, kind="table of predictions")
    echo(f"{plural(count, 'prediction')} in {path}")


def _parquet(columns: dict[str, list[Any]], purpose: str) -> bytes:
    """Return a table as the content of a Parquet file; `purpose` needs pandas and pyarrow."""
    from lamina.training.history import data_frame

    try:
        content: bytes = data_frame(columns, purpose).to_parquet(index=False)
    except ImportError as error:
        raise missing_extra("pyarrow", "table", purpose) from error
    return content
