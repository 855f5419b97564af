"""A folder with a small experiment, for the tests of commands."""

import pytest

TOML = """
[data]
name = "digits"
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 16

[algorithm]
name = "fedlamb"
decay = 0.01

[train]
rounds = 3
participation = 0.5
lr = 0.02
"""


@pytest.fixture
def here(empty_folder):
    """The folder to work in."""
    (empty_folder / "small.toml").write_text(TOML)
    return empty_folder
