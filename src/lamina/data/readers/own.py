"""Load data of the user's own: with a function of theirs, or from files in a common format."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lamina.base.errors import BadInput, LaminaError, describe_error, is_number, nearest, short_repr
from lamina.base.registry import import_named, parameters_of
from lamina.data.dataset import Dataset, Splits, as_dataset
from lamina.data.hub import is_hub_dataset
from lamina.data.joining import as_data
from lamina.data.matching import inherit_normalisation, match
from lamina.data.readers import arrays, folders, table
from lamina.data.readers.files import data_directory
from lamina.data.readers.labels import refuse_unseen_classes

_NOUNS = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}
GIVE_A_PAIR = "return (train, test), each a lamina.Dataset, a pair (x, y) or (x, y, {'column': values})"


@dataclass(frozen=True)
class Format:
    """A file format: what it holds, and the function that reads it, whose keyword arguments are its options."""

    description: str
    read: Callable[..., Splits]


FORMATS: dict[str, Format] = {
    "table": Format("your own CSV or Parquet file, with label, feature and client columns", table.read),
    "images": Format("your own pictures in one folder per class", folders.read),
    "arrays": Format("your own arrays in a .npz or .safetensors file", arrays.read),
}


def load_format(name: str, data_dir: Any, options: Mapping[str, Any], client: str | None) -> Splits:
    """Read files of a format; relative paths start at `data_dir`, else at the current folder."""
    named = options.get("test")
    if isinstance(named, Mapping):  # every file is read with the training data, whose classes and columns count
        first, *others = (load_format(name, data_dir, {**options, "test": file}, client) for file in named.values())
        more_tests = {key: splits.test for key, splits in zip(list(named)[1:], others, strict=True)}
        return Splits(first.train, dataclasses.replace(first.test, more_tests=more_tests))
    root = Path() if data_dir is None else data_directory(data_dir)
    parameters, _ = parameters_of(FORMATS[name].read)
    return FORMATS[name].read(root, **options, **({"client": client} if "client" in parameters else {}))


def load_own(name: str, data_dir: Any, options: Mapping[str, Any], client: str | None) -> Splits:
    """Call the user's function ``package.module:function`` and convert what it returns.

    The function gets the options by name, and `dir` and `client` of `[data]` if it has arguments of these names.
    """
    function = import_named("data", name)
    if not callable(function):
        raise BadInput(f"the data '{name}' are of type {type(function).__name__}: name a function that returns them")
    given = {"dir": data_dir, "client": client}
    check_names(name, function, options, given)
    parameters, _ = parameters_of(function)
    try:
        result = function(**options, **{key: value for key, value in given.items() if key in parameters})
    except LaminaError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise BadInput(f"cannot load the data '{name}': {describe_error(error)}") from error
    splits = as_splits(name, result)
    if splits.train.client_column is not None and client is None:
        raise BadInput(
            f"'{name}' returns the data of each client: add client = \"{splits.train.client_column}\" to [data]"
        )
    return splits


def as_splits(name: str, result: Any) -> Splits:
    """Return training and test data in one of the forms that a user's function may return.

    >>> train, test = as_splits("m:load", (([[0.0], [1.0]], ["no", "yes"]), ([[2.0]], ["yes"])))
    >>> test.y, test.class_names
    (tensor([1]), ('no', 'yes'))
    """
    if isinstance(result, Mapping) and {"train", "test"} <= set(result):
        result = (result["train"], result["test"])
    if not isinstance(result, tuple | list) or len(result) != 2:
        is_several = isinstance(result, tuple | list)
        result_type = f"{len(result)} values" if is_several else f"an object of type {type(result).__name__}"
        raise BadInput(f"the data '{name}' returned {result_type}: {GIVE_A_PAIR}")
    train = _dataset(name, result[0], "training")
    tests: Mapping[str, Any] = {"": result[1]}
    if isinstance(result[1], Mapping) and not is_hub_dataset(result[1]) and train.client_column is None:
        tests = result[1]
        if not tests or not all(isinstance(key, str) and key.isidentifier() for key in tests):
            raise BadInput(
                f"the data '{name}' returned test data by the names {list(tests)}: give names that are words"
            )
    first, *others = (_test_data(name, part, train) for part in tests.values())
    return Splits(train, dataclasses.replace(first, more_tests=dict(zip(list(tests)[1:], others, strict=True))))


def _test_data(name: str, part: Any, train: Dataset) -> Dataset:
    """Return test data that match the training data."""
    test = _dataset(name, part, "test")
    if not isinstance(part, Dataset):
        test = inherit_normalisation(test, train)
    return refuse_unseen_classes(f"the data '{name}'", Splits(train, match(test, train))).test


def _dataset(name: str, part: Any, which: str) -> Dataset:
    """Return training or test data; a triple (x, y, columns) carries columns."""
    try:
        if isinstance(part, tuple | list) and len(part) == 3 and isinstance(part[2], Mapping):
            return dataclasses.replace(as_dataset(part[:2], name=name), columns=part[2])
        return as_data(part, name)
    except BadInput as error:
        raise BadInput(f"the {which} data of '{name}': {error}") from error


# --- options of `[data]` ---------------------------------------------------------------------------------------------


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
    parameters, takes_others = parameters_of(function)
    names = [each for each in parameters if each not in other_keys and each != "root"]
    for option in options:
        if option not in names and not takes_others:
            listing = f"options of {name}: {', '.join(names)}" if names else f"{name} has no options"
            raise BadInput(f"[data] has no key '{option}'{nearest(option, [*other_keys, *names])} ({listing})")
    for option in names:
        if option not in options and parameters[option].default is inspect.Parameter.empty:
            raise BadInput(f"[data] needs the key '{option}' for {name} (options: {', '.join(names)})")


def check_types(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an option whose value is not of the annotated type."""
    hints = get_type_hints(function)
    for option, value in options.items():
        if option == "test" and isinstance(value, Mapping):
            if not value or not all(key.isidentifier() and isinstance(file, str) for key, file in value.items()):
                raise BadInput(
                    f"data.test = {short_repr(value)}: a table gives every test set a name that is a word, and a file"
                )
        elif not _fits(value, hints[option]):
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
