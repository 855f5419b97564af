"""Digest the source of the user's code, without its comments, docstrings and formatting.

A module of the user's counts as a whole, with those of their modules that it imports. Of a script or a notebook only
the functions count that a run uses, because its other lines may change freely, such as the number of rounds.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import linecache
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

SCRIPTS = {"__main__", "__mp_main__"}  # the latter in a process that a script has started
LIBRARIES = {"lamina", "torch", "numpy", *sys.builtin_module_names}
INSTALLED = {"site-packages", "dist-packages"}
STANDARD_LIBRARY = Path(os.__file__).parent
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
    visited: set[str] = set()
    while queue:
        name = queue.pop()
        spec = _find(name) if name not in visited and _is_users(name) else None
        visited.add(name)
        if spec is not None:
            _, digest, imported = _modules.get(id(spec)) or _modules.setdefault(id(spec), _read(spec))
            queue += imported
            if spec.origin and spec.has_location:  # a package without __init__.py has no file
                depth = name.count(".") + (1 if spec.submodule_search_locations is None else 2)
                digests["/".join(Path(spec.origin).parts[-depth:])] = digest
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
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(one.lineno for one in (node, *getattr(node, "decorator_list", [])))
            if first == code.co_firstlineno:
                found.append(ast.Expr(node) if isinstance(node, ast.Lambda) else node)
    return ast.Module(found, []) if found else None


def hash_parts(parts: Iterable[str]) -> str:
    """Return a short hash of several texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _is_users(name: str) -> bool:
    top = name.partition(".")[0]
    spec = None if top in SCRIPTS | LIBRARIES else _find(top)
    if spec is None:  # neither a script, a notebook nor the name that `exec` was given has one
        return top not in LIBRARIES
    places = [spec.origin or ""] if spec.has_location else spec.submodule_search_locations or [str(STANDARD_LIBRARY)]
    return not any(INSTALLED & set(Path(p).parts) or Path(p).is_relative_to(STANDARD_LIBRARY) for p in places)


def _find(name: str) -> ModuleSpec | None:
    """Return where a module is, without importing it: a function may import it only when it is called."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent = name.rpartition(".")[0]
    folders = getattr(_find(parent), "submodule_search_locations", None) if parent else None
    with contextlib.suppress(Exception):  # of an import hook
        found = (finder.find_spec(name, folders) for finder in sys.meta_path if folders or not parent)
        return next((spec for spec in found if spec is not None), None)
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
