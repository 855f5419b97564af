"""``lamina compare``: several algorithms on the same clients and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.cli import base
from lamina.cli.base import Interrupted, MLflow, Overwrite, Quiet, Set, TensorBoard
from lamina.cli.run import wanted_trackers


@base.app.command()
@base.resumable
def compare(
    file: base.File,
    overrides: Set = None,
    names: Annotated[str | None, typer.Option("--algorithms", help="comma-separated names")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per algorithm", min=1)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, picture and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    mlflow: MLflow = False,
) -> None:
    """Compare algorithms on the same clients and batches; prints the table and saves the picture.

    Started again, it skips the runs that are complete and resumes the others.
    """
    from lamina.cli.comparison import run_comparison
    from lamina.experiment.config import load
    from lamina.experiment.trials import refuse_all_diverged

    chosen = list(overrides or [])
    if names is not None:
        chosen.append(f"compare.algorithms={[name.strip() for name in names.split(',') if name.strip()]}")
    if seeds is not None:
        chosen.append(f"compare.seeds={seeds}")
    experiment = load(file, chosen)
    path = out_folder or Path("runs") / f"{file.stem}-compare"
    trackers = wanted_trackers(tensorboard, mlflow)
    comparison, finished = run_comparison(experiment, path, base.Stop(), overwrite, trackers)
    if not finished:
        shown = "; table, picture and CSV are of the finished runs" if comparison.entries else ""
        raise Interrupted(f"stopped after a round{shown}; {base.how_to_resume(overwrite)}")
    refuse_all_diverged(comparison.entries)
