"""Check the options that an experiment file gives to a function that reads data."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lamina.errors import BadInput, is_number, nearest, short_repr

_NOUNS = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be given by name, and whether the function takes any others as well."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return {}, True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name: each for each in parameters if each.kind in by_name}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def check_names(
    name: str, function: Callable[..., Any], options: Mapping[str, Any], other_keys: Mapping[str, Any]
) -> None:
    """Refuse an option of `[data]` that the function does not take, and a missing one that it needs.

    Args:
        name: the name of the data, for messages.
        function: the function that reads the data.
        options: the options by name.
        other_keys: further keys of `[data]`, to suggest, and which the function takes if it has such a parameter.
    """
    known, takes_others = parameters_of(function)
    names = [each for each in known if each not in other_keys and each != "root"]
    for option in options:
        if option not in names and not takes_others:
            listing = f"options of {name}: {', '.join(names)}" if names else f"{name} has no options"
            raise BadInput(f"[data] has no key '{option}'{nearest(option, [*other_keys, *names])} ({listing})")
    for option in names:
        if option not in options and known[option].default is inspect.Parameter.empty:
            raise BadInput(f"[data] needs the key '{option}' for {name} (options: {', '.join(names)})")


def check_types(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an option whose value is not of the annotated type."""
    hints = get_type_hints(function)
    for option, value in options.items():
        if not _fits(value, hints[option]):
            raise BadInput(f"data.{option} = {short_repr(value)}: must be {_words(hints[option])}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, get_args(hint)[0]) for each in value)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return is_number(value) if hint is float else type(value) is hint


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(each) for each in get_args(hint) if each is not types.NoneType)
    if get_origin(hint) is list:
        return f"a list of {'texts' if get_args(hint)[0] is str else 'whole numbers'}"
    if get_origin(hint) is Literal:
        return " or ".join(f"'{each}'" for each in get_args(hint))
    return _NOUNS[hint]
