"""The folder of a run: all that is known about it, and enough to continue it after it was killed.

- ``config.json``: the whole configuration, with every default and "auto" replaced by what was used
- ``environment.json``: versions, machine, time of the start
- ``metrics.jsonl``: a line per finished round
- ``log.txt``: what lamina's logger said
- ``checkpoints/``: see checkpoint.py
- ``best.safetensors``: the model with the best test accuracy so far (smallest loss where there is no accuracy)
- ``model.safetensors``: the model at the end
- ``diverged.json``: how the training diverged, if it did
- ``lock``: held by the process that writes here
- ``tensorboard/``, ``mlflow.json``: see trackers.py
- ``federation.jsonl``: who took part in a round of a real federation, see lamina.flower
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import math
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Protocol, TextIO

import numpy as np
import torch
from torch import Tensor

import lamina
from lamina.engines.state import State
from lamina.errors import BadInput, Diverged, is_whole
from lamina.experiment.records import (
    FORMAT,
    Metrics,
    check_config,
    read_diverged,
    read_environment,
    read_json,
    read_metrics,
    refuse_format,
)
from lamina.history import History, Row, score
from lamina.objective import Buffers, Objective
from lamina.simulation import Simulation
from lamina.storage.checkpoint import UNREADABLE, Checkpoints, pack, read_facts, unpack
from lamina.storage.files import PARTIAL, as_json, cannot_write, check_writable, sync_folder, write_file, write_json
from lamina.text import plural, printable

FILES = {
    "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "best.safetensors",
    "model.safetensors", "diverged.json", "lock", "tensorboard", "mlflow.json", "federation.jsonl",
}  # fmt: skip
# what does not change the result, and so does not tell one run from another
NO_PART_OF_IDENTITY = {"lamina", "format", "title", "data.dir", "run.out", "run.threads", "run.checkpoint_every"}
MOST_NAMED = 5  # keys that differ, in one line
CHOOSE_ANOTHER = "choose another with --out, or give --overwrite"
log = logging.getLogger(__name__)


class Locked(BadInput):
    """Another process writes to the folder."""


class Lock:
    """A folder that only one process may write to; the kernel frees it when the process ends, however it does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                self._file = self.path.open("a+", encoding="utf-8")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                        break
                self._file.close()  # its last owner deleted it between our two steps
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        except BlockingIOError as error:
            owner = self.path.read_text(encoding="utf-8").strip() or "unknown"
            self._file.close()
            raise Locked(
                f"process {owner} is writing to the folder '{folder}': wait until it ends, or choose another with --out"
            ) from error
        except OSError as error:
            raise cannot_write(folder, error) from error

    def refuse_lost(self) -> None:
        """Refuse to go on in a folder that was removed, emptied or replaced: its lock is not ours any more."""
        if not is_at(self._file, self.path):
            raise lost(self.path.parent)

    def release(self, *, delete: bool = False) -> None:
        """Let others write."""
        if delete and is_at(self._file, self.path):
            self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """One process at a time: wait until it is our turn to look at a folder that several share, and to write to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its process killed
        yield


def is_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def lost(folder: Path) -> BadInput:
    """Return the error for records that are no longer where they were written."""
    return BadInput(
        f"the folder '{folder}' was removed, emptied or replaced while this run was writing to it: "
        "nothing more is written there; run the command again"
    )


class LogLines(logging.Handler):
    """Writes what lamina's logger says to the logs of the runs that are open.

    A line about one run, with its folder as ``about``, goes to that run's log alone; all others to every log, those
    from before it was opened too.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.about: Path | None = None  # the run that lines are about which do not say so themselves
        self._lines: list[tuple[Path | None, str]] = []
        self._files: list[tuple[Path, TextIO]] = []

    def __enter__(self) -> LogLines:
        logger = logging.getLogger("lamina")
        self._level = logger.level
        logger.setLevel(min(logging.INFO, logger.level or logging.INFO))
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("lamina")
        logger.removeHandler(self)
        logger.setLevel(self._level)
        for _folder, file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a log that cannot be written is no reason to end a run."""
        about = getattr(record, "about", self.about)
        line = printable(self.format(record), lines=record.exc_info is not None) + "\n"
        self._lines.append((about, line))
        with contextlib.suppress(OSError):
            for folder, file in self._files:
                if about in (None, folder):
                    file.write(line)
                    file.flush()

    def follow(self, folder: Path) -> None:
        """Write what there is to say about a run, the lines of the past too, to its log."""
        with contextlib.suppress(OSError):
            file = (folder / "log.txt").open("a", encoding="utf-8")
            self._files.append((folder, file))
            file.write("".join(line for about, line in self._lines if about in (None, folder)))
            file.flush()


class Trained(Protocol):
    """What a folder keeps the model of: a simulation, or the server of a real federation."""

    state: State
    objective: Objective


class RunFolder:
    """The records of one run. Opening it takes the lock and refuses a folder that holds anything else.

    Nothing is written, and with `overwrite` nothing replaced, before `begin`: a simulation begins when its first round
    is finished (or diverges), a federation when its first attempt at one is over. A folder without a finished round is
    free for any other run: one that fails at once does not stand in the way of the corrected one. A run
    that has ended may lie where nobody can write.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], *, overwrite: bool = False, lines: LogLines | None = None
    ) -> None:
        self.path = path
        self.config = as_json({"lamina": lamina.__version__, "format": FORMAT, **config})
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.history = History()  # the rounds found in the folder
        self.complete = False
        self.diverged: Diverged | None = None
        self._ends = [0]  # where each of those rounds ends in the metrics
        self._damage = ""  # what is wrong with the metrics, in words
        self._model_of = 0  # the round of the model that is there
        self._fresh = True  # nothing here is worth keeping
        self._lines = lines
        self._metrics: BinaryIO | None = None
        self._best = -math.inf
        self._best_model: tuple[int, Tensor, Buffers] | None = None  # not written yet
        self._refuse_foreign()
        self._made = not path.exists()
        self._lock: Lock | None = None
        try:
            check_writable(path)
            self._lock = Lock(path)
        except Locked:
            raise
        except BadInput:
            if not overwrite:
                self._recognise()
            if not self.complete and self.diverged is None:
                raise
            return  # nothing is left to write
        try:
            if not overwrite:
                self._recognise()
        except BaseException:
            self.close()
            raise

    def _found(self) -> list[str]:
        if not self.path.is_dir():
            return []
        try:
            names = sorted(inner.name for inner in self.path.iterdir())
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return [name for name in names if name != "lock" and not name.endswith(PARTIAL)]

    def _refuse_foreign(self) -> None:
        """Refuse a folder that holds anything but a run."""
        found = self._found()
        foreign = [name for name in found if name not in FILES]
        if foreign or (found and not is_ours(self.path)):
            other = f"other files ('{foreign[0]}')" if foreign else "files that are not a run's"
            holds = unreadable_config(self.path) or other
            raise BadInput(f"the folder '{self.path}' holds {holds}: choose a new or an empty one with --out")

    def _recognise(self) -> None:
        """Find out whether the folder holds this run, and how far it is; refuse another run."""
        if not self._found():
            return
        stored = read_json(self.path / "config.json")
        refuse_format(self.path, stored, CHOOSE_ANOTHER)
        check_config(self.path, stored)
        metrics = self.path / "metrics.jsonl"
        history, ends, damaged = read_metrics(metrics) if metrics.exists() else Metrics(History(), [0], None)
        model = self.path / "model.safetensors"
        # metrics may be lost or damaged: what was trained is worth as much without them
        self._model_of, damage = _round_of(model)
        finished = max(len(history), *self.checkpoints.rounds(), self._model_of)
        # A run that diverged has metrics, too: without them it is what a killed --overwrite has left to delete.
        how = read_diverged(self.path) if metrics.exists() else None
        differing = differences(stored, self.config, finished)
        if not finished and damaged is None and not model.exists() and (differing or how is None):
            return
        if differing:
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            raise BadInput(
                f"the folder '{self.path}' holds another run: {', '.join(differing[:MOST_NAMED])}{more}; "
                f"{CHOOSE_ANOTHER}"
            )
        self._fresh, self.history, self._ends = False, history, ends
        if damage:
            self._say(f"'{model}' is damaged ({damage}): it is written again", logging.WARNING)
        best = self.path / "best.safetensors"
        _, damage = _round_of(best)
        if damage:
            self._say(f"'{best}' is damaged ({damage}): the best model so far is lost", logging.WARNING)
        if damaged is not None:
            self._damage = f"line {damaged} of {metrics} is damaged"
        elif finished > len(history):
            self._damage = f"{metrics} has {len(history)} of {plural(finished, 'finished round')}"
        if how is not None:
            self.diverged = Diverged(
                how["message"],
                round=how.get("round", len(history) + 1),
                client=how.get("client"),
                layer=how.get("layer", ""),
            )
        self.complete = len(history) == self._model_of == self.config["train"]["rounds"]
        self._refuse_without_checkpoint(stored, finished)

    def _refuse_without_checkpoint(self, stored: Mapping[str, Any], finished: int) -> None:
        """Refuse to start again at round 1, which would replace the records, because the checkpoints are gone."""
        if self.complete or self.diverged is not None or self.checkpoints.rounds():
            return
        settings = stored.get("run", {})
        every = settings.get("checkpoint_every", 1) if isinstance(settings, Mapping) else 1
        # A run that was killed before its first checkpoint has never had one.
        if self._model_of or not is_whole(every) or finished > every:
            raise BadInput(
                f"the folder '{self.path}' has {finished} finished rounds but no checkpoint to resume from: restore "
                f"'{self.path / 'checkpoints'}', or start again with --overwrite or without the folder"
            )

    def rounds(self) -> list[int]:
        """The rounds after which the run could go on."""
        return [] if self._fresh else [r for r in self.checkpoints.rounds() if r <= len(self.history)]

    def go_on_after(self, number: int) -> History:
        """Cut the metrics back to a round and return them; the run goes on from there."""
        if self._fresh:
            return History()
        self.refuse_lost()
        again = len(self.history) if number == 0 else 0
        self.history = self.history[:number]
        self._best = max((value for value in map(score, self.history) if not math.isnan(value)), default=-math.inf)
        try:
            self._remove_partial_files()
            if self._model_of > number:  # it is of a round that is run again
                (self.path / "model.safetensors").unlink(missing_ok=True)
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            self._metrics.truncate(self._ends[number])
            os.fsync(self._metrics.fileno())
            if read_json(self.path / "config.json") != self.config:
                write_json(self.path / "config.json", self.config)  # more rounds, say
            began, now = read_environment(self.path), environment(self.config["run"]["device"])
            if not began:
                write_json(self.path / "environment.json", now)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._lines is not None:
            self._lines.follow(self.path)
        if self._damage:
            self._say(f"{self._damage}: going on after round {number}, what came later is run again", logging.WARNING)
        elif again:
            what = "1 finished round is" if again == 1 else f"{again} finished rounds are"
            self._say(f"{self.path}: there is no checkpoint yet: {what} run again", logging.WARNING)
        self._say(f"{self.path}: going on after round {number} of {self.config['train']['rounds']}")
        if not began:
            self._say(f"{self.path / 'environment.json'} was lost or damaged, and says what is now", logging.WARNING)
        for name in ("lamina", "torch", "numpy", "device_name") if began else ():
            if began.get(name) != now[name]:
                what = f"this run began with {name} {began.get(name)}, now {now[name]}: rounding may differ"
                self._say(what, logging.WARNING)
        return self.history

    def begin(self) -> None:
        """Make the folder, or empty it of an earlier run, and write what is known before the first round."""
        if self._metrics is not None:
            return
        self.refuse_lost()
        try:
            self._remove_partial_files()
            remove_records(self.path)
            write_json(self.path / "config.json", self.config)
            write_json(self.path / "environment.json", environment(self.config["run"]["device"]))
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            sync_folder(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._lines is not None:
            self._lines.follow(self.path)
        self._say(f"{self.path}: {summary(self.config)}")

    def stopped(self, number: int) -> None:
        """Note that the run was stopped on request."""
        self._say(f"{self.path}: stopped after round {number}")

    def _say(self, line: str, level: int = logging.INFO) -> None:
        """Log something about this run."""
        log.log(level, "%s", line, extra={"about": self.path})

    def _remove_partial_files(self) -> None:
        """Remove what a kill left half-written."""
        for path in self.path.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def refuse_lost(self) -> None:
        """Refuse to write where this run's records are no longer."""
        if self._lock is not None:
            self._lock.refuse_lost()
        if self._metrics is not None and not (
            is_at(self._metrics, self.path / "metrics.jsonl") and (self.path / "config.json").exists()
        ):
            raise lost(self.path)

    def record(self, row: Row, simulation: Trained) -> None:
        """Append a finished round; the first makes the folder."""
        self.begin()
        self.refuse_lost()
        assert self._metrics is not None
        # valid JSON has no NaN and no infinity
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        try:
            self._metrics.write((json.dumps(numbers, allow_nan=False) + "\n").encode())
            self._metrics.flush()
        except OSError as error:
            raise self._full(error) from error
        if score(row) > self._best:
            self._best = score(row)
            self._best_model = int(row["round"]), simulation.state.server.x, simulation.state.buffers

    def checkpoint(self, simulation: Trained, facts: Iterable[Any] = ()) -> None:
        """Save the state after the last recorded round and facts about it, with the best model so far if it is new."""
        assert self._metrics is not None
        self.refuse_lost()
        try:
            os.fsync(self._metrics.fileno())
            if self._best_model is not None:
                self._save_model("best.safetensors", simulation, *self._best_model)
                self._best_model = None
            self.checkpoints.save(simulation.state, facts)
        except OSError as error:
            raise self._full(error) from error
        except BadInput as error:
            raise BadInput(f"{error}{self._kept()}") from error

    def finish(self, simulation: Trained) -> None:
        """Write the trained model: the run is complete."""
        state = simulation.state
        self.refuse_lost()
        try:
            self._save_model("model.safetensors", simulation, state.round, state.server.x, state.buffers)
        except OSError as error:
            raise self._full(error) from error
        self._say(f"{self.path}: complete after round {state.round}")

    def diverge(self, error: Diverged) -> None:
        """Keep how the training diverged: the run has ended."""
        replaced = self.path / "metrics.jsonl"
        if self._metrics is None and replaced.exists() and replaced.stat().st_size:
            return  # the earlier run it was to replace is worth more
        self.begin()
        self.refuse_lost()
        how = {"message": str(error), "round": error.round, "client": error.client, "layer": error.layer}
        try:
            write_json(self.path / "diverged.json", how)
        except OSError as problem:
            raise self._full(problem) from problem
        self._say(f"{self.path}: diverged: {error}")

    def _save_model(self, name: str, simulation: Trained, number: int, x: Tensor, buffers: Buffers) -> None:
        weights = simulation.objective.module_at(x, buffers).state_dict()
        write_file(self.path / name, pack(weights, round=str(number)))

    def _full(self, error: OSError) -> BadInput:
        return BadInput(f"{cannot_write(self.path, error)}{self._kept()}")

    def _kept(self) -> str:
        rounds = self.checkpoints.rounds()
        return f"; all up to round {rounds[-1]} is kept: the same command goes on from there" if rounds else ""

    def close(self) -> None:
        """Let go of the folder; one that was made for nothing is removed."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # the disk is full: that was said when the round was recorded
                self._metrics.close()
        if self._lock is None:
            return
        useless = self._metrics is None and self._made
        self._lock.release(delete=useless)
        if useless:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class RankFolder:
    """What a process other than torchrun's first writes of a run: the state of the clients that it trains."""

    def __init__(self, path: Path, rank: int, *, found: bool) -> None:
        self.checkpoints = Checkpoints(path / "checkpoints" / f"rank-{rank}")
        self._found = found  # whether the first process goes on with a run
        self._lock = path / "lock"  # the first process's; on another machine it may not be there
        self._file = self._lock.open("rb") if self._lock.exists() else None

    def rounds(self) -> list[int]:
        """The rounds after which this process could go on."""
        return self.checkpoints.rounds() if self._found else []

    def go_on_after(self, number: int) -> History:
        """The first process keeps the history."""
        return History()

    def record(self, row: Row, simulation: Simulation) -> None:
        """The first process does."""

    def checkpoint(self, simulation: Simulation) -> None:
        """Save the state after this round."""
        if self._file is not None and not is_at(self._file, self._lock):
            raise lost(self._lock.parent)
        self.checkpoints.save(simulation.state)

    def stopped(self, number: int) -> None:
        """The first process does."""

    def finish(self, simulation: Simulation) -> None:
        """The first process does."""

    def diverge(self, error: Diverged) -> None:
        """The first process does."""

    def close(self) -> None:
        """Close the first process's lock, which was only looked at."""
        if self._file is not None:
            self._file.close()


def remove_records(folder: Path) -> None:
    """Delete the files of a run but for its lock and its config.json, which says until the end whose they are.

    What says that the run has ended goes first: whatever a kill leaves must not look complete.
    """
    first = ["metrics.jsonl", "diverged.json", "model.safetensors"]
    for name in [*first, *sorted(FILES - {"lock", "config.json", *first})]:
        old = folder / name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        if name == first[-1]:
            sync_folder(folder)


def delete_runs(folders: Iterable[Path]) -> None:
    """Delete run folders; refuse, before anything is deleted, one that is in use or holds anything else."""
    runs = [folder for folder in folders if is_ours(folder)]
    for run in runs:
        foreign = [path.name for path in run.iterdir() if path.name not in FILES and path.suffix != PARTIAL]
        if foreign:
            raise BadInput(f"the folder '{run}' holds other files ('{foreign[0]}'): choose another with --out")
        Lock(run).release()
    for run in runs:
        lock = Lock(run)
        try:
            remove_records(run)
            shutil.rmtree(run)
        except OSError as error:
            raise cannot_write(run, error) from error
        finally:
            lock.release()


def is_ours(folder: Path) -> bool:
    """Whether lamina wrote the folder's config.json."""
    try:
        return "lamina" in read_json(folder / "config.json")
    except BadInput:
        return False


def unreadable_config(folder: Path) -> str:
    """What is wrong with a folder's config.json; empty if it is sound, or there is none."""
    path = folder / "config.json"
    try:
        if path.exists():
            read_json(path)
    except BadInput as error:
        return f"a config.json that cannot be read ({error})"
    return ""


def summary(config: Mapping[str, Any]) -> str:
    """A run in a line."""
    data, train, run = config["data"], config["train"], config["run"]
    return (
        f"{config['algorithm']['name']} on {data['name']}, {plural(data['clients'], 'client')}, "
        f"{config['model']['name']}, lr {train['lr']:g}, seed {train['seed']}, {plural(train['rounds'], 'round')}, "
        f"{run['engine']} on {run['device']}"
    )


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> list[str]:
    """The keys that tell two runs apart, each with both values; more rounds than are finished make no other run."""
    a, b = _flat(stored), _flat(now)
    if b["train.rounds"] >= finished:
        a["train.rounds"] = b["train.rounds"]
    renamed = [key.removesuffix("name") for key in a if key.endswith(".name") and a[key] != b.get(key)]
    lines = []
    for key in {**a, **b}:
        if key in NO_PART_OF_IDENTITY or key.startswith("compare.") or a.get(key) == b.get(key):
            continue
        if any(key.startswith(section) and not key.endswith(".name") for section in renamed):
            continue  # another algorithm has other options: its name says enough
        lines.append(f"{key} = {_shown(a.get(key))} (now {_shown(b.get(key))})")
    return lines


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    if "run.device" in flat:
        flat["run.device"] = str(flat["run.device"]).partition(":")[0]  # which of several GPUs makes no difference
    return flat


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _round_of(path: Path) -> tuple[int, str]:
    """The round a saved model is of, and what is wrong with the file; 0 if there is none that could be loaded."""
    try:
        data = path.read_bytes()
        unpack(data)
        return int(read_facts(data)["round"]), ""
    except OSError:
        return 0, ""
    except UNREADABLE as error:
        return 0, str(error)


def environment(device: str) -> dict[str, Any]:
    """What the numbers and times depend on beside the configuration."""
    on_gpu = device.startswith("cuda")
    return {
        "lamina": lamina.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
        "commit": git_commit(Path.cwd()),
        "lamina_commit": own_commit(),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The name of the CPU; Linux tells it in a file of its own."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def own_commit() -> str | None:
    """The commit of lamina itself: of the checkout it runs from, or as pip noted it; None for a release."""
    here = Path(lamina.__file__).resolve().parent
    if not {"site-packages", "dist-packages"} & set(here.parts):  # else .git above it is of some other project
        return git_commit(here)
    try:
        noted = json.loads(metadata.distribution("lamina").read_text("direct_url.json") or "{}")
        return str(noted["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


def git_commit(folder: Path) -> str | None:
    """The commit checked out in a folder or one above it, read from git's own files; None if there is none."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            git = place / ".git"
            if git.is_file():  # a worktree: the file names the real place
                git = place / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
            if not git.is_dir():
                continue
            head = (git / "HEAD").read_text(encoding="utf-8").strip()
            if not head.startswith("ref: "):
                return head
            ref = head.removeprefix("ref: ")
            shared = git / "commondir"
            home = git / shared.read_text(encoding="utf-8").strip() if shared.exists() else git
            if (home / ref).exists():
                return (home / ref).read_text(encoding="utf-8").strip()
            packed = (home / "packed-refs").read_text(encoding="utf-8").splitlines()
            return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)
    return None
