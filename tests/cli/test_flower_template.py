"""The app that `lamina flower new` writes: its files, settings and documentation."""

import functools
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import helpers
import lamina

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("empty_folder")


call = functools.partial(helpers.call, "flower")


@pytest.mark.parametrize("options", [(), ("--nodes", "5")])
def test_the_template_is_a_sound_app(tmp_path, options):
    assert call("new", "My 1st-app", *options) == 0
    folder = tmp_path / "My 1st-app"
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "{{" not in text
    assert "}}" not in text
    assert str(ROOT) not in text
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    package = "my_1st_app_app"
    python = {f"{package}/{name}.py" for name in ("__init__", "data", "model", "federation")}
    assert files == {"pyproject.toml", "README.md", ".gitignore", *python}
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout

    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    assert config["tool"]["flwr"]["app"]["config"] == {
        "out": "runs/my-1st-app",
        "nodes": "",
        "signing-key": "",
    }

    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(f"{package}.federation")
        clients = int(options[1]) if "--nodes" in options else 3
        assert module.federation.config()["data"]["clients"] == clients
        assert module.make_model()(module.load_test().x[:2]).shape == (2, 10)

        class Context:
            node_config = {"partition-id": 1, "num-partitions": clients}  # noqa: RUF012

        assert len(module.load_mine(Context())) == pytest.approx(1438 / clients, abs=1)
    finally:
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_readme_is_about_as_many_nodes_as_the_app_has(tmp_path, count):
    assert call("new", "app", "--nodes", count) == 0
    text = (tmp_path / "app" / "README.md").read_text()
    (table,) = re.findall(r"```json\n(.*)\n```", text)
    listed = [int(number) for number in re.findall(r'"<id of node (\d+)>": \1', table)]
    assert listed == (list(range(count)) if count <= 3 else [0, 1, count - 1])
    assert set(map(int, re.findall(r"node-(\d+)\.pub`", text))) == set(listed)
    assert re.findall(r"num-partitions=(\d+)", text) == [str(count)] * 2
    assert f"a SuperLink and {count} SuperNode{'s' * (count > 1)} with" in text
    assert "three" not in text.lower()


@pytest.mark.long
def test_the_settings_of_the_template_hold(tmp_path):
    """With the template's former rate of 0.03 the accuracy fell to 0.1 after 20 rounds."""
    assert call("new", "app") == 0
    sys.path.insert(0, str(tmp_path / "app"))
    try:
        module = importlib.import_module("app_app.federation")
        federation = module.federation
        train = module.load_test.__globals__["load"]("digits").train
        clients = federation.plan.clients.count
        simulation = lamina.Simulation(
            module.make_model(),
            train,
            federation.algorithm,
            test=module.load_test(),
            clients=[range(part, len(train), clients) for part in range(clients)],
            batch_size=federation.protocol.batch_size,
            epochs=federation.protocol.epochs,
            lr=federation.protocol.lr,
            device="cpu",
            evaluate_every=22,
        )
        simulation.run(22)
    finally:
        for name in [name for name in sys.modules if name.startswith("app_app")]:
            del sys.modules[name]
    assert simulation.history.last() > 0.9


def test_the_template_is_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["lamina"]
    package = ROOT / "src" / "lamina"
    shipped = {path for pattern in globs for path in package.glob(pattern)}
    template = {path for path in (package / "flower" / "template").rglob("*") if path.is_file()}
    assert template
    assert template <= shipped


def test_no_text_tells_to_open_the_control_interface():
    """The template's README and the docs give the same commands for three machines."""
    readme = (ROOT / "src" / "lamina" / "flower" / "template" / "README.md.in").read_text()
    docs = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    for text in (readme, docs):
        started = re.findall(r"^flower-superlink (.*)$", text, flags=re.MULTILINE)
        assert [line.split()[:4] for line in started] == [["--host", "127.0.0.1", "--port", "8001"]]
        assert 'address = "127.0.0.1:8001"' in text
        assert "--superlink server.example.org:8000" in text
        assert "0.0.0.0" not in text.replace("do not let the SuperLink listen on `0.0.0.0`", "")
        assert "/v1/fleet/" in text
        for part in (
            "umask 077",
            "mkdir -p",
            'data=\\"',
            'server-key=\\"',
            'signing-key=\\"',
            "--port 9094",
            "lamina watch",
        ):
            assert part in text, part
    assert "proxy_pass https://127.0.0.1:8001;" in docs
    assert "listen 8000 ssl;" in docs


def test_new_refuses(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert call("new", "full") == 2
    assert "'full' is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
