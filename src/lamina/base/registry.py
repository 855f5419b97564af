"""Create schedules, aggregations and partitions, which are dataclasses, by name, and import objects of the user's."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.base.errors import BadInput, extra_hint, nearest, short_repr, unknown, where_it_failed
from lamina.base.text import listed


def create_named(what: str, classes: Mapping[str, type[Any]], name: str, options: Mapping[str, Any]) -> Any:
    """Return an object of the class with this name; refuse an unknown name, an unknown and a missing option.

    >>> from lamina.rounds.schedules import SCHEDULES
    >>> create_named("schedule", SCHEDULES, "exponential", {"gamma": 0.9})
    Exponential(gamma=0.9)
    """
    if not isinstance(name, str) or name not in classes:
        raise unknown(what, name, classes)
    fields = dataclasses.fields(classes[name])
    names = [field.name for field in fields]
    refuse_unknown_options(f"{what} '{name}'", options, names, places=option_owners(classes))
    for field in fields:
        has_default = not (field.default is field.default_factory is dataclasses.MISSING)
        if field.name not in options and not has_default:
            raise BadInput(f"{what} '{name}' needs the option '{field.name}'")
    return classes[name](**options)


def field_values(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object by name; an object of another kind has none."""
    if not dataclasses.is_dataclass(record):
        return {}
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def as_object(what: str, given: Any, make: Callable[..., Any], method: str, example: str) -> Any:
    """Return what is given by name, as a table with a name and options, or as an object with a method.

    >>> from lamina.rounds.schedules import make_schedule
    >>> as_object("schedule", {"name": "cosine", "rounds": 9}, make_schedule, "factor", "lamina.schedules.Cosine(9)")
    Cosine(rounds=9, floor=0.0)
    """
    if isinstance(given, str):
        return make(given)
    if isinstance(given, Mapping) and "name" in given and all(isinstance(key, str) for key in given):
        return make(**given)
    if isinstance(given, type) or not callable(getattr(given, method, None)):
        value = f"the class {given.__name__}" if isinstance(given, type) else short_repr(given)
        raise BadInput(f"{what} is {value}: give a name, a table {{'name': …}}, or an object such as {example}")
    return given


def refuse_unknown_options(
    what: str,
    options: Iterable[str],
    known: Sequence[str],
    other_keys: Sequence[str] = ("name",),
    places: Mapping[str, str] | None = None,
    noun: str = "option",
) -> None:
    """Refuse an option that is not among the known ones; the message names the nearest, also of other keys.

    `places` has hints for options that belong elsewhere, and `noun` is what the message calls an option.
    """
    for option in options:
        if option not in known:
            choices = f"its {noun}s: {', '.join(known)}" if known else "it has none"
            hint = nearest(str(option), [*known, *other_keys], places)
            raise BadInput(f"{what} has no {noun} '{option}'{hint} ({choices})")


def option_owners(classes: Mapping[str, type[Any]]) -> dict[str, str]:
    """Return for every option of some dataclasses a hint which of them have it.

    >>> from lamina.data.partitions import PARTITIONS
    >>> option_owners(PARTITIONS)["alpha"]
    ": 'alpha' is an option of dirichlet"
    """
    owners: dict[str, list[str]] = {}
    for name, cls in classes.items():
        for field in dataclasses.fields(cls):
            owners.setdefault(field.name, []).append(name)
    return {option: f": '{option}' is an option of {listed(names)}" for option, names in owners.items()}


def explain_options(cls: type[Any], places: Callable[[], Mapping[str, str]] = dict) -> None:
    """Let the constructor of a class name the nearest option, or the place, of one that it does not have."""
    create = cls.__init__
    names = [name for name in parameters_of(create)[0] if name != "self"]

    @functools.wraps(create)
    def checked(self: Any, *values: Any, **options: Any) -> None:
        if not options.keys() <= set(names):
            refuse_unknown_options(cls.__name__, options, names, (), places())
        create(self, *values, **options)

    cls.__init__ = checked


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be given by name, and whether the function takes any others as well."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return {}, True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name: each for each in parameters if each.kind in by_name}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def import_named(what: str, name: str) -> Any:
    """Return the user's object ``package.module:attribute``; `what` says what it should be, for messages.

    >>> import_named("model", "math:sqrt")(4)
    2.0
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise BadInput(f"your own {what} is named 'package.module:name', not '{name}'")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        is_theirs = f"{module}.".startswith(f"{error.name}.")  # else a module that theirs imports is missing
        hint = _searched(module, attribute) if is_theirs else extra_hint(error)
        raise BadInput(f"cannot load the {what} '{name}': {error}{hint}") from error
    except AttributeError as error:
        hint = nearest(error.name or "", dir(error.obj))
        raise BadInput(f"cannot load the {what} '{name}': {error}{hint}") from error
    except ImportError as error:
        raise BadInput(f"cannot load the {what} '{name}': {error}") from error
    except (Exception, SystemExit) as error:  # importing the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where = where_it_failed(error)
        raise BadInput(f"cannot load the {what} '{name}': {reason}{f' ({where})' if where else ''}") from error


def _searched(module: str, attribute: str) -> str:
    """Say where a module was searched, and what to do."""
    if module.endswith(".py"):
        return f": leave out .py, '{module.removesuffix('.py')}:{attribute}'"
    here = str(Path.cwd())
    folder = here if {here, ""} & set(sys.path) else sys.path[0]
    file = f"{module.replace('.', '/')}.py"
    return f" in '{folder}' or among installed packages; start in the folder of {file}, or add that to PYTHONPATH"
