"""Run folders at the end and in the middle of a run."""

import contextlib
import shutil
from pathlib import Path

import pytest

from helpers import call
from small_run import TOML, command


@pytest.fixture
def here(empty_folder):
    Path("small.toml").write_text(TOML)
    return empty_folder


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Two folders: a run of six rounds, and one stopped after four with something left to do."""
    place = tmp_path_factory.mktemp("halfway")
    with contextlib.chdir(place):
        Path("small.toml").write_text(TOML)
        assert call(*command("whole", rounds=6)) == 0
        assert call(*command("half", rounds=4)) == 0
        (place / "half" / "model.safetensors").unlink()
    return place


@pytest.fixture
def half(here, halfway):
    shutil.copytree(halfway / "half", here / "half")
    shutil.copytree(halfway / "whole", here / "whole")
    return here / "half"
