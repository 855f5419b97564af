"""Declare an algorithm: its options, its name and its presets. The registry holds all that are declared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from torch import Tensor

from lamina.algorithms.contract import Algorithm, Card
from lamina.base.errors import BadInput, is_number, short_repr
from lamina.base.registry import explain_options, option_owners

# Settings of training that may be taken for options of an algorithm.
TRAINING_SETTINGS = (
    "lr", "schedule", "batch_size", "epochs", "local_steps", "clip", "participation", "seed", "loss", "private",
    "weighting", "aggregation",
)  # fmt: skip
_REGISTRY: dict[str, type[Algorithm]] = {}
A = TypeVar("A", bound=Algorithm)


def option(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, open_low: bool = False
) -> Any:
    """Declare an option: its default, a line of documentation with the paper's symbol, and its range."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high, "open_low": open_low})


@dataclass_transform(frozen_default=True)
def algorithm(
    name: str,
    *,
    title: str,
    reference: str = "",
    link: str = "",
    lr: float,
    paper_cost: int | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    grids: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
) -> Callable[[type[A]], type[A]]:
    """Make a class a frozen, validated dataclass and add it to the registry. Use it as a decorator."""

    def decorate(cls: type[A]) -> type[A]:
        def check(self: Algorithm) -> None:
            _check_options(self)
            self.check()

        other = _REGISTRY.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadInput(f"an algorithm named '{name}' exists already ({other.__module__}): choose another name")
        if "__post_init__" in vars(cls):
            raise BadInput(f"the algorithm '{name}' has a function __post_init__: call it check")
        cls.__post_init__ = check  # type: ignore[attr-defined]
        record = dataclasses.dataclass(frozen=True, eq=False)(cls)
        explain_options(record, option_places)
        record.card = Card(name, title, reference, link, lr, paper_cost, presets or {}, grids or {})
        _REGISTRY[name] = record
        for preset in record.card.presets.values():
            record(**preset)  # an invalid preset is a bug, so it fails at import
        return record

    return decorate


def registry() -> Mapping[str, type[Algorithm]]:
    """Return all registered algorithms by name."""
    return _REGISTRY


def options(cls: type[Algorithm]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of an algorithm class by name."""
    return {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


def option_places() -> dict[str, str]:
    """Return for every option of any algorithm a hint which of them have it; and for settings of training, that."""
    places = option_owners({cls.__name__: cls for cls in _REGISTRY.values()})
    places["momentum"] = (
        f": FedAvg with momentum on the server is FedAvgM (its 'mu'){places['momentum'].replace(':', ';', 1)}"
    )
    return places | {
        name: f": '{name}' is a setting of training, Simulation(…, {name}=…) or train.{name} in a file"
        for name in TRAINING_SETTINGS
    }


def allowed(cls: type[Algorithm], option: str) -> str:
    """Return in words what an option accepts: ``'l2' or 'decoupled'``, ``a number > 0``."""
    hint, limits = get_type_hints(cls)[option], options(cls)[option].metadata
    if get_origin(hint) is Literal:
        return " or ".join(repr(v) for v in get_args(hint))
    if hint in (bool, str):
        return "true or false" if hint is bool else "a text"
    low, high = limits.get("low"), limits.get("high")
    bounds = [] if low is None else [f"{'>' if limits['open_low'] else '>='} {low:g}"]
    bounds += [] if high is None else [f"<= {high:g}"]
    return " ".join(["a whole number" if hint is int else "a number", " and ".join(bounds)]).strip()


def _fits(value: Any, hint: Any, limits: Mapping[str, Any]) -> bool:
    if isinstance(value, Tensor):  # one value per experiment of a population
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (bool, str):
        return isinstance(value, hint)
    if not isinstance(value, int if hint is int else (int, float)) or not is_number(value) or math.isnan(value):
        return False
    if isinstance(value, int) and abs(value) >= 2**63:  # torch's integers have 64 bits
        return False
    low, high = limits.get("low"), limits.get("high")
    too_low = low is not None and (value <= low if limits["open_low"] else value < low)
    return not too_low and (high is None or value <= high)


def _check_options(self: Algorithm) -> None:
    cls = type(self)
    hints = get_type_hints(cls)
    for name, field in options(cls).items():
        value = getattr(self, name)
        if not _fits(value, hints[name], field.metadata):
            raise BadInput(f"{cls.__name__}: {name} = {short_repr(value)} is not {allowed(cls, name)}")
        if _is_infinite(value) and not _is_infinite(field.default):  # an infinite default says that there is no limit
            raise BadInput(f"{cls.__name__}: {name} = {value} is not finite: give {allowed(cls, name)}")


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)
