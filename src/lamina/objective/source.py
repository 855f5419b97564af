"""Digest the source of the user's code, without its comments, docstrings and formatting.

A module of the user's counts as a whole, with those of their modules that it imports. Of a script or a notebook only
the functions count that a run uses, because its other lines may change freely, such as the number of rounds.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import linecache
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lamina.base.text import hash_parts

SCRIPTS = {"__main__", "__mp_main__"}  # the latter in a process that a script has started
LIBRARIES = {"lamina", *sys.stdlib_module_names}
INSTALLED = {"site-packages", "dist-packages"}
# Digests and imports by the id of a module's spec, which a reload replaces: a file that is edited later does not run.
_modules: dict[int, tuple[ModuleSpec, str, set[str]]] = {}


def source_digests(things: Iterable[Any]) -> dict[str, str]:
    """Return digests of the files that functions, classes and modules of the user's come from, by file name.

    A file has the same name in every folder. One without source, such as an extension, counts by its bytes.
    """
    sources: dict[str, set[str]] = {}  # of functions in scripts and notebooks
    queue: list[str] = []
    for thing in things:
        name = users_module(thing)
        if name:
            queue.append(name)
        elif name is not None and isinstance(thing, FunctionType) and (source := source_of(thing.__code__)):
            file = getattr(sys.modules.get(thing.__module__), "__file__", None)
            sources.setdefault(Path(file).name if file else "notebook", set()).add(ast.unparse(source))
    digests = {file: hash_parts(sorted(texts)) for file, texts in sources.items()}
    for name in queue:  # it grows
        if _is_users(name) and (spec := _find(name)) is not None:
            _, digest, imported = _modules.get(id(spec)) or _modules.setdefault(id(spec), _read(spec))
            queue += imported - set(queue)
            if spec.origin and spec.has_location:  # a package without __init__.py has no file
                digests[str(Path((spec.parent or "").replace(".", "/"), Path(spec.origin).name))] = digest
    return digests


def users_module(thing: Any) -> str | None:
    """Return the user's module that a function, class or module is from; None if it is lamina's or a library's.

    The name is empty for code of a script, of a notebook, and after `exec`.
    """
    name = str(thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None))
    if not _is_users(name):
        return None
    return "" if name in SCRIPTS or _find(name) is None else name


@functools.cache  # the same function has the same source, even if its file is edited
def source_of(code: CodeType) -> ast.Module | None:
    """Return the source of a function, with others that begin in the same line; None if there is none."""
    linecache.checkcache(code.co_filename)
    try:
        tree = _parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    kinds = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    starts = [min(one.lineno for one in (node, *getattr(node, "decorator_list", []))) for node in functions]
    nodes: list[Any] = [node for node, start in zip(functions, starts, strict=True) if start == code.co_firstlineno]
    return ast.Module(nodes, []) if nodes else None


def _is_users(name: str) -> bool:
    top = name.partition(".")[0]
    spec = None if top in SCRIPTS else _find(top)  # nor has the name that `exec` was given a spec
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
    return top not in LIBRARIES and not any(INSTALLED & set(Path(place).parts) for place in places)


def _find(name: str) -> ModuleSpec | None:
    """Return where a module is, without importing it: a function may import it only when it is called."""
    with contextlib.suppress(Exception):  # there is no such module, or its package raises something
        return importlib.util.find_spec(name)
    return None


def _read(spec: ModuleSpec) -> tuple[ModuleSpec, str, set[str]]:
    """Return a module's spec, the digest of its source, and the names of all modules that it may import."""
    data, names = b"", [spec.name]
    try:
        data = Path(spec.origin or "").read_bytes()
        tree = _parse(data)
    except (OSError, SyntaxError, ValueError):  # no file, or no source
        return spec, hash_parts([data.hex()]), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
                names += [f"{base}.{one.name}" for one in node.names]
    imported = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    return spec, hash_parts([ast.unparse(tree)]), imported


def _parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a file, without its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
    return tree
