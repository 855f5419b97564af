"""Digests of the user's source: which files count, under which names, and what in them."""

import functools
import importlib
import py_compile
import sys
import types

import pytest
import torch
from torch import nn

import lamina
from lamina.objective.fingerprint import code_digests
from lamina.objective.source import source_digests, users_module


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write files below a folder and import one of them, without leaving modules behind."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported(name, files, folder="a"):
        for path, text in files.items():
            file = tmp_path / folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for one in set(sys.modules) - before:
            if one.startswith("my_"):
                del sys.modules[one]
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    for one in set(sys.modules) - before:
        if one.startswith("my_"):
            del sys.modules[one]


FILES = {
    "my_net.py": "import numpy\nimport torch\nfrom my_pkg import tools\nfrom my_pkg.deep.more import X\n\n\ndef f():\n"
    "    import my_lazy\n    return my_lazy\n",
    "my_pkg/tools.py": "from . import other\nfrom .deep import more\n\nY = 1\n",
    "my_pkg/other.py": "def g():\n    return 1\n",
    "my_pkg/deep/more.py": "X = 1\n",
    "my_lazy.py": "Z = 1\n",
    "my_unused.py": "Z = 1\n",
}


def test_a_module_counts_with_all_of_the_users_modules_that_it_imports(package):
    names = ["my_net.py", "my_pkg/tools.py", "my_pkg/other.py", "my_pkg/deep/more.py", "my_lazy.py"]
    f = package("my_net", FILES).f
    digests = source_digests([f])
    assert sorted(digests) == sorted(names)  # the packages have no __init__.py
    f()  # imports one more, which counted before
    assert source_digests([f]) == digests
    for name in names:
        others = source_digests([package("my_net", FILES | {name: FILES[name] + "A = 2\n"}).f])
        assert [file for file in digests if others[file] != digests[file]] == [name]


def test_a_package_counts_with_its_init_and_the_folder_does_not(package):
    files = FILES | {"my_pkg/__init__.py": "A = 1\n"}
    here = source_digests([package("my_net", files).f])
    assert "my_pkg/__init__.py" in here
    assert source_digests([package("my_net", files, "elsewhere/b").f]) == here


def test_lamina_and_installed_packages_never_count():
    things = [lamina.FedAvg, nn.Linear, functools.partial, torch.relu, json_loads(), pytest.fixture, type(None), types]
    assert source_digests(things) == {}
    assert all(users_module(thing) is None for thing in things)
    assert code_digests([lamina.models.create("cnn", (1, 28, 28), 3, seed=0), lamina.FedLamb]) == {}


def json_loads():
    import json

    return json.loads


def test_a_module_without_source_counts_by_its_bytes(package, tmp_path):
    package("my_plain", {"my_plain.py": "X = 1\n"})
    digests = []
    for text in ("X = 1\n", "X = 2\n"):
        (tmp_path / "source.py").write_text(text)
        py_compile.compile(str(tmp_path / "source.py"), cfile=str(tmp_path / "a" / "my_compiled.pyc"))
        digests.append(source_digests([package("my_compiled", {})]))
    assert [list(one) for one in digests] == [["my_compiled.pyc"]] * 2
    assert digests[0] != digests[1]
