"""The folder of a run: all that is known about it, and enough to continue it after it was killed.

- ``config.json``: the whole configuration, with every default and "auto" replaced by what was used
- ``environment.json``: versions, machine, time of the start
- ``metrics.jsonl``: a line per finished round
- ``log.txt``: what lamina's logger said
- ``checkpoints/``: see checkpoint.py
- ``best.safetensors``: the model with the best test accuracy so far
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
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TextIO

import numpy as np
import torch
from torch import Tensor

import lamina
from lamina.engines.state import State
from lamina.errors import BadInput, Diverged
from lamina.experiment.checkpoint import Checkpoints, pack, read_facts
from lamina.experiment.files import PARTIAL, as_json, cannot_write, check_writable, sync_folder, write_file, write_json
from lamina.experiment.records import read_json, read_metrics
from lamina.history import History, Row
from lamina.objective import Buffers, Objective
from lamina.simulation import Simulation

FORMAT = 1  # of the folder; older ones are refused
FILES = {
    "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "best.safetensors",
    "model.safetensors", "diverged.json", "lock", "tensorboard", "mlflow.json", "federation.jsonl",
}  # fmt: skip
# what does not change the result, and so does not tell one run from another
NO_PART_OF_IDENTITY = {"lamina", "format", "data.dir", "run.out", "run.threads", "run.checkpoint_every"}
MOST_NAMED = 5  # keys that differ, in one line
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

    def release(self, *, delete: bool = False) -> None:
        """Let others write."""
        if delete:
            self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """One process at a time: wait until it is our turn to look at a folder that several share, and to write to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its process killed
        yield


class LogLines(logging.Handler):
    """Keeps what lamina's logger says, and writes it to the log of every folder that is opened meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._lines: list[str] = []
        self._files: list[TextIO] = []

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
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a log that cannot be written is no reason to end a run."""
        self._lines.append(self.format(record) + "\n")
        with contextlib.suppress(OSError):
            for file in self._files:
                file.write(self._lines[-1])
                file.flush()

    def follow(self, path: Path) -> None:
        """Write all lines, those of the past too, to one more file."""
        with contextlib.suppress(OSError):
            self._files.append(path.open("a", encoding="utf-8"))
            self._files[-1].write("".join(self._lines))
            self._files[-1].flush()


class Trained(Protocol):
    """What a folder keeps the model of: a simulation, or the server of a real federation."""

    state: State
    objective: Objective


class RunFolder:
    """The records of one run. Opening it takes the lock and refuses a folder that holds anything else.

    Nothing is written, and with `overwrite` nothing replaced, before the first round is finished, and a folder without
    a finished round is free for any other run: one that fails at once does not stand in the way of the corrected one.
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
        self._fresh = True  # nothing here is worth keeping
        self._lines = lines
        self._metrics: BinaryIO | None = None
        self._best = -math.inf
        self._best_model: tuple[int, Tensor, Buffers] | None = None  # not written yet
        check_writable(path)
        self._refuse_foreign()
        self._made = not path.exists()
        self._lock = Lock(path)
        try:
            if not overwrite:
                self._recognise()
        except BaseException:
            self.close()
            raise

    def _found(self) -> list[str]:
        if not self.path.exists():
            return []
        names = sorted(inner.name for inner in self.path.iterdir())
        return [name for name in names if name != "lock" and not name.endswith(PARTIAL)]

    def _refuse_foreign(self) -> None:
        """Refuse a folder that holds anything but a run."""
        found = self._found()
        foreign = [name for name in found if name not in FILES]
        if foreign or (found and not is_ours(self.path)):
            holds = f"holds other files ('{foreign[0]}')" if foreign else "holds files that are not a run's"
            raise BadInput(f"the folder '{self.path}' {holds}: choose a new or an empty one with --out")

    def _recognise(self) -> None:
        """Find out whether the folder holds this run, and how far it is; refuse another run."""
        if not self._found():
            return
        stored = read_json(self.path / "config.json")
        refuse_format(self.path, stored)
        metrics = self.path / "metrics.jsonl"
        history, ends = read_metrics(metrics) if metrics.exists() else (History(), [0])
        failure = self.path / "diverged.json"
        differing = differences(stored, self.config, len(history))
        if not len(history) and (differing or not failure.exists()):
            return
        if differing:
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            raise BadInput(
                f"the folder '{self.path}' holds another run: {', '.join(differing[:MOST_NAMED])}{more}; "
                "choose another folder with --out, or give --overwrite"
            )
        self._fresh, self.history, self._ends = False, history, ends
        if failure.exists():
            how = read_json(failure)
            self.diverged = Diverged(how["message"], round=how["round"], client=how["client"], layer=how["layer"])
        self.complete = _round_of(self.path / "model.safetensors") == self.config["train"]["rounds"]

    def rounds(self) -> list[int]:
        """The rounds after which the run could go on."""
        return [] if self._fresh else [r for r in self.checkpoints.rounds() if r <= len(self.history)]

    def go_on_after(self, number: int) -> History:
        """Cut the metrics back to a round and return them; the run goes on from there."""
        if self._fresh:
            return History()
        self.history = self.history[:number]
        self._best = max((v for v in self.history.column("accuracy") if not math.isnan(v)), default=-math.inf)
        try:
            self._remove_partial_files()
            with (self.path / "metrics.jsonl").open("r+b") as file:
                file.truncate(self._ends[number])
                os.fsync(file.fileno())
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            if read_json(self.path / "config.json") != self.config:
                write_json(self.path / "config.json", self.config)  # more rounds, say
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._lines is not None:
            self._lines.follow(self.path / "log.txt")
        log.info("%s: going on after round %d", self.path, number)
        began = read_json(self.path / "environment.json")
        for name, now in environment(self.config["run"]["device"]).items():
            if name in ("lamina", "torch", "numpy", "device_name") and began.get(name) != now:
                log.warning("this run began with %s %s, now %s: rounding may differ", name, began.get(name), now)
        return self.history

    def begin(self) -> None:
        """Make the folder, or empty it of an earlier run, and write what is known before the first round."""
        if self._metrics is not None:
            return
        try:
            self._remove_partial_files()
            for name in ("metrics.jsonl", *sorted(FILES - {"lock", "config.json", "metrics.jsonl"})):
                old = self.path / name  # without its metrics, a half-emptied folder counts as empty
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            write_json(self.path / "config.json", self.config)
            write_json(self.path / "environment.json", environment(self.config["run"]["device"]))
            self._metrics = (self.path / "metrics.jsonl").open("ab")
            sync_folder(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._lines is not None:
            self._lines.follow(self.path / "log.txt")

    def _remove_partial_files(self) -> None:
        """Remove what a kill left half-written."""
        for path in self.path.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def record(self, row: Row, simulation: Trained) -> None:
        """Append a finished round; the first makes the folder."""
        self.begin()
        assert self._metrics is not None
        # valid JSON has no NaN and no infinity
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        try:
            self._metrics.write((json.dumps(numbers, allow_nan=False) + "\n").encode())
            self._metrics.flush()
        except OSError as error:
            raise self._full(error) from error
        if row.get("accuracy", -math.inf) > self._best:
            self._best = row["accuracy"]
            self._best_model = int(row["round"]), simulation.state.server.x, simulation.state.buffers

    def checkpoint(self, simulation: Trained, facts: Iterable[Any] = ()) -> None:
        """Save the state after the last recorded round and facts about it, with the best model so far if it is new."""
        assert self._metrics is not None
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
        try:
            self._save_model("model.safetensors", simulation, state.round, state.server.x, state.buffers)
        except OSError as error:
            raise self._full(error) from error
        log.info("%s: complete after round %d", self.path, state.round)

    def diverge(self, error: Diverged) -> None:
        """Keep how the training diverged: the run has ended."""
        replaced = self.path / "metrics.jsonl"
        if self._metrics is None and replaced.exists() and replaced.stat().st_size:
            return  # the earlier run it was to replace is worth more
        self.begin()
        how = {"message": str(error), "round": error.round, "client": error.client, "layer": error.layer}
        try:
            write_json(self.path / "diverged.json", how)
        except OSError as problem:
            raise self._full(problem) from problem
        log.info("%s: diverged: %s", self.path, error)

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
        self.checkpoints.save(simulation.state)

    def finish(self, simulation: Simulation) -> None:
        """The first process does."""

    def diverge(self, error: Diverged) -> None:
        """The first process does."""

    def close(self) -> None:
        """Nothing is held."""


def is_ours(folder: Path) -> bool:
    """Whether lamina wrote the folder's config.json."""
    try:
        return "lamina" in read_json(folder / "config.json")
    except BadInput:
        return False


def refuse_format(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder of another format than this version's."""
    found = config.get("format", 0)
    if found != FORMAT:
        older = "an older" if found < FORMAT else "a newer"
        raise BadInput(
            f"the folder '{folder}' was written by {older} lamina (format {found}, this one's is {FORMAT}): "
            "choose another with --out, or give --overwrite"
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


def _round_of(path: Path) -> int | None:
    """The round a saved model is of."""
    try:
        return int(read_facts(path.read_bytes())["round"])
    except (OSError, ValueError, KeyError):
        return None


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
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The name of the CPU; Linux tells it in a file of its own."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
