"""Read a Hugging Face data set that an experiment file names, with a mapping of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.data import hub
from lamina.data.dataset import Splits
from lamina.data.labels import Task, held_out_rows, make_splits
from lamina.errors import BadInput, missing_extra, nearest
from lamina.paths import checked_path

SAVED_MARKS = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes


def read(
    root: Path,
    *,
    path: str,
    subset: str | None = None,
    features: str | None = None,
    label: str | None = None,
    train: str = "train",
    test: str | float | None = None,
    task: Task | None = None,
    client: str | None = None,
    online: bool = True,
) -> Splits:
    """Read a data set from the hub, from its local cache, or from a folder that ``save_to_disk`` wrote.

    Args:
        root: The folder that a relative path to a folder starts at.
        path: The name of the data set on the hub, or the folder.
        subset: The configuration, for a data set that has several.
        features: The column with the inputs: pictures, or numbers of one shape; guessed from the usual names if None.
        label: The column with the class or the target; guessed likewise.
        train: The split with the training data.
        test: The split with the test data, or the fraction of the training data to hold out; if None, the split
            ``test``, else 0.2.
        task: ``classification`` or ``regression``; regression for labels with fractions if None.
        client: The column that names the client of every sample.
        online: Whether the hub may be asked.
    """
    splits = _load(root, path, subset, online)
    if test is None:
        test = "test" if "test" in splits else 0.2
    for name in (train, test):
        if isinstance(name, str) and name not in splits:
            raise BadInput(f"{path} has no split '{name}'{nearest(name, splits)} (splits: {', '.join(splits)})")
    parts = [splits[name] for name in (train, test) if isinstance(name, str)]
    x, y, columns = [], [], []
    for part in parts:
        if client is not None and client not in part.column_names:
            known = ", ".join(part.column_names)
            raise BadInput(
                f"{path} has no column '{client}' (data.client){nearest(client, part.column_names)} ({known})"
            )
        options = ("data.features", "data.label")
        inputs, labels, others, _ = hub.arrays(part, features, label, text_labels=True, options=options)
        if client is not None and (client not in others or any(value is None for value in others[client])):
            raise BadInput(f"{path}: the column '{client}' (data.client) must hold a number or a text for every sample")
        x.append(_array(path, "features", inputs))
        y.append(_array(path, "labels", labels))
        columns.append(others)
    if len(parts) == 2:
        is_test = np.arange(len(y[0]) + len(y[1])) >= len(y[0])
        if x[0].shape[1:] != x[1].shape[1:]:
            raise BadInput(f"{path}: samples of {train} and {test} have shapes {x[0].shape[1:]} and {x[1].shape[1:]}")
    else:
        is_test = held_out_rows(path, len(y[0]), test)
    kept = {name: np.concatenate([part[name] for part in columns]) for name in columns[0] if name in columns[-1]}
    label = label or next(name for name in hub.LABEL_COLUMNS if name in parts[0].column_names)
    names = getattr(parts[0].features.get(label), "names", None)
    return make_splits(
        path, np.concatenate(x), np.concatenate(y), is_test,
        task=task, columns=kept, class_names=tuple(names) if names else None, name=Path(path).name,
    )  # fmt: skip


def _load(root: Path, path: str, subset: str | None, online: bool) -> Mapping[str, Any]:
    """Return the splits by name."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "hub", f"reading {path}") from error
    folder = checked_path(root / Path(path).expanduser(), "data.path")
    if any((folder / mark).is_file() for mark in SAVED_MARKS):
        try:
            loaded = datasets.load_from_disk(str(folder))
        except Exception as error:  # each layer below has its own exceptions
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"'{folder}' is not a readable data set ({reason}): save it again") from error
        return loaded if isinstance(loaded, Mapping) else {"train": loaded}
    if not online:
        raise BadInput(f"{path} is on the Hugging Face hub, which is not asked here")
    splits = hub.fetch(path, *([subset] if subset else []))
    assert splits is not None  # `datasets` is installed
    return splits


def _array(path: str, what: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise BadInput(f"{path}: the {what} have different shapes; give all samples one shape") from error
