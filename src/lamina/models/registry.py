"""The registry of models, and checks of their input shapes and options."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from lamina.base.errors import BadInput, short_repr, unknown
from lamina.base.limits import MOST_UNITS, check_count

Factory = Callable[..., nn.Module]
_F = TypeVar("_F", bound=Factory)

GIVEN = ("input_shape", "classes")  # what the data decide; everything else a factory takes is an option


class Card(NamedTuple):
    """What the registry knows about a model; feeds the CLI, the docs and the tests."""

    name: str
    description: str  # the first line of the factory's docstring
    paper: str
    options: Mapping[str, Any]  # name -> default
    factory: Factory


_REGISTRY: dict[str, Card] = {}


def model(paper: str) -> Callable[[_F], _F]:
    """Register a factory under its own name; its keyword arguments are the model's options."""

    def decorate(factory: _F) -> _F:
        parameters = inspect.signature(factory).parameters
        options = {name: p.default for name, p in parameters.items() if name not in GIVEN}
        description = (inspect.getdoc(factory) or "").partition("\n")[0]
        _REGISTRY[factory.__name__] = Card(factory.__name__, description, paper, options, factory)
        return factory

    return decorate


def registry() -> Mapping[str, Card]:
    """Return all registered models by name."""
    return _REGISTRY


def image(model: str, input_shape: Sequence[int], classes: int, least: int) -> tuple[int, int, int]:
    """Return channels, height and width of `input_shape`, or refuse a shape that `model` cannot take."""
    shape = checked_shape(model, input_shape, classes)
    if len(shape) == 3 and min(shape[1:]) >= least:
        return shape[0], shape[1], shape[2]
    others = "mlp takes any shape" if least <= 2 else "small_cnn takes 2x2 and up, mlp any shape"
    raise BadInput(
        f"{model} needs images [channels, height, width] of at least {least}x{least}, not {list(shape)}: {others}"
    )


def checked_shape(model: str, input_shape: Sequence[int], classes: int) -> tuple[int, ...]:
    """Return `input_shape` as a tuple, or refuse a shape or a number of classes that no model can take."""
    whole("classes", classes)
    try:
        shape = tuple(operator.index(n) for n in input_shape)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise BadInput(f"{model}: input_shape must be positive whole numbers such as [1, 28, 28], not {input_shape!r}")
    return shape


def whole(option: str, value: Any) -> int:
    """Return `value` as an int >= 1 that a layer can have."""
    return check_count(option, value, MOST_UNITS)


def wholes(option: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    """Return `value` as a tuple of ints >= 1, of a fixed length if one is given."""
    many = "whole numbers" if length is None else f"{length} whole numbers"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != (length or len(value)):
        raise BadInput(f"{option} must be a list of {many}, not {short_repr(value)}")
    return tuple(whole(option, n) for n in value)


def choice(option: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices."""
    if value not in choices:
        raise unknown(option, str(value), choices)
    return str(value)
