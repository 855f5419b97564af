"""Rebuild the history of a run whose ``metrics.jsonl`` is damaged or lost, so that it can resume from its checkpoints.

A checkpoint holds the state after its round, not the rounds before. So all undamaged lines are kept, and every other
round up to the newest checkpoint gets a line with its number and ``"lost": 1`` in place of its metrics.
"""

from __future__ import annotations

import json
from pathlib import Path

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.experiment.runs.folder import round_of
from lamina.experiment.runs.metrics_file import MetricsFile, sound_lines
from lamina.experiment.runs.records import REPLACED, read_config
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.files import writing_to
from lamina.storage.locks import Lock
from lamina.training.history import LOST


def rebuild(folder: str | Path) -> str:
    """Rebuild the history of the run in a folder, if that is needed; return what was done, in a line."""
    folder = Path(folder)
    read_config(folder)  # refuses a folder that holds no run
    lock = Lock(folder)
    try:
        return _rebuild(folder)
    finally:
        lock.release()


def _rebuild(folder: Path) -> str:
    metrics, checkpoints = folder / "metrics.jsonl", Checkpoints(folder / "checkpoints")
    newest = max([*checkpoints.rounds(), round_of(folder / "model.safetensors")[0]])
    if metrics.exists():
        file = MetricsFile(metrics).read()
        if file.damaged is None and len(file.rows) >= newest:
            return f"{folder}: the history is sound, with {plural(len(file.rows), 'round')}"
    if not newest or (folder / REPLACED).exists():
        raise BadInput(
            f"'{folder}' has no checkpoint to rebuild the history from: restore '{metrics}' or "
            f"'{checkpoints.folder}', or start again with --overwrite (overwrite=True)"
        )
    lines = sound_lines(metrics)
    last = newest
    while last + 1 in lines:  # of a run that was killed between two checkpoints
        last += 1
    lost = [number for number in range(1, last + 1) if number not in lines]
    for number in lost:
        lines[number] = json.dumps({"round": number, LOST: 1}).encode() + b"\n"
    with writing_to(folder):
        write_file(metrics, b"".join(lines[number] for number in range(1, last + 1)))
    return f"{folder}: history rebuilt; the metrics of {len(lost)} of {plural(last, 'round')} are lost"
