"""The folders of Flower apps, and the client app in them."""

import pytest

from lamina.base.errors import BadInput
from lamina.flower.apps import AppFolder

APP = """
[project]
name = "an-app"
[tool.flwr.app.config]
out = "runs"
"""


def with_client(place):
    return f'{APP}[tool.flwr.app.components]\nclientapp = "{place}"\n'


def test_the_client_app_is_imported_from_the_folder(empty_folder):
    folder = empty_folder / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(with_client("an_app_of_ours:client"))
    (folder / "an_app_of_ours.py").write_text(
        "from flower_setup import part_of, small_model\nfrom lamina.flower import Federation\n"
        "client = Federation('scaffold', small_model, part_of, clients=2).client_app()\n"
    )
    app = AppFolder.read(folder)
    assert (app.name, app.config) == ("an-app", {"out": "runs"})
    assert app.node().algorithm.card.name == "scaffold"


@pytest.mark.parametrize("text", [None, "[project", '[project]\nname = "a"', "tool = 3", "[tool.flwr]\napp = []"])
def test_what_is_no_app_is_refused_in_one_line(text, tmp_path):
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(BadInput, match="is not the folder of a Flower app"):
        AppFolder.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (APP, "your own client app is named 'package.module:name'"),
        (with_client("math:client"), "cannot load the client app 'math:client'"),
        (with_client("math:pi"), "'math:pi' is a float, not what Federation.client_app"),
    ],
)
@pytest.mark.usefixtures("empty_folder")
def test_a_client_app_that_is_not_ours_is_refused_in_one_line(text, why, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(BadInput, match=why):
        AppFolder.read(tmp_path).node()
