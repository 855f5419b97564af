"""The files of a run: which names belong to one, whether a folder holds one, and how to delete it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from lamina.errors import BadInput
from lamina.experiment.records import read_json, refuse_format
from lamina.storage.files import PARTIAL, check_writable, sync_folder, writing_to
from lamina.storage.locks import Lock

FILES = {
    "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "best.safetensors",
    "model.safetensors", "diverged.json", "lock", "tensorboard", "mlflow.json", "federation.jsonl",
}  # fmt: skip
CHOOSE_ANOTHER = "choose another with --out, or give --overwrite"


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
            raise BadInput(f"the folder '{run}' holds other files ('{foreign[0]}'): choose another with --out")
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
        raise BadInput(f"the folder '{folder}' holds {holds}: choose another with --out")
    if not overwrite:
        refuse_format(folder, config, CHOOSE_ANOTHER)
