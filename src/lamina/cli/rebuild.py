"""``lamina rebuild``: make runs with damaged metrics resumable again."""

from __future__ import annotations

from lamina.cli.base import Runs, app, echo


@app.command()
def rebuild(folders: Runs) -> None:
    """Rebuild metrics.jsonl where it is damaged or lost: keep what is sound, mark the other rounds as lost.

    Then the run's own command resumes from the last checkpoint.
    """
    from lamina.base.errors import BadInput
    from lamina.experiment.runs.rebuild import rebuild as rebuild_run

    for folder in folders:
        runs = sorted(checkpoints.parent for checkpoints in folder.rglob("checkpoints") if checkpoints.is_dir())
        if not runs:
            raise BadInput(f"no run with checkpoints in '{folder}'")
        for run in runs:
            echo(rebuild_run(run))
