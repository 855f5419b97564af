import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin

import functools
import gc
import sys

import hypothesis
import pytest
import torch
import typer.main

from lamina.engines import choice
from lamina.engines.stacked import independence

torch.set_num_threads(1)
hypothesis.settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("lamina")

# A process of lamina builds its command line once and tests few algorithms. The tests would do both a thousand times.
typer.main.get_command = functools.cache(typer.main.get_command)


def once_per_algorithm(check):
    """Remember what a check returns for a class, its functions and its options, unless one of them is a tensor."""
    answers = {}

    @functools.wraps(check)
    def remembered(algorithm):
        kind, options = type(algorithm), repr(algorithm)
        key = (kind, kind.begin, kind.step, kind.finish, kind.needs, options)
        if key not in answers or "tensor(" in options:
            answers[key] = check(algorithm)
        return answers[key]

    return remembered


choice.works_by_row = once_per_algorithm(independence.works_by_row)
independence.works_by_layer = once_per_algorithm(independence.works_by_layer)


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
