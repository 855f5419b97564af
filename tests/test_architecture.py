"""The layers: every import in src points downwards in the table of docs/explanation/architecture.md."""

import ast
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


def layer_of(module):
    return module.split(".")[1]


def imports(module):
    """Return the modules of lamina that a module imports anywhere, in functions and for type checking, too."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in FILES else node.module for name in names if node.module in FILES}


@pytest.fixture(scope="module")
def rows():
    """Return the row of every layer in the page's table, counted from the top."""
    table = PAGE.read_text().partition("## The layers")[2].partition("\n\n`")[0]
    lines = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    return {name: number for number, names in enumerate(lines) for name in names}


@pytest.fixture(scope="module")
def edges():
    return {(module, other) for module in FILES.keys() - TOP for other in imports(module) if other not in TOP}


def test_the_table_names_every_layer_once(rows):
    assert set(rows) == {layer_of(module) for module in FILES.keys() - TOP}


def test_imports_point_downwards(rows, edges):
    upwards = {(one, other) for one, other in edges if rows[layer_of(one)] > rows[layer_of(other)]}
    assert not upwards


def test_layers_and_modules_do_not_import_each_other(edges):
    layers = {(layer_of(one), layer_of(other)) for one, other in edges if layer_of(one) != layer_of(other)}
    for pairs in (layers, edges):
        graph = graphlib.TopologicalSorter()
        for one, other in pairs:
            graph.add(one, other)
        graph.prepare()  # raises CycleError


def test_only_facts_about_the_package_are_read_from_it():
    """Any other name of `lamina` would load the API from below."""
    for module in FILES.keys() - TOP:
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lamina":
                assert node.attr in ("__version__", "__file__"), module
