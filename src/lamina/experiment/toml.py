"""Experiment files as text: read TOML, follow `extends`, and write nested tables back as TOML."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.base.errors import BadInput
from lamina.experiment.sections import DEFAULT_NAMES, Data

Tree = dict[str, Any]


def read_tree(path: Path, chain: tuple[Path, ...] = ()) -> Tree:
    """Return the tables of an experiment file, merged over those of the files it extends.

    Args:
        path: the file; ``extends`` in it names one or several files, relative to its own folder.
        chain: the files that led here, to notice a file that extends itself.
    """
    tree = _read(path)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise BadInput(f"{path}: extends = {bases!r} is neither the name of a file nor a list of names")
    chain = (*chain, path.resolve())
    merged: Tree = {}
    for base in bases:
        file = path.parent / base
        if file.resolve() in chain:
            raise BadInput(f"{path}: extends '{base}', which extends this file again")
        if not file.is_file():
            raise BadInput(f"{path}: extends '{base}', but there is no file '{file}'")
        merged = merge(merged, read_tree(file, chain))
    merged = merge(merged, tree)
    if len(chain) == 1:
        _drop_uncompared(merged, tree)
    return merged


def complete_text(path: Path) -> str:
    """Return an experiment as one file: the comments at the top of it and of its bases, then all tables."""
    tree = read_tree(path)
    comments = []
    for file in _family(path):
        lines = file.read_text(encoding="utf-8-sig").splitlines(keepends=True)
        comments.append("".join(itertools.takewhile(lambda line: line.startswith("#"), lines)))
    return "#\n".join(filter(None, comments)) + as_toml(tree)


def _family(path: Path) -> list[Path]:
    """Return a file and all files it extends, each once, the file itself first."""
    bases = _read(path).get("extends", [])
    files = [path]
    for base in [bases] if isinstance(bases, str) else bases:
        files += [file for file in _family(path.parent / base) if file not in files]
    return files


def merge(base: Tree, own: Tree) -> Tree:
    """Set the keys of a file in the tables of the file it extends; its own claims come before the inherited ones.

    >>> base = {"model": {"name": "mlp", "hidden": 200}, "train": {"epochs": 1, "rounds": 100}}
    >>> merge(base, {"model": {"name": "cnn"}, "train": {"local_steps": 3}})
    {'model': {'name': 'cnn'}, 'train': {'rounds': 100, 'local_steps': 3}}
    """
    inherited, claims = base.get("claim"), own.get("claim")
    merged = set_keys(base, dict(leaves(own)))
    if isinstance(inherited, list) and isinstance(claims, list):
        merged["claim"] = [*claims, *inherited]
    return merged


def set_keys(tree: Tree, values: Mapping[tuple[str, ...], Any]) -> Tree:
    """Set keys, given by the names of their sections and their own name, in place; return the tree.

    A new name of a model, algorithm, partition, schedule, aggregation or data set drops the options of the old one.
    `train.local_steps` replaces `train.epochs`, and the other way round.
    """
    for length, other in (("epochs", "local_steps"), ("local_steps", "epochs")):
        if ("train", length) in values and ("train", other) not in values:
            _table(tree, "train").pop(other, None)
    for keys, value in values.items():
        place = keys[:-1]
        section = tree
        for depth, key in enumerate(place, 1):
            inner = section.setdefault(key, {})
            if isinstance(inner, str):  # model = "mlp" is short for model.name
                inner = section[key] = {"name": inner}
            if not isinstance(inner, dict):
                raise BadInput(f"'{'.'.join(keys[:depth])}' is a value, not a section")
            section = inner
        name = values.get((*place, "name"))
        if place in DEFAULT_NAMES and name not in (None, section.get("name", DEFAULT_NAMES[place])):
            section.clear()
            section["name"] = name
        if place == ("data",) and name not in (None, section.get("name", Data().name)):
            for key in [key for key, inner in section.items() if not fits_any_data(key, inner)]:
                del section[key]
            section["name"] = name
        section[keys[-1]] = value
    return tree


def fits_any_data(key: str, value: Any) -> bool:
    """Return whether a value in [data] does not depend on the data set: no option of it, column, or list of clients."""
    return key in Data.model_fields and key != "client" and not isinstance(value, list)


def leaves(tree: Mapping[str, Any], values: Collection[str] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the value of every key in nested tables, with the keys that lead to it.

    A table with a key among `values` counts as a value.

    >>> dict(leaves({"train": {"lr": 0.1, "schedule": {"name": "constant"}}}))
    {('train', 'lr'): 0.1, ('train', 'schedule', 'name'): 'constant'}
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and not set(value) & set(values):
            yield from (((key, *place), leaf) for place, leaf in leaves(value, values))
        else:
            yield (key,), value


def _drop_uncompared(tree: Tree, own: Tree) -> None:
    """Remove inherited grids and options of algorithms that the comparison does not list."""
    compare, given = _table(tree, "compare"), _table(own, "compare")
    if isinstance(compare.get("algorithms"), list):
        for section in ("grid", "options"):
            kept = [*compare["algorithms"], *_table(given, section)]
            entries = {name: entry for name, entry in _table(compare, section).items() if name in kept}
            if isinstance(compare.get(section), dict):
                compare[section] = entries


def _table(tree: Tree, key: str) -> Tree:
    """Return the table under a key; an empty one if there is none, or something else, which validation will refuse."""
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> Tree:
    if path.is_dir():
        is_run = (path / "config.json").exists()
        hint = f"a run's folder: `lamina run {path / 'config.json'}` runs it again" if is_run else "a folder"
        raise BadInput(f"'{path}' is {hint}; give an experiment file (TOML)")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise BadInput(f"cannot read the experiment file '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"'{path}' is not a text file: an experiment is TOML in UTF-8") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML's own errors, thousands of digits, thousands of brackets
        raise BadInput(f"{path}: not valid TOML: {error}") from error


def as_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Return nested tables as TOML text, which Python's standard library reads but does not write; None is left out.

    >>> print(as_toml({"train": {"lr": 0.1, "schedule": {"name": "cosine"}}}), end="")
    <BLANKLINE>
    [train]
    lr = 0.1
    <BLANKLINE>
    [train.schedule]
    name = "cosine"
    """
    tables = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    lists = {key: value for key, value in tree.items() if key == "claim" and not prefix}
    values = {key: value for key, value in tree.items() if value is not None and key not in tables | lists}
    text = f"\n[{prefix}]\n" if values and prefix else ""
    text += "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in values.items())
    for key, inner in tables.items():
        text += as_toml(inner, f"{prefix}.{_toml_key(key)}" if prefix else _toml_key(key))
    for key, rows in lists.items():
        for row in rows:
            text += f"\n[[{key}]]\n"
            text += "".join(f"{_toml_key(k)} = {_toml_value(v)}\n" for k, v in row.items() if v is not None)
    return text


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
