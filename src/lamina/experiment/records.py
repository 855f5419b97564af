"""Read, recognise and delete the records in run folders."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lamina import algorithms, models
from lamina.aggregation import AGGREGATIONS
from lamina.data.partitions import PARTITIONS
from lamina.errors import BadInput, is_number, is_whole
from lamina.experiment.config import Experiment
from lamina.history import History, Row
from lamina.metrics import read_primary
from lamina.schedules import SCHEDULES
from lamina.storage.files import PARTIAL, as_json, check_writable, sync_folder, writing_to
from lamina.storage.locks import Lock
from lamina.text import listed

FORMAT = 1  # of a run's folder; others are refused
# keys that do not change the result, and so do not tell one run from another
NO_PART_OF_IDENTITY = {
    "lamina", "format", "title", "metrics", "data.dir", "run.out", "run.threads", "run.checkpoint_every",
    "train.metrics_content",  # of earlier versions: a digest that covers lamina's own code, too
}  # fmt: skip
LATER_DIGESTS = ("loss_digest", "model_digest", "algorithm_digest", "metrics_digest")  # a folder from before has none
DIGESTS_IN_WORDS = {key: f"the code of the {key.removesuffix('_digest')}" for key in LATER_DIGESTS} | {
    "data_digest": "the contents of the data",
    "loss_digest": "the code or the weights of the loss",
    "data.content": "the contents of the data",
    "data.partition.content": "the settings of the partition",
    "model.content": "the model's layers, settings or initial weights",
}
SECTIONS = ("data", "model", "algorithm", "train", "run", "compare")  # tables of a run's configuration
FILES = {
    "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "best.safetensors",
    "model.safetensors", "diverged.json", "lock", "tensorboard", "mlflow.json", "federation.jsonl",
}  # fmt: skip
CHOOSE_ANOTHER = "choose another with --out (out=…), or give --overwrite (overwrite=True)"


@dataclasses.dataclass(frozen=True)
class Record:
    """One run as read from its folder, finished or not."""

    folder: Path
    config: dict[str, Any]  # as resolved: sections data, model, algorithm, train, run
    history: History
    environment: dict[str, Any]  # versions, machine, start; empty if it was not written
    diverged: str | None = None  # how, if the training diverged

    @property
    def algorithm(self) -> str:
        """Return the name of its algorithm."""
        return str(self.config["algorithm"]["name"])

    @property
    def title(self) -> str:
        """Return the title of its algorithm; of a user's own algorithm, the title when it ran."""
        known = algorithms.registry()
        if self.algorithm in known:
            return known[self.algorithm].card.title
        stored = self.config.get("title")
        return stored if isinstance(stored, str) and stored else self.algorithm

    @property
    def lr(self) -> float:
        """Return its learning rate, before any schedule."""
        return float(self.config["train"]["lr"])

    @property
    def seed(self) -> int:
        """Return its seed."""
        return int(self.config["train"]["seed"])

    @property
    def complete(self) -> bool:
        """Return whether it ran all its rounds."""
        return self.diverged is None and len(self.history) >= int(self.config["train"]["rounds"])

    @property
    def ended(self) -> bool:
        """Return whether it is complete or has diverged."""
        return self.complete or self.diverged is not None

    def up_to(self, rounds: int) -> Record:
        """Return the run as if it had only its first rounds to train."""
        config = {**self.config, "train": {**self.config["train"], "rounds": rounds}}
        diverged = self.diverged if len(self.history) < rounds else None
        return dataclasses.replace(self, config=config, history=self.history[:rounds], diverged=diverged)

    @property
    def on_validation_data(self) -> bool:
        """Return whether it was evaluated on held-out training data instead of the test data."""
        return self.config["data"].get("validation") is not None

    @property
    def tuning(self) -> bool:
        """Return whether it is a tuning run of a comparison."""
        return self.on_validation_data or "tuning" in self.folder.parts[-3:-1]


def find_records(paths: Iterable[str | Path]) -> list[Record]:
    """Return every run in the given folders, at any depth; a folder given twice counts once."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise BadInput(f"no folder '{path}'")
        parents = sorted(metrics.parent for metrics in path.rglob("metrics.jsonl"))
        if not parents:
            raise BadInput(f"no run in '{path}': a run's folder holds config.json and metrics.jsonl")
        folders |= dict.fromkeys(folder.resolve() for folder in parents)
    return [read_record(folder) for folder in folders]


def read_record(folder: str | Path) -> Record:
    """Read one run's folder; it may be running now."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    refuse_format(folder, config, "read it with that one")
    check_config(folder, config)
    how = read_diverged(folder)
    return Record(
        folder,
        config,
        History(read_metrics(folder / "metrics.jsonl").history, read_primary(config)),
        read_environment(folder),
        None if how is None else how["message"],
    )


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks what every run's has."""
    try:
        for section in SECTIONS:
            if not isinstance(config.get(section, {}), Mapping):
                raise TypeError(f"a table [{section}]")
        record = Record(folder, dict(config), History(), {})
        _ = record.algorithm, record.lr, record.seed, record.complete, record.tuning
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"'{folder / 'config.json'}' is not a run's configuration: it lacks {error}") from error


def refuse_format(folder: Path, config: Mapping[str, Any], otherwise: str) -> None:
    """Refuse a folder of another format than this version's; the last words say what to do instead."""
    number = config.get("format", 0)
    if number != FORMAT:
        which = "another" if not is_whole(number) else "an older" if number < FORMAT else "a newer"
        raise BadInput(
            f"the folder '{folder}' was written by {which} lamina (format {number}, this one's is {FORMAT}): "
            f"{otherwise}"
        )


def flatten(tree: Mapping[str, Any], leaves: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one level of dotted keys; a table with a key among `leaves` counts as a value.

    >>> flatten({"train": {"lr": 0.1, "schedule": {"name": "constant"}}})
    {'train.lr': 0.1, 'train.schedule.name': 'constant'}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and not set(value) & set(leaves)
        flat |= flatten(value, leaves, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def with_defaults(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration with the default of every setting that it lacks: the lamina that wrote it had none.

    A new setting or option must therefore have a default that keeps the earlier behaviour.
    """
    classes = {f"{cls.__module__}:{cls.__name__}": cls for cls in algorithms.registry().values()}  # users' own
    name = flat.get("algorithm.name", "")
    kinds: dict[str, type[Any] | None] = {
        "algorithm": algorithms.registry().get(name) or classes.get(name),
        "data.partition": PARTITIONS.get(flat.get("data.partition.base", flat.get("data.partition.name", ""))),
        "train.schedule": SCHEDULES.get(flat.get("train.schedule.name", "")),
        "train.aggregation": AGGREGATIONS.get(flat.get("train.aggregation.name", "")),
    }
    model = models.registry().get(flat.get("model.name", ""))
    defaults = flatten(Experiment().model_dump()) | {"run.ranks": 1}
    defaults |= {f"model.{option}": value for option, value in (model.options if model else {}).items()}
    for place, kind in kinds.items():
        fields = dataclasses.fields(kind) if kind else ()
        defaults |= {f"{place}.{each.name}": each.default for each in fields if each.default is not dataclasses.MISSING}
    return {**flat, **{key: value for key, value in as_json(defaults).items() if key not in flat}}


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> str:
    """Return the keys that tell two runs apart, in a line with both values; empty if it is the same run.

    Args:
        stored: the configuration in a run's folder.
        now: the configuration of the run that is to use the folder.
        finished: how many rounds the stored run has; asking for as many or more makes no other run.
    """
    a, b = with_defaults(flatten(stored)), with_defaults(flatten(now))
    if b["train.rounds"] >= finished:
        a["train.rounds"] = b["train.rounds"]
    for flat in (a, b):
        if "run.device" in flat:
            flat["run.device"] = str(flat["run.device"]).partition(":")[0]  # which of several GPUs makes no difference
    renamed = [key.removesuffix("name") for key in a if key.endswith(".name") and a[key] != b.get(key)]
    differing = [
        _difference(key, a.get(key), b.get(key))
        for key in {**a, **b}
        if a.get(key) != b.get(key)
        and key not in NO_PART_OF_IDENTITY
        and not (key in LATER_DIGESTS and key not in a)
        and not key.startswith("compare.")
        # another algorithm has other options: its name says enough
        and (key.endswith(".name") or not key.startswith(tuple(renamed)))
    ]
    return listed(differing)


def _difference(key: str, stored: Any, now: Any) -> str:
    """Return in words how a key differs; of a digest, only that it does."""
    words = DIGESTS_IN_WORDS.get(key)
    if key.startswith("train.") and key.endswith("_content"):  # of a function passed from Python
        words = f"the code or the values of {key.removesuffix('_content')}"
    return f"{key} = {_shown(stored)} (now {_shown(now)})" if words is None else f"{words} ({key}) changed"


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the environment of a run; empty if it is lost or damaged, which does not invalidate the run."""
    try:
        return read_json(folder / "environment.json")
    except BadInput:
        return {}


def read_diverged(folder: Path) -> dict[str, Any] | None:
    """Return how a run diverged, at least with a "message"; None if it did not."""
    path = folder / "diverged.json"
    if not path.exists():
        return None
    how = read_json(path)
    return {**how, "message": str(how.get("message", "the training diverged, and diverged.json does not say how"))}


class Metrics(NamedTuple):
    """The content of a metrics file."""

    history: History  # its rounds
    ends: list[int]  # the byte at which each of them ends, after a first 0
    damaged: int | None  # the first line that is not the round it should be; it and all after it are left out


def read_metrics(path: Path) -> Metrics:
    """Return the rounds of a metrics file; a last line without its end is half-written and ignored."""
    rows: list[Row] = []
    ends = [0]
    for line in _read(path).split(b"\n")[:-1]:
        try:
            row = json.loads(line)
            numbers = [value for value in row.values() if value is not None]
            is_sound = row["round"] == len(rows) + 1 and all(is_number(n) and math.isfinite(n) for n in numbers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_sound = False
        if not is_sound:
            return Metrics(History(rows), ends, len(rows) + 1)
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
        ends.append(ends[-1] + len(line) + 1)
    return Metrics(History(rows), ends, None)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which must be a table."""
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a table")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"'{path.parent}' is not a run's folder: it has no {path.name}") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror or error}") from error


# --- folders -----------------------------------------------------------------------------------------------------


def remove_records(folder: Path) -> None:
    """Delete the files of a run except its lock and its config.json, which marks the folder as lamina's.

    The files of a run that has ended go first: what a kill leaves behind must not look complete.
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
            raise BadInput(f"the folder '{run}' holds other files ('{foreign[0]}'): choose another with --out (out=…)")
        Lock(run).release()
    for run in runs:
        lock = Lock(run)
        try:
            with writing_to(run):
                remove_records(run)
                shutil.rmtree(run)
        finally:
            lock.release()


def is_ours(folder: Path) -> bool:
    """Return whether lamina wrote the folder's config.json."""
    try:
        return "lamina" in read_json(folder / "config.json")
    except BadInput:
        return False


def unreadable_config(folder: Path) -> str:
    """Return what is wrong with a folder's config.json; empty if it is sound or missing."""
    path = folder / "config.json"
    try:
        if path.exists():
            read_json(path)
    except BadInput as error:
        return f"a config.json that cannot be read ({error})"
    return ""


def check_folder(folder: Path, key: str, whose: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that cannot be written to, or whose config.json lacks the key that tells what it holds."""
    check_writable(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if all(name == "lock" or name.endswith(PARTIAL) for name in names):
        return
    config = read_json(folder / "config.json") if is_ours(folder) else {}
    if key not in config:
        holds = unreadable_config(folder) or f"other files than {whose}"
        raise BadInput(f"the folder '{folder}' holds {holds}: choose another with --out (out=…)")
    if not overwrite:
        refuse_format(folder, config, CHOOSE_ANOTHER)
