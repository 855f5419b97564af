import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin

import gc
import logging
import sys

import hypothesis
import pytest
import torch

from lamina.base.warnings_once import Once
from more_transcriptions import ALL as EVEN_NEWER
from newer_transcriptions import ALL as NEWER

torch.set_num_threads(1)
# Only a loss of power needs a file to be on the disk. Processes that tests kill are others, which do wait for it.
os.fsync = lambda handle: None
hypothesis.settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("lamina")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items):
    """Leave the newer methods in every engine to the long tests; `tests/algorithms` always tests what they compute."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.parent.name != "algorithms" and any(map(is_newer, values)):
            item.add_marker("long")


def is_newer(value):
    """Return whether a test's parameter is one of the newer methods, or its name."""
    name = value if isinstance(value, str) else getattr(getattr(value, "card", None), "name", None)
    return name in NEWER or name in EVEN_NEWER


def pytest_collection_finish():
    """Leave what was imported out of later garbage collections, which takes most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_warnings_yet():
    """Every test gets the warnings that another one has had before."""
    for handler in [*logging.getLogger("lamina").handlers, *logging.getLogger().handlers]:
        for each in [*handler.filters, getattr(handler, "once", None)]:
            if isinstance(each, Once):
                each.forget()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A folder to work in; afterwards the import path, which a command extends by it, is as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path
