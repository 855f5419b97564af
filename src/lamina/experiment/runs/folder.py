"""The folder of a run: its records, and all that is needed to resume it after a kill.

- ``config.json``: the whole configuration, with every default and "auto" replaced by what was used
- ``environment.json``: versions, machine, time of the start
- ``partition.json``: how many samples of each class every client holds, for reports
- ``model.json``: how the model is built and what its samples look like, see model_file.py
- ``preprocessing.json``: how the features of a table were made, to prepare new tables for the model
- ``metrics.jsonl``: a line per finished round
- ``log.txt``: the lines of lamina's logger
- ``checkpoints/``: see lamina.storage.checkpoint
- ``best.safetensors``: the model with the best value of the first metric so far, on the test data
- ``model.safetensors``: the model at the end
- ``diverged.json``: how the training diverged, if it did
- ``lease``: of the process that writes to the folder, see lamina.storage.leases
- ``tensorboard/``: see tensorboard.py
- ``federation.jsonl``, ``starts``: which nodes took part in each round of a federation, and how often its server was
  started, see lamina.flower
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torch import Tensor

import lamina
from lamina.algorithms.contract import Algorithm
from lamina.base.atomic import PARTIAL, sync_folder, write_file
from lamina.base.errors import BadInput, Diverged, is_whole
from lamina.base.text import plural
from lamina.data.preprocessing import TablePreprocessing
from lamina.engines.state import State
from lamina.experiment.runs.environment import environment
from lamina.experiment.runs.log_lines import LogLines
from lamina.experiment.runs.metrics_file import MetricsFile
from lamina.experiment.runs.records import (
    CHOOSE_ANOTHER,
    FORMAT,
    REPLACED,
    accepted_changes,
    check_config,
    differences,
    has_all_rounds,
    names_in,
    read_diverged,
    read_environment,
    read_json,
    refuse_foreign,
    refuse_format,
    remove_records,
)
from lamina.experiment.runs.tensorboard import TensorBoard
from lamina.objective.objective import Buffers, Objective
from lamina.storage.checkpoint import UNREADABLE, Checkpoints, pack, read_facts, unpack
from lamina.storage.files import as_json, check_writable, write_json, writing_to
from lamina.storage.identity import code_changes
from lamina.storage.leases import Lease, is_at, lost, take
from lamina.training.history import History, Row, score_key
from lamina.training.metrics import read_primary

log = logging.getLogger(__name__)


class Trainer(Protocol):
    """Anything with a model to save: a simulation, or the server of a federation."""

    state: State
    algorithm: Algorithm
    objective: Objective
    history: History


class RunFolder:
    """The records of one run. Opening it takes a lease, unless one is given, and refuses a folder with anything else.

    Nothing is written or replaced before `begin`: a simulation begins when its first round has finished or diverged, a
    federation after its first attempt at one. Any other run may use a folder without a finished round.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        lines: LogLines | None = None,
        tensorboard: TensorBoard | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.path = path
        self.config = as_json({"lamina": lamina.__version__, "format": FORMAT, **config})
        accept = bool(self.config["run"].get("accept_changed_code"))
        self.checkpoints = Checkpoints(path / "checkpoints", accept_changed_code=accept)
        self._metric = read_primary(self.config)  # the first one, by which the best model is chosen
        self.history = History(metric=self._metric)  # the rounds found in the folder
        self.partition: Mapping[str, Any] | None = None  # the content of partition.json, if it is to be written
        self.model: Mapping[str, Any] | None = None  # the content of model.json
        self.preprocessing: TablePreprocessing | None = None  # the content of preprocessing.json
        self.complete = False
        self.diverged: Diverged | None = None
        self._file = MetricsFile(path / "metrics.jsonl")  # as found in the folder
        self._damage = ""  # what is wrong with the metrics
        self._code_changes = ""  # since the run began or was resumed
        self._model_round = 0  # the round of the saved model
        self._lines, self._tensorboard = lines, tensorboard
        self._metrics: BinaryIO | None = None
        self._best = BestModel(path / "best.safetensors", self.history, self._metric)
        refuse_foreign(path)
        check_writable(path)
        self._lease = lease or take(path)
        try:
            if not overwrite:
                self._recognise()
            if self.ended and len(self.history) and self._tensorboard is not None:
                self._tensorboard.write(self.history)  # requested only now, or killed before the last round was written
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Return whether the run is complete or has diverged."""
        return self.complete or self.diverged is not None

    def _recognise(self) -> None:
        """Find out whether the folder holds this run and how far it got; refuse another run."""
        if not names_in(self.path) or (self.path / REPLACED).exists():  # the latter is left by a killed --overwrite
            return
        stored = read_json(self.path / "config.json")
        refuse_format(self.path, stored, CHOOSE_ANOTHER)
        check_config(self.path, stored)
        metrics = self._file.path
        if metrics.exists():
            self._file.read()
        count, damaged = len(self._file.rows), self._file.damaged
        model = self.path / "model.safetensors"
        # Metrics may be lost or damaged: the trained model and the checkpoints count without them.
        self._model_round, model_damage = round_of(model)
        finished = max(count, *self.checkpoints.rounds(), self._model_round)
        how = read_diverged(self.path) if metrics.exists() else None
        differing, changes = differences(stored, self.config, finished), code_changes(stored, self.config)
        has_records = finished or damaged is not None or model.exists()
        if not has_records and (differing or changes or how is None):  # any run may use the folder
            return
        if differing:
            raise BadInput(f"the folder '{self.path}' holds another run: {differing}; {CHOOSE_ANOTHER}")
        self._code_changes = accepted_changes(stored, self.config, self.path)
        self.history = History(self._file.rows, self._metric)
        if model_damage:
            self._say(f"'{model}' is damaged ({model_damage}): it is written again", logging.WARNING)
        _, best_damage = round_of(self._best.path)
        if best_damage:
            what = f"'{self._best.path}' is damaged ({best_damage}): the best model so far is lost"
            self._say(what, logging.WARNING)
        if damaged is not None or finished > count:
            self._damage = f"{metrics} is missing or damaged after round {count}"
        if how is not None:
            number = how.get("round", count + 1)
            self.diverged = Diverged(how["message"], round=number, client=how.get("client"), layer=how.get("layer", ""))
        self.complete = count == self._model_round and has_all_rounds(self.history, self.config)
        self._refuse_without_checkpoint(stored, finished)

    def _refuse_without_checkpoint(self, stored: Mapping[str, Any], finished: int) -> None:
        """Refuse to start again at round 1, which would replace the records, because nothing can be resumed."""
        if self.ended or self.rounds():
            return
        if self.checkpoints.rounds():
            raise BadInput(
                f"{self._damage}, and all checkpoints are of later rounds: restore it from a copy, or start again "
                "with --overwrite (overwrite=True)"
            )
        settings = stored.get("run", {})
        every = settings.get("checkpoint_every", 1) if isinstance(settings, Mapping) else 1
        # A run that was killed before its first checkpoint has never had one.
        if self._model_round or not is_whole(every) or finished > every:
            raise self._no_checkpoint(finished)

    def _no_checkpoint(self, finished: int) -> BadInput:
        return BadInput(
            f"the folder '{self.path}' has {plural(finished, 'finished round')} but no sound checkpoint to resume "
            f"from: restore '{self.path / 'checkpoints'}', or start again with --overwrite (overwrite=True) or without "
            "the folder"
        )

    def rounds(self) -> list[int]:
        """Return the rounds that the run could resume after."""
        return [number for number in self.checkpoints.rounds() if number <= len(self.history)]

    def resume_after(self, number: int) -> History:
        """Cut the metrics back to a round, for the run to resume after it, and return them."""
        if not len(self.history) and not self._damage:
            return self.history
        self.refuse_lost()
        if number == 0 and self.checkpoints.rounds():
            raise self._no_checkpoint(len(self.history))
        again = len(self.history) if number == 0 else 0
        self.history = self.history[:number]
        self._best = BestModel(self._best.path, self.history, self._metric)
        with writing_to(self.path):
            self._remove_partial_files()
            if self._model_round > number:  # it is of a round that is run again
                (self.path / "model.safetensors").unlink(missing_ok=True)
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            self._metrics.truncate(self._file.end_of(number))
            os.fsync(self._metrics.fileno())
            if read_json(self.path / "config.json") != self.config:
                write_json(self.path / "config.json", self.config)  # more rounds, say
            began, now = read_environment(self.path), environment(self.config["run"]["device"])
            if not began or self._code_changes:
                changes = {f"code changed after round {number}": self._code_changes} if self._code_changes else {}
                write_json(self.path / "environment.json", {**(began or now), **changes})
        if self._lines is not None:
            self._lines.follow(self.path)
        if self._damage:
            self._say(f"{self._damage}: resuming after round {number}; later rounds are run again", logging.WARNING)
        elif again:
            what = "1 finished round is" if again == 1 else f"{again} finished rounds are"
            self._say(f"{self.path}: there is no checkpoint yet: {what} run again", logging.WARNING)
        self._say(f"{self.path}: resuming after round {number} of {self.config['train']['rounds']}")
        if self._code_changes:
            self._say(f"{self.path}: {self._code_changes}; accepted (run.accept_changed_code)", logging.WARNING)
        if not began:
            what = f"{self.path / 'environment.json'} was missing or damaged; rewritten with the current environment"
            self._say(what, logging.WARNING)
        for name in ("lamina", "torch", "numpy", "device_name") if began else ():
            if began.get(name) != now[name]:
                what = f"this run began with {name} {began.get(name)}, now {now[name]}: rounding may differ"
                self._say(what, logging.WARNING)
        return self.history

    def begin(self) -> None:
        """Remove the records of an earlier run and write the configuration and the environment."""
        if self._metrics is not None:
            return
        self.refuse_lost()
        with writing_to(self.path):
            self._remove_partial_files()
            remove_records(self.path)
            write_json(self.path / "config.json", self.config)
            write_json(self.path / "environment.json", environment(self.config["run"]["device"]))
            if self.partition is not None:
                write_json(self.path / "partition.json", self.partition)
            if self.model is not None:
                write_json(self.path / "model.json", self.model)
            if self.preprocessing is not None:
                write_file(self.path / "preprocessing.json", self.preprocessing.to_json().encode())
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            (self.path / REPLACED).unlink()
            sync_folder(self.path)
        if self._lines is not None:
            self._lines.follow(self.path)
        self._say(f"{self.path}: {summary(self.config)}")

    def stopped(self, number: int) -> None:
        """Log that the run was stopped on request."""
        self._say(f"{self.path}: stopped after round {number}")

    def _say(self, line: str, level: int = logging.INFO) -> None:
        """Log something about this run."""
        log.log(level, "%s", line, extra={"about": self.path})

    def _remove_partial_files(self) -> None:
        """Remove what a kill left half-written."""
        for path in self.path.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def refuse_lost(self) -> None:
        """Raise an error if this run's records were removed or replaced."""
        self._lease.refuse_lost()
        if self._metrics is not None and not (
            is_at(self._metrics, self.path / "metrics.jsonl") and (self.path / "config.json").exists()
        ):
            raise lost(self.path)

    def record(self, row: Row, simulation: Trainer) -> None:
        """Append a finished round."""
        self.begin()
        self.refuse_lost()
        assert self._metrics is not None
        # valid JSON has no NaN and no infinity
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with self._writing():
            self._metrics.write((json.dumps(numbers, allow_nan=False) + "\n").encode())
            self._metrics.flush()
        self._best.consider(row, simulation)
        if self._tensorboard is not None:
            self._tensorboard.write(simulation.history)

    def checkpoint(self, simulation: Trainer, facts: Iterable[Any] = ()) -> None:
        """Save the state after the last recorded round and facts about it, with the best model so far if it is new."""
        assert self._metrics is not None
        self.refuse_lost()
        with self._writing():
            os.fsync(self._metrics.fileno())
            self._best.save(simulation)
            self.checkpoints.save(simulation.state, facts)

    def finish(self, simulation: Trainer) -> None:
        """Write the trained model: the run is complete."""
        self.refuse_lost()
        state = simulation.state
        with self._writing():
            if (
                self.model is not None and not (self.path / "model.json").exists()
            ):  # a run that an earlier version began
                write_json(self.path / "model.json", self.model)
            x = simulation.algorithm.trained_model(state.server)
            save_model(self.path / "model.safetensors", simulation, state.round, x, state.buffers)
        self._say(f"{self.path}: complete after round {state.round}")

    def diverge(self, error: Diverged) -> None:
        """Record how the training diverged: the run has ended."""
        self.diverged = error
        replaced = self.path / "metrics.jsonl"
        if self._metrics is None and replaced.exists() and replaced.stat().st_size:
            return  # keep the earlier run that this one was to replace
        self.begin()
        self.refuse_lost()
        how = {"message": str(error), "round": error.round, "client": error.client, "layer": error.layer}
        with self._writing():
            write_json(self.path / "diverged.json", how)
        self._say(f"{self.path}: diverged: {error}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Add to an error, as of a full disk, how much of the run is kept."""
        try:
            with writing_to(self.path):
                yield
        except BadInput as error:
            rounds = self.checkpoints.rounds()
            kept = f"; rounds 1 to {rounds[-1]} are kept; run the same command again to resume" if rounds else ""
            raise BadInput(f"{error}{kept}") from error

    def close(self) -> None:
        """Release the folder, which is removed if it is new and nothing was written."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # a full disk, which the failed round has reported
                self._metrics.close()
        self._lease.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def summary(config: Mapping[str, Any]) -> str:
    """Return a run in one line."""
    data, train, run = config["data"], config["train"], config["run"]
    return (
        f"{config['algorithm']['name']} on {data['name']}, {plural(data['clients'], 'client')}, "
        f"{config['model']['name']}, lr {train['lr']:g}, seed {train['seed']}, {plural(train['rounds'], 'round')}, "
        f"{run['engine']} on {run['device']}"
    )


class BestModel:
    """The model with the best score so far; kept in memory until `save`."""

    def __init__(self, path: Path, history: History, metric: str | None) -> None:
        self.path = path
        self._metric = metric  # None: the accuracy, or the loss
        self.score = max(map(self._rank, history), default=-math.inf)
        self._unsaved: tuple[int, Tensor, Buffers] | None = None

    def consider(self, row: Row, trained: Trainer) -> None:
        """Keep the model of a finished round if it is the best so far."""
        value = self._rank(row)
        if value > self.score:
            self.score = value
            x = trained.algorithm.trained_model(trained.state.server)
            self._unsaved = int(row["round"]), x, trained.state.buffers

    def _rank(self, row: Row) -> float:
        """Return how good an evaluated model is; larger is better, and one that was not evaluated is the worst."""
        metric = History([row], self._metric).metric
        return score_key(row.get(metric, math.nan), metric)

    def save(self, trained: Trainer) -> None:
        """Write the best model, if it has changed."""
        if self._unsaved is not None:
            save_model(self.path, trained, *self._unsaved)
            self._unsaved = None


def save_model(path: Path, trained: Trainer, number: int, x: Tensor, buffers: Buffers) -> None:
    """Write the model after a round, with these parameters and buffers."""
    weights = trained.objective.module_at(trained.objective.whole(x, trained.state.private_start), buffers).state_dict()
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
