"""Every Python block of the README and the docs runs, top to bottom."""

import re
from pathlib import Path

import pytest

from lamina.algorithms import contract

ROOT = Path(__file__).parent.parent
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))  # an example's algorithm stays in the example
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    scope = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)
    assert blocks


def test_the_algorithm_example_is_about_forty_lines():
    text = (ROOT / "docs" / "new-algorithm.md").read_text()
    first = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 45


def test_the_readme_example_is_ten_lines():
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_the_readme_table_is_true():
    """Down, up and kept models in the README's algorithm table are what the ledger counts."""
    from lamina.algorithms import create, registry
    from lamina.ledger import wire_cost

    rows = re.findall(
        r"^\| `(\w+)` \|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.M
    )
    assert {name for name, *_ in rows} == set(registry())
    for name, *numbers in rows:
        assert tuple(map(float, numbers)) == tuple(wire_cost(create(name))), name


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_to_files_exist(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
