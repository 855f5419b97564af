"""Keep the records of a simulation that Python created: the same folder as `lamina run` writes, and resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lamina.experiment.build import resolved
from lamina.experiment.folder import RunFolder
from lamina.experiment.log_lines import LogLines
from lamina.experiment.python import describe
from lamina.experiment.records import read_metrics
from lamina.experiment.run import open_folder, restore, resume, train
from lamina.history import Row
from lamina.training import Training


class Recorder:
    """Trains a simulation in a folder.

    Args:
        folder: of the run.
        overwrite: whether an earlier run in it may be replaced.
        arguments: the simulation's own, as `describe` takes them.
    """

    def __init__(self, folder: Path, *, overwrite: bool, **arguments: Any) -> None:
        self.folder, self._overwrite = folder, overwrite
        self._experiment = describe(**arguments)

    def run(self, simulation: Training, last: int, on_round: Callable[[Row], None]) -> None:
        """Train up to a round, from where the folder says the run was; raise `Diverged` if it diverged, even before."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and not self._overwrite:
            last = max(last, len(read_metrics(metrics).history))
        if last == 0:
            return
        rounds = self._experiment.train.model_copy(update={"rounds": last})
        experiment = self._experiment.model_copy(update={"train": rounds})
        with LogLines() as lines, kept_threads():
            config = resolved(experiment, simulation)
            folder = open_folder(self.folder, config, overwrite=self._overwrite, lines=lines)
            try:
                if isinstance(folder, RunFolder) and folder.complete:
                    restore([simulation], [folder])
                    simulation.history = folder.history
                    return
                if folder.diverged is None:
                    simulation.state, _ = simulation.start()  # a round that is not in the folder is trained again
                    resume([simulation], [folder])
                    self._overwrite = False  # the next call continues this run
                    train([simulation], [folder], experiment, on_round=lambda _, row: on_round(row))
            finally:
                folder.close()
        if folder.diverged is not None:
            raise folder.diverged


@contextlib.contextmanager
def kept_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which training chooses by the size of the model."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
