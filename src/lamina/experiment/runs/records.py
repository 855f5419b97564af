"""Read, recognise and delete the records in run folders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina import algorithms
from lamina.base.atomic import PARTIAL, sync_folder
from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed
from lamina.channel.privacy import as_privacy
from lamina.engines.choice import ENGINES, EngineName
from lamina.experiment.runs.metrics_file import MetricsFile, open_to_read
from lamina.experiment.toml import leaves
from lamina.rounds.settings import TrainSettings
from lamina.storage import identity
from lamina.storage.files import check_writable, writing_to
from lamina.storage.leases import is_lease, take
from lamina.training.history import History
from lamina.training.metrics import is_metric, read_primary
from lamina.training.privacy import PARTICIPATION, accountant_of, spends_too_much

FORMAT = 1  # of a run's folder; others are refused
# keys that do not change the result, and so do not tell one run from another
NO_PART_OF_IDENTITY = {
    "lamina", "format", "title", "metrics", "data.dir", "clock.name", "run.out", "run.threads", "run.checkpoint_every",
    "run.accept_changed_code",
}  # fmt: skip
# mlflow.json: of the option --mlflow, which earlier versions had
FILES = {
    "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "best.safetensors",
    "model.safetensors", "diverged.json", "tensorboard", "mlflow.json", "federation.jsonl", "starts", "partition.json",
    "model.json", "preprocessing.json",
}  # fmt: skip
REPLACED = f"replaced{PARTIAL}"  # a file in the folder of a run that is being deleted
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
        registry = algorithms.registry()
        if self.algorithm in registry:
            return registry[self.algorithm].card.title
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
        """Return whether it ran all its rounds, or stopped early as its patience or its privacy budget says."""
        return self.diverged is None and has_all_rounds(self.history, self.config)

    @property
    def ended(self) -> bool:
        """Return whether it is complete or has diverged."""
        return self.complete or self.diverged is not None

    def up_to(self, rounds: int) -> Record:
        """Return the run as if it had only its first rounds to train."""
        config = {**self.config, "train": {**self.config["train"], "rounds": rounds}}
        diverged = self.diverged if len(self.history) < rounds else None
        return dataclasses.replace(self, config=config, history=self.history[:rounds], diverged=diverged)

    def final(self, name: str | None = None) -> float:
        """Return the mean of a metric, the first unless given, over the last ten rounds; NaN if the run diverged."""
        return math.nan if self.diverged is not None else self.history.final(name, optional=True)

    def settling_round(self, target: float, name: str | None = None) -> int | None:
        """Return the round from which the run stays at a target (`History.settling_round`); None if it diverged."""
        return None if self.diverged is not None else self.history.settling_round(target, name, optional=True)

    def judged_by(self, column: str) -> Record:
        """Return the run with a history that is judged by another column."""
        return dataclasses.replace(self, history=History(self.history.rows, column))

    @property
    def on_validation_data(self) -> bool:
        """Return whether it was evaluated on held-out training data instead of the test data."""
        return self.config["data"].get("validation") is not None

    @property
    def tuning(self) -> bool:
        """Return whether it is a tuning run of a comparison."""
        return self.on_validation_data or "tuning" in self.folder.parts[-3:-1]


def has_all_rounds(history: History, config: Mapping[str, Any]) -> bool:
    """Return whether a history ends where the run of a configuration does: at its last round, or stopped early.

    A run stops by the column that it is judged by alone, whatever a comparison judges it by.
    """
    rounds, patience = int(config["train"]["rounds"]), config["train"].get("patience")
    every = int(config.get("run", {}).get("evaluate_every", 1))
    if len(history) >= rounds or has_no_budget(history, config):
        return True
    return patience is not None and History(history.rows, read_primary(config)).has_stalled(patience, every)


def has_no_budget(history: History, config: Mapping[str, Any]) -> bool:
    """Return whether one more round of a run would exceed the privacy budget that its configuration gives."""
    settings, train = config.get("privacy") or {}, config["train"]
    if settings.get("epsilon") is None or settings.get("noise_multiplier") is None:
        return False
    how = {name: train[name] for name in PARTICIPATION if train.get(name) is not None}
    with contextlib.suppress(BadInput):  # without dp-accounting, which only training needs, it is not known
        protocol = TrainSettings(lr=1.0, privacy=as_privacy(settings), **how)
        accountant = accountant_of(protocol, _trained_clients(config["data"]))
        return spends_too_much(accountant, protocol.privacy, len(history) + 1)
    return False


def _trained_clients(data: Mapping[str, Any]) -> int:
    """Return how many clients train, by a configuration of the data."""
    count, heldout = int(data["clients"]), data.get("heldout_clients")
    if isinstance(heldout, list):
        return count - len(set(heldout))
    return count if heldout is None else count - max(1, round(heldout * count))


def find_records(paths: Iterable[str | Path], metrics_files: dict[Path, MetricsFile] | None = None) -> list[Record]:
    """Return every run in the given folders, at any depth.

    If some are judged by the mean over clients and all have that column, all are judged by it.

    To look at growing runs again and again, pass the same dict as `metrics_files` every time: of the files in it, only
    new lines are read.
    """
    metrics_files = {} if metrics_files is None else metrics_files
    folders = find_folders(paths)
    records = [
        read_record(folder, metrics_files.setdefault(folder, MetricsFile(folder / "metrics.jsonl")))
        for folder in folders
    ]
    evaluated = [record.history for record in records if record.history.metric in record.history.columns]
    judged = {history.metric for history in evaluated}
    for column in sorted(judged if len(judged) > 1 else ()):
        if not is_metric(column) and all(column in history.columns for history in evaluated):
            return [record.judged_by(column) for record in records]
    return records


def find_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folder of every run in the given folders, at any depth; one that is given twice counts once."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            if path.exists():
                raise BadInput(f"'{path}' is a file: give a run's folder, or a folder of such folders")
            beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
            where = "" if path.is_absolute() else f" in '{Path.cwd()}'"
            raise BadInput(f"no folder '{path}'{where}{nearest(path.name, beside)}")
        parents = sorted(metrics.parent for metrics in path.rglob("metrics.jsonl"))
        if not parents:
            raise BadInput(f"no run in '{path}': a run's folder holds config.json and metrics.jsonl")
        folders |= dict.fromkeys(folder.resolve() for folder in parents)
    return list(folders)


def read_record(folder: str | Path, metrics: MetricsFile | None = None) -> Record:
    """Read one run's folder; it may be running now. Of metrics that were read before, only the new lines are read."""
    folder = Path(folder)
    config = read_config(folder)
    how = read_diverged(folder)
    metrics = metrics or MetricsFile(folder / "metrics.jsonl")
    try:
        primary = read_primary(config)
    except BadInput as error:
        raise BadInput(f"'{folder / 'config.json'}' describes a metric that cannot be used: {error}") from error
    return Record(
        folder,
        config,
        History(metrics.read().rows[:], primary),
        read_environment(folder),
        None if how is None else how["message"],
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    if folder.is_file():
        hint = f", '{folder.parent}'" if (folder.parent / "config.json").exists() else ""
        raise BadInput(f"'{folder}' is a file: give a run's folder{hint}")
    if not (folder / "config.json").exists():
        runs = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        held = f", but one with {'such folders' if len(runs) > 1 else 'such a folder'}: {listed(runs)}" if runs else ""
        raise BadInput(f"'{folder}' is not a run's folder: it has no config.json{held}")
    config = read_json(folder / "config.json")
    refuse_format(folder, config, "read it with that one")
    check_config(folder, config)
    return config


def kept_engine(folder: Path, engine: EngineName) -> EngineName:
    """Return the engine of the run that a folder holds, if the engine is to be chosen: a resumed run keeps it."""
    if engine == "auto" and (folder / "metrics.jsonl").exists():
        with contextlib.suppress(BadInput, OSError, KeyError, TypeError):
            stored = read_json(folder / "config.json")["run"]["engine"]
            return stored if stored in ENGINES else engine
    return engine


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks what every run's has."""
    record = Record(folder, dict(config), History(), {})
    try:
        _ = record.algorithm, record.lr, record.seed, record.complete, record.tuning
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"'{folder / 'config.json'}' is not a run's configuration: {error!r}") from error


def refuse_format(folder: Path, config: Mapping[str, Any], otherwise: str) -> None:
    """Refuse a folder of another format than this version's; the last words say what to do instead."""
    number = config.get("format", 0)
    if number != FORMAT:
        formats = f"format {number}, this one's is {FORMAT}"
        raise BadInput(f"the folder '{folder}' was written by another lamina ({formats}): {otherwise}")


def flatten(tree: Mapping[str, Any], values: Collection[str] = ()) -> dict[str, Any]:
    """Return nested tables as one level of dotted keys; a table with a key among `values` counts as a value.

    >>> flatten({"train": {"lr": 0.1, "schedule": {"name": "constant"}}})
    {'train.lr': 0.1, 'train.schedule.name': 'constant'}
    """
    return {".".join(place): value for place, value in leaves(tree, values)}


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> str:
    """Return the keys that tell two runs apart, in a line with both values; empty if it is the same run.

    If the secret of the noise alone differs, the line says what to do.

    Args:
        stored: the configuration in a run's folder.
        now: the configuration of the run that is to use the folder.
        finished: how many rounds the stored run has; asking for as many or more makes no other run.
    """
    a, b = _identity(stored), _identity(now)
    if b["train.rounds"] >= finished:
        a["train.rounds"] = b["train.rounds"]
    before, after = a.get("train.patience"), b.get("train.patience")
    if before is not None and (after is None or after > before):  # more patience continues the run
        a["train.patience"] = after
    for flat in (a, b):
        for key in [key for key in flat if key.startswith(("compare.", "code."))]:
            del flat[key]
    noise = "privacy.noise_id"
    if a.get(noise) != b.get(noise) and {**a, noise: ""} == {**b, noise: ""}:
        return "its noise is drawn from another secret: bring that one and its ledger (privacy.secret) to resume it"
    return identity.differences(a, b)


def setting_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the keys that tell two configurations apart, in a line with both values; empty if they are the same."""
    return identity.differences(_identity(one), _identity(other))


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a configuration that change the result."""
    flat = {key: value for key, value in flatten(config).items() if key not in NO_PART_OF_IDENTITY}
    if "run.device" in flat:
        flat["run.device"] = str(flat["run.device"]).partition(":")[0]  # which of several GPUs makes no difference
    return flat


def accepted_changes(stored: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> str:
    """Return how the user's code has changed since a run; refuse the change unless the run accepts it."""
    changes = identity.code_changes(stored, now)
    if changes and not now["run"].get("accept_changed_code"):
        raise BadInput(f"cannot resume the folder '{folder}': {changes}; {identity.ACCEPT}, {CHOOSE_ANOTHER}")
    return changes


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which must be a table."""
    try:
        value = json.loads(_read(path))
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a table")
    return value


def _read(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read()


# --- folders -----------------------------------------------------------------------------------------------------


def remove_records(folder: Path) -> None:
    """Delete the files of a run except its lease and its config.json, which marks the folder as lamina's.

    The metrics go first: what a kill leaves behind must not look complete. A file `REPLACED` stays until the caller
    deletes it: without it, what a kill leaves behind would look like a run with lost metrics.
    """
    (folder / REPLACED).touch()
    sync_folder(folder)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    for name in sorted(FILES - {"config.json"}):
        old = folder / name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)


def delete_runs(folder: Path, runs: Iterable[Path]) -> None:
    """Delete runs in a folder; refuse, before anything is deleted, one that is in use or holds anything else.

    A file `REPLACED` stays in the folder until the caller deletes it: without it, the next command would take the runs
    that a kill leaves behind for its own.
    """
    runs = [run for run in runs if is_ours(run)]
    for run in runs:
        refuse_foreign(run)
        take(run).release()
    (folder / REPLACED).touch()
    sync_folder(folder)
    for run in runs:
        lease = take(run)
        try:
            with writing_to(run):
                remove_records(run)
                shutil.rmtree(run)
        finally:
            lease.release()


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, without leases and half-written files."""
    with writing_to(folder):
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if not is_lease(name) and not name.endswith(PARTIAL)]


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds anything but a run."""
    names = names_in(folder)
    foreign = [name for name in names if name not in FILES]
    if foreign or (names and not is_ours(folder)):
        holds = f"other files ('{foreign[0]}')" if foreign else "no config.json of lamina that can be read"
        raise BadInput(f"the folder '{folder}' holds {holds}: choose a new or an empty one with --out (out=…)")


def is_ours(folder: Path) -> bool:
    """Return whether lamina wrote the folder's config.json."""
    try:
        return "lamina" in read_json(folder / "config.json")
    except BadInput:
        return False


def check_folder(folder: Path, key: str, whose: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that cannot be written to, or whose config.json lacks the key that tells what it holds."""
    check_writable(folder)
    if not names_in(folder):
        return
    config = read_json(folder / "config.json") if is_ours(folder) else {}
    if key not in config:
        raise BadInput(f"the folder '{folder}' holds other files than {whose}: choose another with --out (out=…)")
    if not overwrite:
        refuse_format(folder, config, CHOOSE_ANOTHER)
