"""TensorBoard: a run's rounds as event files, beside the metrics in its folder."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamina.base.errors import missing_extra
from lamina.training.history import History

EVENTS = "tensorboard"
log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in the run's folder: ``tensorboard --logdir runs`` shows all runs.

    They hold every round once, however often the run was killed, including those before --tensorboard was given.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "tensorboard", "--tensorboard") from error
        self._open: Callable[..., Any] = SummaryWriter
        self._events = folder / EVENTS
        self._writer: Any = None
        self._written = 0
        self._failed = False

    def write(self, history: History) -> None:
        """Write the new rounds; if that fails, warn, and write no more: the run's folder holds them already."""
        if self._failed:
            return
        try:
            self._write(history)
        except Exception as error:  # a full disk, or an exception of TensorBoard's own
            self._failed = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning("tensorboard gets no more rounds; the run continues: %s", reason)

    def _write(self, history: History) -> None:
        """Write the new rounds, at first all: event files cannot be cut back to where a killed run resumes."""
        if self._writer is None:
            if self._events.exists():
                shutil.rmtree(self._events)
            # purge_step: a TensorBoard that is open now forgets the old files' rounds
            self._writer = self._open(str(self._events), purge_step=1)
        for row in history[self._written :]:
            for name, value in row.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, float(value), int(row["round"]))
        self._written = len(history)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None and not self._failed:
            self._writer.close()
