"""Read a Hugging Face data set that an experiment file names, with a mapping of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamina.base.errors import BadInput, missing_extra, nearest
from lamina.base.paths import checked_path
from lamina.data import hub
from lamina.data.convert import convert
from lamina.data.dataset import Splits
from lamina.data.readers.labels import Task, make_splits, mark_test_rows
from lamina.objective.losses import IGNORED

SAVED_MARKS = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes


def read(
    root: Path,
    *,
    path: str,
    subset: str | None = None,
    features: str | list[str] | None = None,
    label: str | None = None,
    train: str = "train",
    test: str | float | None = None,
    task: Task | None = None,
    ignore_index: int = IGNORED,
    client: str | None = None,
    online: bool = True,
) -> Splits:
    """Read a data set from the hub, from its local cache, or from a folder that ``save_to_disk`` wrote.

    Args:
        root: The folder that a relative path to a folder starts at.
        path: The name of the data set on the hub, or the folder.
        subset: The configuration, for a data set that has several.
        features: The column with the inputs: pictures or numbers, or a list of columns, which become a dict. If None,
            it is guessed from the usual names; of tokenised text, all columns of the tokenizer are inputs. Sequences of
            different length are padded at the end, as `Dataset` does it.
        label: The column with the class or the target; guessed likewise. It may be that of the inputs: for a language
            model, the tokens are both.
        train: The split with the training data.
        test: The split with the test data, or the fraction of the training data to hold out; if None, the split
            ``test``, else 0.2.
        task: ``classification`` or ``regression``; regression for floats if None, even whole ones.
        ignore_index: The integer that marks pixels or tokens without a label.
        client: The column that names the client of every sample.
        online: Whether the hub may be asked.
    """
    splits = _load(root, path, subset, online)
    if test is None and "test" in splits:
        test = "test"
    for name in (train, test):
        if isinstance(name, str) and name not in splits:
            raise BadInput(f"{path} has no split '{name}'{nearest(name, splits)} (splits: {', '.join(splits)})")
    parts = [splits[name] for name in (train, test) if isinstance(name, str)]
    x: dict[str, list[Any]] = {}
    y: list[Any] = []
    columns = []
    for part in parts:
        options = ("data.features", "data.label")
        inputs, labels, others, _ = hub.arrays(part, features, label, options=options)
        if client is not None and (client not in others or any(value is None for value in others[client])):
            hint = nearest(client, set(part.column_names) - {client})
            raise BadInput(f"{path} has no column '{client}' (data.client) with a number or text in every sample{hint}")
        for name, values in (inputs if isinstance(inputs, dict) else {"": inputs}).items():
            x.setdefault(name, []).extend(values)
        y += labels
        columns.append(others)
    is_test = mark_test_rows(path, len(parts[0]), len(parts[1]) if len(parts) == 2 else None, test)
    kept = {name: np.concatenate([part[name] for part in columns]) for name in columns[0] if name in columns[-1]}
    label = label or next(name for name in hub.LABEL_COLUMNS if name in parts[0].column_names)
    feature = parts[0].features.get(label)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of every token, or of the sample
    padded = {name: convert(path, f"the column '{name}'" if name else "the features", x[name]) for name in x}
    values = {name: each.values.numpy() for name, each in padded.items()}
    masks = {name: each.mask for name, each in padded.items() if each.mask is not None}
    return make_splits(
        path, values.get("", values), y, is_test, mask=masks.get("", masks) if masks else None, task=task,
        ignore_index=ignore_index, columns=kept, class_names=tuple(names) if names else None, name=Path(path).name,
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
    if folder.exists() or path.count("/") > 1 or path[:1] in "./~":
        raise BadInput(f"'{folder}' is not a folder that save_to_disk wrote (data.path)")
    if not online:
        raise BadInput(f"{path} is on the Hugging Face hub, which is not asked here")
    try:
        return hub.fetch(path, *([subset] if subset else []))
    except BadInput as error:
        raise BadInput(f"{error}, and there is no such folder here") from error
