"""Read data in LEAF's JSON format, whose users are natural clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamina.data.convert import convert
from lamina.data.dataset import Splits
from lamina.data.files import own_path
from lamina.data.labels import Task, held_out_rows, make_splits
from lamina.errors import BadInput
from lamina.losses import IGNORED
from lamina.paths import refuse_special
from lamina.text import plural

USER_COLUMN = "user"
Samples = tuple[list[Any], list[Any], list[str]]  # inputs, labels, and the user of each


def read(
    root: Path,
    *,
    path: str,
    test: str | float | None = None,
    shape: list[int] | None = None,
    tokens: bool = False,
    task: Task | None = None,
) -> Splits:
    """Read LEAF's files; the column `user` names the client of every sample.

    Args:
        root: The folder that relative paths start at.
        path: The folder with ``train/*.json`` and ``test/*.json``; or a folder with JSON files; or one JSON file.
        test: A file or folder with the test data, or the fraction of the samples to hold out: 0.2 if there is no
            ``test/``.
        shape: The shape of a sample, for example ``[1, 28, 28]``; LEAF stores images as flat lists.
        tokens: Whether x holds token ids: integers, whose sequences are padded at the end, as `Dataset` does it.
        task: ``classification`` or ``regression``; regression for floats if None.
    """
    place = own_path(root, path)
    held_out: Samples | None = None
    if (place / "train").is_dir() and (place / "test").is_dir():
        if test is not None:
            raise BadInput(f"'{place}' holds train/ and test/: take data.test out, or set data.path to one of them")
        train, held_out = _read_all(place / "train"), _read_all(place / "test")
    else:
        train = _read_all(place)
        if isinstance(test, str):
            held_out = _read_all(own_path(root, test))
    x, y, users = [mine + others for mine, others in zip(train, held_out or ([], [], []), strict=True)]
    if held_out is None:
        is_test = held_out_rows(str(place), len(y), 0.2 if test is None else test)
    else:
        is_test = np.arange(len(y)) >= len(train[1])
    if any(isinstance(sample, str) for sample in x):
        raise BadInput(f"{place}: x holds text: number it in a function of your own (data.name = 'my_module:load')")
    mask = None
    try:
        if tokens:
            values, mask = convert(str(place), "x", x)
            inputs = values.numpy()
        else:
            inputs = np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{place}: the samples of x are not numbers of one shape; token ids need data.tokens = true"
        ) from error
    if shape is not None:
        try:
            inputs = inputs.reshape(len(inputs), *shape)
        except ValueError as error:
            found = list(inputs.shape[1:])
            raise BadInput(f"{place}: data.shape = {shape} does not fit samples of shape {found}") from error
    columns = {USER_COLUMN: np.asarray(users, dtype=np.str_)}
    per_token = isinstance(y[0], list)
    targets = convert(str(place), "y", y, IGNORED).values.numpy() if per_token else np.asarray(y)
    return make_splits(str(place), inputs, targets, is_test, task=task, columns=columns, name=place.stem, mask=mask)


def _read_all(place: Path) -> Samples:
    """Return the samples of a JSON file, or of all JSON files in a folder."""
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise BadInput(f"'{place}' holds no JSON files: expected are LEAF's train/*.json and test/*.json")
    x: list[Any] = []
    y: list[Any] = []
    users: list[str] = []
    for file in files:
        for user, samples in _read_file(file).items():
            inputs, labels = _samples(file, user, samples)
            x += inputs
            y += labels
            users += [user] * len(labels)
    if not y:
        raise BadInput(f"'{place}' holds no samples; give at least one")
    return x, y, users


def _read_file(file: Path) -> Mapping[str, Any]:
    """Return the table ``user_data`` of one file, after checking that it lists the users of the file."""
    refuse_special(file)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} is not valid JSON ({error}): it is damaged or incomplete") from error
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict):
        raise BadInput(f"{file} is not in LEAF's format: it lacks the table 'user_data'")
    missing = [user for user in content.get("users", []) if user not in users]
    if missing:
        raise BadInput(f"{file}: user '{missing[0]}' has no entry in 'user_data': the file is incomplete")
    return users


def _samples(file: Path, user: str, samples: Any) -> tuple[list[Any], list[Any]]:
    if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in ("x", "y")):
        raise BadInput(f"{file}: user '{user}' lacks the lists 'x' and 'y'")
    if len(samples["x"]) != len(samples["y"]):
        counts = f"{plural(len(samples['x']), 'sample')} and {plural(len(samples['y']), 'label')}"
        raise BadInput(f"{file}: user '{user}' has {counts}; give one label each")
    return samples["x"], samples["y"]
