"""The packages: every import in src points downwards in the table of docs/explanation/architecture.md."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
FILES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in SRC.rglob("*.py")
}
TOP = {"lamina", "lamina.__main__"}  # the package itself, which loads `api` when a name is first used


def package_of(module):
    return module.split(".")[1]


def folder_of(module):
    """Return the innermost folder of a module, or the module itself if it lies directly in a package."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 else module


@functools.cache
def nodes(module):
    """Return all nodes of a module's source."""
    return list(ast.walk(ast.parse(FILES[module].read_text())))


def imports(module):
    """Return the modules of lamina that a module imports: also in functions, for type checking, and by name."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in FILES else node.module for name in names if node.module in FILES}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (word.value for word in node.args if isinstance(word, ast.Constant) and word.value in FILES)


@pytest.fixture(scope="module")
def rows():
    """Return the row of every package in the page's table, counted from the top."""
    table = PAGE.read_text().partition("## The packages")[2].partition("\n\n`")[0]
    names = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    return {name: number for number, (name,) in enumerate(names)}


@pytest.fixture(scope="module")
def edges():
    return {(module, other) for module in FILES.keys() - TOP for other in imports(module) if other not in TOP}


def test_the_table_names_every_package_once(rows):
    assert set(rows) == {package_of(module) for module in FILES.keys() - TOP}


def test_every_file_has_a_room():
    assert {module for module in FILES if module.count(".") == 1 and FILES[module].name != "__init__.py"} == {
        "lamina.__main__"
    }


@pytest.mark.long
def test_imports_point_downwards(rows, edges):
    upwards = {(one, other) for one, other in edges if rows[package_of(one)] > rows[package_of(other)]}
    assert not upwards


@pytest.mark.parametrize("part", [package_of, folder_of, lambda module: module])
def test_packages_folders_and_modules_do_not_import_each_other(edges, part):
    graph = graphlib.TopologicalSorter()
    for one, other in edges:
        if part(one) != part(other):
            graph.add(part(one), part(other))
    graph.prepare()  # raises CycleError


def test_imports_by_name_are_seen():
    assert "lamina.engines.stacked.gpu.ops" in set(imports("lamina.engines.stacked.layers.convolution"))


def test_only_facts_about_the_package_are_read_from_it():
    """Any other name of `lamina` would load the API from below."""
    for module in FILES.keys() - TOP:
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lamina":
                assert node.attr in ("__version__", "__file__"), module
