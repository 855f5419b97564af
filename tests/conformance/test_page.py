"""The page of verdicts: it holds what is stored, and what is stored is what the command prints today."""

import importlib.util
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from lamina import algorithms

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "conformance"


def load(name):
    """Return a script of the folder as a module; it imports its neighbours by their names."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts():
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    with mock.patch.dict(algorithms.registry()):  # the adapters hold variants of ours
        yield {name: load(name) for name in ("cases", "run", "page")}
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("cases", "run", "page") or name.endswith("_targets"):
            del sys.modules[name]


def test_the_page_is_what_the_stored_results_give(scripts):
    page = scripts["page"].PAGE.read_text()
    assert scripts["page"].filled(page, scripts["run"].stored()) == page


def test_every_case_is_stored_once(scripts):
    commands = [case.command for case in scripts["cases"].CASES]
    assert sorted(scripts["run"].stored()) == sorted(commands)
    assert len(set(commands)) == len(commands)


def test_the_page_speaks_of_rows_that_exist(scripts):
    """Numbers in brackets, such as (4–6), are rows of the table above them."""
    sections = scripts["page"].PAGE.read_text().split("\n### ")[1:]
    for section in sections:
        rows = len(re.findall(r"^\| \d+ \|", section, flags=re.MULTILINE))
        prose = section.partition("<!-- end -->")[2].partition("\n## ")[0]
        numbers = re.findall(r"\((\d[\d, –]*)\)", prose)
        assert numbers
        assert all(1 <= int(number) <= rows for group in numbers for number in re.findall(r"\d+", group))


def numbers_of(line):
    """Return a verdict's numbers to two digits: another processor rounds differently."""
    return re.sub(r"-?\d+\.?\d*(e-?\d+)?", lambda found: f"{float(found[0]):.2g}", line)


@pytest.mark.long
@pytest.mark.parametrize("package", ["torch", "flwr"])
def test_the_command_still_prints_the_stored_verdicts(scripts, package, monkeypatch):
    monkeypatch.chdir(FOLDER)
    stored = scripts["run"].stored()
    for case in scripts["cases"].CASES:
        if case.package == package:
            again = scripts["run"].run(case)
            assert again["exit_code"] == stored[case.command]["exit_code"], case.command
            assert numbers_of(again["lines"][2]) == numbers_of(stored[case.command]["lines"][2]), case.command


def test_one_verdict_of_torch_is_run_again(scripts, monkeypatch):
    monkeypatch.chdir(FOLDER)
    case = next(case for case in scripts["cases"].CASES if "damped" in case.command)
    again, stored = scripts["run"].run(case), scripts["run"].stored()[case.command]
    assert (again["exit_code"], numbers_of(again["lines"][2])) == (1, numbers_of(stored["lines"][2]))
