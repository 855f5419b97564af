"""Read data in LEAF's JSON format, whose users are natural clients."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamina.base.errors import BadInput, short_repr
from lamina.base.paths import refuse_special
from lamina.base.text import listed, plural
from lamina.data.convert import convert
from lamina.data.dataset import Splits
from lamina.data.readers.files import read_own_parts
from lamina.data.readers.labels import Task, make_splits, mark_test_rows

log = logging.getLogger(__name__)

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
    place, train, held_out = read_own_parts(root, path, test, _read_all)
    x, y, users = [mine + others for mine, others in zip(train, held_out or ([], [], []), strict=True)]
    is_test = mark_test_rows(str(place), len(train[1]), None if held_out is None else len(held_out[1]), test)
    values, mask = convert(str(place), "x", x)
    if mask is not None and not tokens:
        raise BadInput(f"{place}: the samples of x have different lengths; token ids need data.tokens = true")
    inputs = values.numpy() if tokens else values.numpy().astype(np.float32)
    if shape is not None:
        try:
            inputs = inputs.reshape(len(inputs), *shape)
        except (ValueError, OverflowError, TypeError) as error:  # such as too many axes, or lengths beyond int64
            found = f"does not fit samples of shape {list(inputs.shape[1:])}"
            raise BadInput(f"{place}: data.shape = {short_repr(shape)} {found}") from error
    columns = {USER_COLUMN: np.asarray(users, dtype=np.str_)}
    return make_splits(str(place), inputs, y, is_test, task=task, columns=columns, name=place.stem, mask=mask)


def _read_all(place: Path) -> Samples:
    """Return the samples of a JSON file, or of all JSON files in a folder."""
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise BadInput(f"'{place}' holds no JSON files: expected are LEAF's train/*.json and test/*.json")
    x: list[Any] = []
    y: list[Any] = []
    users: list[str] = []
    empty: list[str] = []
    for file in files:
        for user, samples in _read_file(file).items():
            inputs, labels = _samples(file, user, samples)
            x += inputs
            y += labels
            users += [user] * len(labels)
            empty += [user] * (not labels)
    if not y:
        raise BadInput(f"'{place}' holds no samples; give at least one")
    if empty:
        log.warning("%s: users without samples, which are ignored: %s", place, listed(empty))
    return x, y, users


def _read_file(file: Path) -> Mapping[str, Any]:
    """Return the table ``user_data`` of one file."""
    refuse_special(file)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} is not valid JSON ({error}): it is damaged or incomplete") from error
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict):
        raise BadInput(f"{file} is not in LEAF's format: it lacks the table 'user_data'")
    return users


def _samples(file: Path, user: str, samples: Any) -> tuple[list[Any], list[Any]]:
    x, y = (samples.get(key) if isinstance(samples, dict) else None for key in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list):
        raise BadInput(f"{file}: user '{user}' lacks the list 'x' or 'y'")
    if len(x) != len(y):
        counts = f"{plural(len(x), 'sample')} and {plural(len(y), 'label')}"
        raise BadInput(f"{file}: user '{user}' has {counts}; give one label each")
    return x, y
