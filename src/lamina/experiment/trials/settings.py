"""Settings: names of what is tried and the values they are given; how they are combined, written and judged."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina import algorithms
from lamina.base.errors import BadInput, is_number, is_whole
from lamina.base.limits import MOST_POINTS

Settings = dict[str, Any]  # names, or dotted keys of an experiment, to values
Grid = dict[str, list[Any]]
EDGE_FRACTION = 0.05  # of a range: values this close to an end are on the edge


@dataclass(frozen=True)
class Range:
    """The values to try for a key: numbers between two ends, or a list."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def samples(self) -> tuple[Any, ...]:
        """Return values to check before anything runs."""
        return self.choices or (self.low, self.high)

    @property
    def described(self) -> list[Any]:
        """Return the range as a list, for the configuration."""
        return list(self.choices) or [self.low, self.high, "log" if self.log else "linear"]

    def suggest(self, trial: Any, key: str) -> Any:
        """Return the value that Optuna proposes."""
        if self.choices:
            return trial.suggest_categorical(key, self.choices)
        if is_whole(self.low) and is_whole(self.high):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)

    def ends(self, value: Any) -> tuple[bool, bool]:
        """Return whether a value is at or near the lower end, and the upper end.

        >>> Range(choices=(0.1, 0.3)).ends(0.1), Range(choices=("a", "b")).ends("a"), Range(0, 100).ends(98)
        ((True, False), (False, False), (False, True))
        """
        if self.choices:
            if not all(is_number(choice) for choice in self.choices) or min(self.choices) == max(self.choices):
                return False, False
            return value == min(self.choices), value == max(self.choices)
        low, high, place = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = (place - low) / (high - low)
        return share <= EDGE_FRACTION, share >= 1 - EDGE_FRACTION

    def way_beyond(self, value: Any, algorithm: str, key: str) -> str:
        """Return which values to try if the best one is at an end, "smaller" or "larger"; else an empty string.

        No value can lie beyond the bounds of an option of the algorithm.
        """
        options = algorithms.options(algorithms.find(algorithm))
        option = key.removeprefix("algorithm.")  # a key of another section has a dot, and is not an option
        bounds = options[option].metadata if option in options else {}
        is_low, is_high = self.ends(value)
        low, high = is_low and value != bounds.get("low"), is_high and value != bounds.get("high")
        return "" if low == high else "smaller" if low else "larger"

    def edge_warning(self, value: Any, algorithm: str, key: str) -> str:
        """Return a warning if the best value of a key is at an end; else an empty string."""
        way = self.way_beyond(value, algorithm, key)
        return way and f"the best {key} = {value:g} lies on the edge of those tried: try {way} values"


def points(grid: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Return all combinations of a grid's values, each once.

    >>> points({"lr": [0.1, 0.3, 0.1], "decay": [0.0]})
    [{'lr': 0.1, 'decay': 0.0}, {'lr': 0.3, 'decay': 0.0}]
    """
    once: list[list[Any]] = []
    for values in grid.values():
        kept: list[Any] = []
        for value in values:
            if value not in kept:
                kept.append(value)
        once.append(kept)
    count = math.prod(len(values) for values in once)
    if count > MOST_POINTS:
        raise BadInput(f"the grid has {count} combinations: give at most {MOST_POINTS}, or sampler = 'tpe' and a space")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*once)]


def neighbours(grid: Sequence[Settings], point: Settings) -> list[int]:
    """Return the positions of a point's neighbours on a grid: no value is more than one step from the point's.

    Numbers are ordered by size; values of other kinds are all one step apart.

    >>> neighbours(points({"lr": [0.1, 0.01, 1.0, 0.001]}), {"lr": 0.1})
    [1, 2]
    """
    near: dict[str, list[Any]] = {}
    for key, value in point.items():
        near[key] = [other[key] for other in grid]
        if all(is_number(number) for number in near[key]):
            smaller, larger = [x for x in near[key] if x < value], [x for x in near[key] if x > value]
            near[key] = [max(smaller, default=value), value, min(larger, default=value)]
    return [i for i, other in enumerate(grid) if other != point and all(other[key] in near[key] for key in point)]


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
