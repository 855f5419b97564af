import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin

import sys

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("lamina")


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A folder to work in; afterwards the import path, which a command extends by it, is as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path
