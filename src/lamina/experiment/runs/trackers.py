"""Trackers: a run's rounds for TensorBoard and MLflow, beside the metrics in its folder.

A tracker copies the metrics. It holds every round once, however often the run was killed, including those before it was
switched on.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina.base.errors import missing_extra
from lamina.experiment.runs.records import Record, flatten, read_json, read_record
from lamina.storage.files import write_json
from lamina.training.history import History, Row

EVENTS, MLFLOW_RUN = "tensorboard", "mlflow.json"
SECTIONS = ("data", "model", "algorithm", "train", "run")  # of a run's configuration
log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in the run's folder: ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, folder: Path, name: str) -> None:  # the folder tells them apart here
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "tensorboard", "--tensorboard") from error
        self._open: Callable[..., Any] = SummaryWriter
        self._events = folder / EVENTS
        self._writer: Any = None
        self._written = 0

    def write(self, history: History) -> None:
        """Write the new rounds, at first all: event files cannot be cut back to where a killed run resumes."""
        if self._writer is None:
            if self._events.exists():
                shutil.rmtree(self._events)
            # purge_step: a TensorBoard that is open now forgets the old files' rounds
            self._writer = self._open(str(self._events), purge_step=1)
        for row in history[self._written :]:
            for name, value in _numbers(row).items():
                self._writer.add_scalar(name, value, int(row["round"]))
        self._written = len(history)
        self._writer.flush()

    def close(self, record: Record) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run in MLflow's own store: MLFLOW_TRACKING_URI, else the local one of the current folder, as `mlflow ui` does.

    Its number is kept in the run's folder. MLflow cannot forget a round, so what it has is not written again.
    """

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise missing_extra("mlflow", "mlflow", "--mlflow") from error
        self._mlflow, self._folder, self._name = mlflow, folder, name
        self._client: Any = None
        self._run = ""
        self._written = 0

    def write(self, history: History) -> None:
        """Write the rounds after the last one MLflow has."""
        if self._client is None:
            self._begin()
        for row in history[self._written :]:
            now, step = int(time.time() * 1000), int(row["round"])
            metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in _numbers(row).items()]
            self._client.log_batch(self._run, metrics=metrics)
            self._written = step

    def _begin(self) -> None:
        self._client = self._mlflow.MlflowClient()
        note = self._folder / MLFLOW_RUN
        if note.exists():
            self._run = str(read_json(note)["run"])
            run = self._client.get_run(self._run)
            self._written = int(run.data.metrics.get("round", 0))
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lamina")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=self._name).info.run_id
        for name, value in settings(read_json(self._folder / "config.json")).items():
            self._client.log_param(self._run, name, value)
        write_json(note, {"run": self._run})

    def close(self, record: Record) -> None:
        """Record how the run ended."""
        status = "FAILED" if record.diverged else "FINISHED" if record.complete else "KILLED"
        self._client.set_terminated(self._run, status)


# Built before the training, so that a missing package is named at once.
TRACKERS: dict[str, type[TensorBoard | MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Trackers:
    """The trackers of a run. One that fails is dropped with a warning, and the run continues."""

    def __init__(self, names: Iterable[str], folder: Path, run: str = "") -> None:
        self._folder = folder
        self._trackers = {name: TRACKERS[name](folder, run or folder.name) for name in names}
        self._used = False

    def write(self, history: History) -> None:
        """Write the new rounds to all trackers; the run's folder holds them already."""
        self._used = True
        self._each(lambda tracker: tracker.write(history))

    def close(self) -> None:
        """Tell the trackers that were used how the run ended."""
        if self._used and self._trackers:
            record = read_record(self._folder)
            self._each(lambda tracker: tracker.close(record))

    def _each(self, act: Callable[[TensorBoard | MLflow], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # a full disk, a locked store: each package has exceptions of its own
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("%s gets no more rounds; the run continues: %s", name, reason)
                del self._trackers[name]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration as dotted keys.

    >>> settings({"format": 1, "data": {"name": "digits", "partition": {"name": "iid"}}})
    {'data.name': 'digits', 'data.partition.name': 'iid'}
    """
    return flatten({section: config[section] for section in SECTIONS if section in config})


def _numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row."""
    return {name: float(value) for name, value in row.items() if math.isfinite(value)}
