"""The README and the docs: examples run, commands exist, links lead somewhere, and the site builds."""

import contextlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import click
import matplotlib.pyplot as plt
import pytest
import sphinx.cmd.build

import lamina
from data_setup import FakeHubSplit
from lamina import algorithms
from lamina.cli import command_line
from lamina.experiment.config import load
from lamina.rounds.settings import TrainArguments

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


LONG = ("transformers.md",)  # takes seconds to import the packages
ELSEWHERE = ("personal-models.md",)  # test_personal_recipes.py runs it and tests its numbers
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.long if page.name in LONG else ())
    for page in PAGES
    if blocks(page, "python") and page.name not in ELSEWHERE
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
@mock.patch.dict(algorithms.registry())  # an example's algorithm stays in the example
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where the secret of private runs lies
    for package in ("peft", "transformers"):  # extras
        if f"from {package} import" in page.read_text():
            pytest.importorskip(package)
    scope = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), scope)


def test_the_functions_that_load_other_formats(monkeypatch, tmp_path):
    """Those of the reference for Hugging Face's and LEAF's data, as an experiment file calls them."""
    functions = "\n".join(blocks(DOCS / "reference" / "experiment-file.md", "python"))
    (tmp_path / "formats_of_mine.py").write_text(functions)
    monkeypatch.syspath_prepend(tmp_path)
    for part, labels in (("train", [0, 1]), ("test", [1])):
        (tmp_path / part).mkdir()
        samples = {"x": [[0.5] * 784] * len(labels), "y": labels}
        (tmp_path / part / "a.json").write_text(json.dumps({"user_data": {"ann": samples, "bob": samples}}))
    train, test = lamina.data.load("formats_of_mine:load_leaf", path=str(tmp_path), client="user")
    assert (train.columns["user"].tolist(), test.y.tolist()) == (["ann", "ann", "bob", "bob"], [1, 1])
    assert train.x.shape == (4, 1, 28, 28)
    splits = dict.fromkeys(("train", "test"), FakeHubSplit({"pixels": [[0.5], [1.5]], "kind": ["cat", "dog"]}))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset={"us/pets": splits}.__getitem__))
    train, _ = lamina.data.load("formats_of_mine:load", path="us/pets", inputs="pixels", label="kind")
    assert (train.x.tolist(), train.class_names) == ([[0.5], [1.5]], ("cat", "dog"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_calls_in_the_docs_work_after_importing_lamina_alone(page):
    """`lamina.storage.checkpoint.read_model(…)` would not: nothing imports the module."""
    assert not re.findall(r"\blamina(?:\.\w+){3,}\(", page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name)
def test_lamina_commands_exist(page):
    """Every `lamina …` line of a shell block names a command and options that the command line has."""
    for block in blocks(page, "sh"):
        for line in re.findall(r"^lamina (.*)$", block.replace("\\\n", " "), flags=re.MULTILINE):
            words = shlex.split(line.replace("…", "x"), comments=True)
            context = click.Context(command_line(), info_name="lamina")
            while isinstance(context.command, click.Group):
                context = click.Context(context.command.commands[words.pop(0)], parent=context)
            with contextlib.suppress(click.exceptions.Exit):  # an option that prints something, such as --version
                context.command.parse_args(context, words)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name)
def test_toml_blocks_are_experiment_files(page, tmp_path):
    (tmp_path / "base.toml").write_text("")  # for the example of `extends`
    for block in blocks(page, "toml"):
        (tmp_path / "experiment.toml").write_text(block)
        load(tmp_path / "experiment.toml")


def test_the_algorithm_example_is_about_forty_lines():
    first = blocks(DOCS / "reference" / "contract.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 45


def test_the_readme_example_is_ten_lines():
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("how-to/personal-models.md", "A private head: FedPer"),
        ("how-to/recipes.md", "A variational autoencoder"),
        ("how-to/recipes.md", "Two heads, two targets"),
        ("how-to/recipes.md", "Contrastive learning"),
        ("how-to/use-a-trained-model.md", "Predictions for a new CSV file"),
        ("tutorials/own-model-and-data.md", "One data set per client"),
    ],
)
def test_a_recipe_is_at_most_fifteen_lines(page, heading):
    """Of code, with the model; the data of a page's first block are given."""
    _, section = (DOCS / page).read_text().split(f"\n## {heading}\n")
    code = re.search(r"```python\n(.*?)```", section, flags=re.DOTALL).group(1).splitlines()
    assert 3 < len([line for line in code if line.strip() and not line.strip().startswith("#")]) <= 15


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_docstring_of_a_simulation_explains_every_argument():
    wanted = {*inspect.signature(lamina.Simulation).parameters, *TrainArguments.__annotations__} - {"settings"}
    assert wanted <= {*re.findall(r"^ *(\w+): ", lamina.Simulation.__doc__, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_exist(page):
    """Sphinx checks the links between pages; the README is no part of the site."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_install_hints_work_from_a_clone():
    """The package is not on PyPI: hints name the clone, ``pip install -e '.[flower]'``."""
    files = [*PAGES, *NOTEBOOKS, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.in")]
    wrong = [name(file) for file in files if re.search(r"pip install '?lamina", file.read_text(encoding="utf-8"))]
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
@mock.patch.dict(algorithms.registry())
def test_notebooks_run(notebook, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "notebook"}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), scope)
    plt.close("all")


def build_site(folder, builder, *options):
    """Return the exit code of the build in this process. Warnings are errors."""
    return sphinx.cmd.build.main(["-W", "--keep-going", "-q", "-b", builder, *options, str(DOCS), str(folder)])


def test_the_site_builds(tmp_path, monkeypatch, capsys):
    """No broken links, no missing names, no page that no table of contents lists; the long test also writes HTML."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # conf.py extends it
    assert build_site(tmp_path, "dummy", "-D", "nb_execution_mode=off") == 0, capsys.readouterr().err


@pytest.mark.long
def test_the_site_shows_the_results_of_the_notebooks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert build_site(tmp_path, "html") == 0, capsys.readouterr().err
    for notebook in NOTEBOOKS:
        assert "cell_output" in (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text()
