import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin

import gc
import sys

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# Only a loss of power needs a file to be on the disk. Processes that tests kill are others, which do wait for it.
os.fsync = lambda handle: None
hypothesis.settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("lamina")


def pytest_collection_finish():
    """Leave what was imported out of later garbage collections, which takes most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A folder to work in; afterwards the import path, which a command extends by it, is as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path
