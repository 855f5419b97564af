"""`lamina flower` without its processes: what it prints, and what is refused."""

import functools
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

import helpers
from helpers import mode
from lamina.cli import base, flower
from lamina.flower import SUPPORTED
from lamina.flower.keys import ServerKeys
from lamina.flower.local import federation as local
from lamina.flower.local import jobs
from lamina.flower.local.processes import FederationFailed

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("empty_folder")
call = functools.partial(helpers.call, "flower")


def test_the_commands_say_what_is_secret(tmp_path, capsys):
    assert call("keys", "keys", "--host", "server.example.org") == 0
    shown = capsys.readouterr().out
    assert "secret, stays here: keys/ca.key, keys/server.key, keys/tasks.key" in shown
    assert "for every node:     keys/ca.crt, keys/tasks.pub" in shown
    assert mode(tmp_path / "keys" / "tasks.key") == 0o600
    assert re.search(r"certificates end:   keys/ca.crt on \d{4}-\d\d-\d\d, keys/server.pem on \d{4}-\d\d-\d\d", shown)
    assert call("renew", "keys") == 0
    assert capsys.readouterr().out.startswith("new: keys/server.pem\ncertificates end: ")
    assert call("renew", "none") == 2
    assert "cannot read 'none/ca.key'" in capsys.readouterr().err
    assert call("node-key", "mine") == 0
    assert "secret, stays on this node: mine" in capsys.readouterr().out
    assert call("keys", "keys") == 2
    assert call("node-key", "mine") == 2


def test_the_package_requires_the_versions_of_flower_that_it_accepts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = map(Requirement, project["optional-dependencies"]["flower"])
    minors = [f"1.{minor}" for minor in range(100)]
    assert [one for one in minors if requirement.specifier.contains(f"{one}.0")] == list(SUPPORTED)


TOML = '[data]\nclients = 20\n[model]\nname = "mlp"\nhidden = 8\n[train]\nrounds = 2\n'


def test_up_refuses_before_anything_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local.LocalFederation, "start", lambda self: pytest.fail("started"))
    (tmp_path / "small.toml").write_text(TOML)
    (tmp_path / "empty").mkdir()
    app = '[project]\nname = "a"\n[tool.flwr.app.config]\nout = ""\n'
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "pyproject.toml").write_text(app)
    for arguments, message in (
        (["none.toml"], "cannot read the experiment file"),
        (["small.toml"], "20 clients, and every client is a node: give --nodes 20, or --set data.clients=3"),
        (["small.toml", "--nodes", "20", "--set", "algorithm.name=fedlam"], "did you mean 'fedlamb'?"),
        (["small.toml", "--nodes", "20", "--set", "data.heldout_clients=0.25"], "15 clients, and every"),
        (["empty"], "'empty' is not the folder of a Flower app"),
        (["half"], '[tool.flwr.app.config] lacks nodes = "", signing-key = ""'),
        (["small.toml", "--set", "data.clients=3", "--quorum", "0"], "quorum = 0.0"),
        (["small.toml", "--set", "data.clients=3", "--quorum", "2"], "2.0 is not in the range 0<=x<=1"),
        (["half", "--set", "train.lr=1"], "--set, --deadline and --quorum are for experiment files"),
    ):
        assert call("up", *arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_flower_that_is_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lamina.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    (tmp_path / "small.toml").write_text(TOML)
    for arguments in (["up", "small.toml"], ["keys", "keys"], ["node-key", "mine"]):
        assert call(*arguments) == 2
        assert capsys.readouterr().err == "error: lamina.flower needs Flower: pip install -e '.[flower]'\n"
    assert call("new", "app") == 0  # the template needs none


def test_the_command_line_does_not_import_flower():
    """Nor does `import lamina`, which is part of it."""
    code = "import sys, lamina.cli; sys.exit('flwr' in sys.modules or 'cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_progress_lines_of_a_federation(tmp_path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(base, "err", Console(file=shown, width=200))
    job = jobs.Job(tmp_path / "run", 3)
    display = flower.Display(job)
    with display.bars:
        display.say("starting")
        display.update()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "log.txt").write_text(
            "2026-11-15 11:00:00,123 INFO waiting for nothing\n"
            "2026-11-15 11:00:01,123 WARNING waiting for clients 1, 2 to connect (deadline: 600 s)\n"
            "2026-11-15 11:00:02,123 WARNING round 1: client 1: it is [not] connected\n"
            "2026-11-15 11:00:03,123 WARNING no node is listed for client 2: it takes no part\n"
        )
        display.update()
        with (tmp_path / "run" / "log.txt").open("a") as file:
            file.write("2026-11-15 11:00:04,123 WARNING round 1: node 7: refused: it is a stranger\n2026-11-15 11:")
        (tmp_path / "run" / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
        display.update()
        display.update()
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"round": 2, "loss": 0.1}\n{"round"')
        display.update()
    assert shown.getvalue().splitlines() == [
        "starting",
        "waiting for clients 1, 2 to connect (deadline: 600 s)",
        "round 1: client 1: it is [not] connected",
        "no node is listed for client 2: it takes no part",
        "round 1: node 7: refused: it is a stranger",
        "round 1/3: accuracy 0.5000",
        "round 2/3",
    ]
    monkeypatch.setattr(base.out, "quiet", True)
    quiet = flower.Display(job)
    with quiet.bars:
        quiet.say("starting")
        quiet.update()
    assert shown.getvalue().count("\n") == 7


def test_an_app_that_has_nothing_left_to_do_is_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "LocalFederation", Finished)
    assert call("new", "app", "--nodes", "1") == 0
    (tmp_path / "runs" / "app").mkdir(parents=True)
    (tmp_path / "runs" / "app" / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
    capsys.readouterr()
    assert call("up", "app", "--nodes", "1") == 0
    assert "runs/app/ is complete: 1 round" in capsys.readouterr().out


class Finished:
    """Stands for a federation on which every run is complete at once."""

    node_ids, keys = {7: 0}, ServerKeys(Path("keys"))

    def __init__(self, folder, *arguments, **options):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, app, run_config):
        return 1

    def wait(self, run, tick):
        return {"status": "finished:completed"}


def test_a_federation_that_fails_on_the_way_says_how_to_resume(monkeypatch, capsys):
    def fail(*_, **__):
        raise FederationFailed("the SuperLink is gone")

    monkeypatch.setattr(local, "LocalFederation", Finished)
    monkeypatch.setattr(Finished, "wait", fail)
    assert call("new", "app", "--nodes", "1") == 0
    assert call("up", "app", "--nodes", "1", "--out", "run") == 2
    assert "the SuperLink is gone; run the same command again to resume" in capsys.readouterr().err


def test_overwriting_removes_a_run_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LocalFederation", Finished)
    assert call("new", "app", "--nodes", "1") == 0
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "federation.jsonl", "mine.txt"):
        (run / name).write_text('{"lamina": "1"}')
    assert call("up", "app", "--nodes", "1", "--out", "run", "--overwrite", "--quiet") == 0
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
    (run / "metrics.jsonl").write_text("not lamina's")
    assert call("up", "app", "--nodes", "1", "--out", "run", "--overwrite", "--quiet") == 0
    assert (run / "metrics.jsonl").exists()
