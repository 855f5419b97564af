"""Create schedules, aggregations and partitions, which are dataclasses, by name, and import objects of the user's."""

from __future__ import annotations

import dataclasses
import importlib
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import BadInput, nearest, unknown


def create_named(what: str, classes: Mapping[str, type[Any]], name: str, options: Mapping[str, Any]) -> Any:
    """Return an object of the class with this name; refuse an unknown name, an unknown and a missing option.

    >>> from lamina.schedules import SCHEDULES
    >>> create_named("schedule", SCHEDULES, "exponential", {"gamma": 0.9})
    Exponential(gamma=0.9)
    """
    if name not in classes:
        raise unknown(what, name, classes)
    fields = dataclasses.fields(classes[name])
    names = [field.name for field in fields]
    refuse_unknown_options(f"{what} '{name}'", options, names)
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


def refuse_unknown_options(what: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that is not among the known ones; the message names the nearest and lists all."""
    for option in options:
        if option not in known:
            choices = f"its options: {', '.join(known)}" if known else "it has none"
            raise BadInput(f"{what} has no option '{option}'{nearest(option, known)} ({choices})")


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
        raise BadInput(f"cannot load the {what} '{name}': {error}{_searched(module) if is_theirs else ''}") from error
    except AttributeError as error:
        hint = nearest(error.name or "", dir(error.obj))
        raise BadInput(f"cannot load the {what} '{name}': {error}{hint}") from error
    except ImportError as error:
        raise BadInput(f"cannot load the {what} '{name}': {error}") from error
    except (Exception, SystemExit) as error:  # importing the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"cannot load the {what} '{name}': {reason}") from error


def _searched(module: str) -> str:
    """Say where a module was searched, and what to do."""
    here = str(Path.cwd())
    folder = here if {here, ""} & set(sys.path) else sys.path[0]
    file = f"{module.replace('.', '/')}.py"
    return f" in '{folder}' or among installed packages; start in the folder of {file}, or add that to PYTHONPATH"
