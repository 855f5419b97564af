"""A SuperLink and SuperNodes on this machine: their keys, files and answers."""

import contextlib
import sys

import pytest

from flower_processes import wait_until
from helpers import mode
from lamina import BadInput
from lamina.flower import keys
from lamina.flower.local import federation as local
from lamina.flower.local import guard, processes

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_a_federation_that_fails_says_why_in_one_line(tmp_path, monkeypatch):
    real = processes.executable
    false = [sys.executable, "-c", "print('INFO: hello'); raise SystemExit('OSError: no such thing')"]
    monkeypatch.setattr(processes, "executable", lambda name: false[0] if "superlink" in name else real(name))
    monkeypatch.setattr(
        processes, "Process", lambda command, log, env: REAL(false if log.stem == "superlink" else command, log, env)
    )
    federation = local.LocalFederation(tmp_path / "fed", 2)
    log = tmp_path / "fed" / "logs" / "superlink.log"
    with pytest.raises(processes.FederationFailed) as failed, federation:
        pytest.fail("started")
    assert str(failed.value) == f"the SuperLink ended with code 1: OSError: no such thing (log: {log})"
    assert guard.marked(federation.processes.mark) == []


REAL = processes.Process


WRITES_FILES = (  # as the SuperLink and, a moment later, as a node
    "import os; open('db', 'w'); os.makedirs('dir', exist_ok=True); print('SuperNode ID: 7', flush=True)"
)


def test_what_processes_write_is_their_owners_alone(tmp_path):
    (tmp_path / "before").touch()
    folder = tmp_path / "fed"
    folder.mkdir(mode=0o755)
    (folder / "superlink").mkdir(mode=0o755)
    federation = local.LocalFederation(folder, 1)
    federation.register = lambda key: 7
    federation.start_superlink = lambda: federation.processes.launch(
        "superlink",
        [sys.executable, "-c", WRITES_FILES],
        "superlink",
    )
    federation.start_node = lambda client: federation.nodes.update({client: federation.start_superlink()})
    with contextlib.chdir(folder), federation:
        wait_until((folder / "dir").exists)
        assert {mode(path) for path in (folder / "db", folder / "logs" / "superlink.log")} == {0o600}
        assert {mode(path) for path in (folder, folder / "superlink", folder / "dir", folder / "logs")} == {0o700}
        assert mode(federation.keys.signing_key) == 0o600
        (folder / "app" / "written here").touch()
        assert mode(folder / "app" / "written here") == 0o600
    assert not federation.keys.signing_key.exists()
    (tmp_path / "after").touch()
    assert mode(tmp_path / "after") == mode(tmp_path / "before")


def test_nodes_get_the_key_that_tasks_are_verified_with(tmp_path, monkeypatch):
    federation = local.LocalFederation(tmp_path / "fed", 1)
    command = []
    monkeypatch.setattr(federation.processes, "launch", lambda name, given, home: command.extend(given))
    federation.start_node(0)
    assert f'server-key="{tmp_path / "fed" / "keys" / "tasks.pub"}"' in command[-1]
    assert federation.keys.signing_key == tmp_path / "fed" / "keys" / "tasks.key"


def test_a_federation_is_run_by_one_command_at_a_time(tmp_path):
    first = local.take(keys.private_folder(tmp_path / "fed"))
    (tmp_path / "fed" / "keys").mkdir()
    with pytest.raises(BadInput, match="is writing to the folder"), local.LocalFederation(tmp_path / "fed", 1):
        pytest.fail("started")
    assert (tmp_path / "fed" / "keys").exists()  # the other command's
    first.release()


def test_a_run_is_over_when_the_superlink_says_so(tmp_path, monkeypatch):
    federation = local.LocalFederation(tmp_path / "fed", 1)
    (federation.folder / "logs").mkdir(parents=True)
    status = {"status": "finished:completed"}
    ends, launch = [sys.executable, "-c", ""], federation.processes.launch
    monkeypatch.setattr(federation.processes, "launch", lambda name, command, home: launch(name, ends, home))
    monkeypatch.setattr(federation, "status", lambda run: status)
    assert federation.wait(7, every=0.01) == status
    node = federation.start_node(0)
    wait_until(lambda: node.ended == 0)
    with pytest.raises(processes.FederationFailed, match=r"^node 0 ended with code 0 \(log: .*node-0\.log\)$"):
        federation.wait(7, every=0.01)


def test_answers_of_the_flwr_command():
    assert local.json_in('Loading…\n{"success": true, "run-id": "7"}\n') == {"success": True, "run-id": "7"}
    assert local.json_in("no json { here") == {}
    assert local.json_in("[1]") == {}
