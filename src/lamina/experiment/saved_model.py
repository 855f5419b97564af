"""A run's saved models: ``model.safetensors`` at the end, ``best.safetensors`` during training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lamina.engines.state import State
from lamina.history import History, Row, score
from lamina.objective import Buffers, Objective
from lamina.storage.checkpoint import UNREADABLE, pack, read_facts, unpack
from lamina.storage.files import write_file


class Trained(Protocol):
    """Anything with a model to save: a simulation, or the server of a federation."""

    state: State
    objective: Objective


class BestModel:
    """The model with the best score so far; kept in memory until `save`."""

    def __init__(self, path: Path, history: History) -> None:
        self.path = path
        self.score = max((value for value in map(score, history) if not math.isnan(value)), default=-math.inf)
        self._unsaved: tuple[int, Tensor, Buffers] | None = None

    def consider(self, row: Row, trained: Trained) -> None:
        """Keep the model of a finished round if it is the best so far."""
        if score(row) > self.score:
            self.score = score(row)
            self._unsaved = int(row["round"]), trained.state.server.x, trained.state.buffers

    def save(self, trained: Trained) -> None:
        """Write the best model, if it has changed."""
        if self._unsaved is not None:
            save_model(self.path, trained, *self._unsaved)
            self._unsaved = None


def save_model(path: Path, trained: Trained, number: int, x: Tensor, buffers: Buffers) -> None:
    """Write the model after a round, with these parameters and buffers."""
    weights = trained.objective.module_at(x, buffers).state_dict()
    write_file(path, pack(weights, round=str(number)))


def round_of(path: Path) -> tuple[int, str]:
    """Return the round of a saved model and what is wrong with its file; 0 if it is missing or damaged."""
    try:
        data = path.read_bytes()
        unpack(data)
        return int(read_facts(data)["round"]), ""
    except OSError:
        return 0, ""
    except UNREADABLE as error:
        return 0, str(error)
