"""Settings: names of what is tried and the values they are given; how they are combined, written and judged."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lamina import algorithms
from lamina.errors import BadInput, is_number
from lamina.limits import MOST_POINTS

Settings = dict[str, Any]  # names, or dotted keys of an experiment, to values
Grid = dict[str, list[Any]]


def points(grid: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Return all combinations of a grid's values, each once.

    >>> points({"lr": [0.1, 0.3, 0.1], "decay": [0.0]})
    [{'lr': 0.1, 'decay': 0.0}, {'lr': 0.3, 'decay': 0.0}]
    """
    once = [[value for i, value in enumerate(values) if value not in values[:i]] for values in grid.values()]
    count = math.prod(len(values) for values in once)
    if count > MOST_POINTS:
        raise BadInput(f"the grid has {count} combinations: give at most {MOST_POINTS}, or sampler = 'tpe' and a space")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*once)]


def short_names(keys: Sequence[str]) -> list[str]:
    """Return keys without their sections, where they stay distinct.

    >>> short_names(["train.lr", "algorithm.decay"]), short_names(["model.name", "algorithm.name"])
    (['lr', 'decay'], ['model.name', 'algorithm.name'])
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def written(settings: Settings) -> str:
    """Return settings as a line for people.

    >>> written({"train.lr": 0.1, "algorithm.decay": 0.0})
    'lr 0.1, decay 0'
    """
    names = short_names(list(settings))
    return ", ".join(f"{name} {shown(value)}" for name, value in zip(names, settings.values(), strict=True))


def shown(value: Any) -> str:
    """Return a value as text for people."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def shown_name(algorithm: str, title: str) -> str:
    """Return an algorithm's name for a table: its short name, or the title of a user's own algorithm.

    >>> shown_name("fedlamb", "Fed-LAMB"), shown_name("my_project.methods:Mine", "My-LAMB")
    ('fedlamb', 'My-LAMB')
    """
    return title if ":" in algorithm else algorithm


def folder_name(settings: Settings) -> str:
    """Return a folder name for a point of a grid.

    >>> folder_name({"train.lr": 0.1, "algorithm.decay": 0.0})
    'lr0.1-decay0.0'
    """
    parts = [
        f"{name}{value!r}" if is_number(value) else f"{name}-{shown(value)}"
        for name, value in zip(short_names(list(settings)), settings.values(), strict=True)
    ]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))


def at_ends(value: Any, tried: Sequence[Any]) -> tuple[bool, bool]:
    """Return whether a value is the smallest and whether it is the largest of the numbers tried.

    >>> at_ends(0.1, [0.1, 0.3]), at_ends(0.1, [0.1]), at_ends("tensor", ["tensor", "module"])
    ((True, False), (False, False), (False, False))
    """
    if not all(is_number(other) for other in tried) or min(tried) == max(tried):
        return False, False
    return value == min(tried), value == max(tried)


def way_beyond(value: Any, ends: tuple[bool, bool], algorithm: str, option: str) -> str:
    """Return which values to try beyond one at an end, "smaller" or "larger"; empty if there are none.

    Args:
        value: the best value.
        ends: whether it is the smallest, and whether it is the largest of those tried.
        algorithm: the algorithm that was tried.
        option: its option, whose bounds no value may exceed; any other name has no bounds.
    """
    known = algorithms.options(algorithms.find(algorithm))
    bounds = known[option].metadata if option in known else {}
    low, high = ends[0] and value != bounds.get("low"), ends[1] and value != bounds.get("high")
    return "" if low == high else "smaller" if low else "larger"
