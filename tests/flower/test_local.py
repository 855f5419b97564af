"""A federation of processes on this machine: how they are started, watched and ended."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers import mode
from lamina import BadInput
from lamina.experiment.config import parse
from lamina.flower import keys
from lamina.flower.federation import read_nodes
from lamina.flower.local import federation as local
from lamina.flower.local import guard, jobs, processes

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_shim_builds_the_federation(tmp_path):
    spec = parse({"data": {"clients": 3}, "model": {"name": "mlp", "hidden": 8}, "train": {"rounds": 7, "lr": 0.5}})
    number = 2**64 - 1  # as long as Flower's get
    nodes = {number: 2, 5: 0, 6: 1}
    jobs.write_app(tmp_path / "app", spec, {"deadline": 9.0, "quorum": 2, "out": None, "nodes": nodes})
    scope = {"__file__": str(tmp_path / "app" / "lamina_up" / "__init__.py"), "__name__": "lamina_up"}
    exec((tmp_path / "app" / "lamina_up" / "__init__.py").read_text(), scope)
    made = scope["federation"]
    config = made.config()
    assert (config["train"]["rounds"], config["train"]["lr"], config["data"]["clients"]) == (7, 0.5, 3)
    assert made.deadline == 9.0
    assert read_nodes(made.nodes, 3) == nodes
    assert made.out is None


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_run_that_failed_is_one_line(tmp_path, rounds):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"round": {n + 1}}}\n' for n in range(rounds)))
    status = {"status": "finished:failed", "status-details": "ServerApp failed with exception: too few"}
    failed = jobs.Job(tmp_path, 3).failed(status, Path("logs"), "run it again")
    assert isinstance(failed, processes.FederationFailed)
    kept = "2 rounds are kept; run it again; " if rounds else ""
    assert str(failed) == f"the run failed: too few ({kept}logs: logs/)"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, __file__], start_new_session=sys.argv[1] == "escape")
print("ready", flush=True)
time.sleep(60)
"""


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true, seconds=20):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_process_is_killed_with_its_group(tmp_path, monkeypatch):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, guard.VARIABLE: "stopped-with-its-group"}
    command = [sys.executable, str(tmp_path / "stubborn.py"), "child"]
    process = processes.Process(command, tmp_path / "log", environment)
    wait_until(lambda: process.output().count("ready") == 2)
    pids = guard.marked("stopped-with-its-group")
    assert len(pids) == 2
    assert {os.getpgid(pid) for pid in pids} == {process.pid}
    if shutil.which("ps"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", lambda path: False)  # no /proc, as on macOS
            assert sorted(guard.marked("stopped-with-its-group")) == sorted(pids)
    process.kill()
    assert process.ended == -signal.SIGKILL
    assert (
        str(process.failed(f"it {process.how_it_ended}")) == f"it was ended by signal 9 (Killed) (log: {process.log})"
    )
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="knows processes by /proc")
def test_the_guard_ends_what_its_owner_leaves(tmp_path):
    """Also what has escaped into a session of its own and does not listen."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    context = multiprocessing.get_context("fork")  # a new interpreter would import torch first
    marks, owners_end = context.Pipe(duplex=False)

    def own():
        group = processes.Processes(tmp_path / "fed", 1)
        (group.folder / "logs").mkdir(parents=True)
        group.start_guard()
        group.launch("node", [sys.executable, "stubborn.py", "escape"], "node")
        owners_end.send(group.mark)
        time.sleep(60)

    owner = context.Process(target=own)
    owner.start()
    mark = marks.recv()
    wait_until(lambda: len(guard.marked(mark)) == 2)
    pids = guard.marked(mark)
    assert len({os.getsid(pid) for pid in pids}) == 2
    owner.kill()
    owner.join()
    wait_until(lambda: all(map(gone, pids)))


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


def test_what_processes_write_is_their_owners_alone(tmp_path):
    (tmp_path / "before").touch()
    folder = tmp_path / "fed"
    folder.mkdir(mode=0o755)
    (folder / "superlink").mkdir(mode=0o755)
    federation = local.LocalFederation(folder, 1, secure=False)
    federation.start_superlink = lambda: federation.processes.launch(
        "superlink",
        [sys.executable, "-c", "import os; open('db', 'w'); os.mkdir('dir'); print('SuperNode ID: 7', flush=True)"],
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
    first = local.Lock(keys.private_folder(tmp_path / "fed"))
    with pytest.raises(BadInput, match="is writing to the folder"), local.LocalFederation(tmp_path / "fed", 1):
        pytest.fail("started")
    first.release()


def test_processes_that_have_ended_are_forgotten(tmp_path, monkeypatch):
    """Their numbers may be used again: the federation's end must not signal them."""
    group = processes.Processes(tmp_path / "fed", 1)
    (group.folder / "logs").mkdir(parents=True)
    process = group.launch("node", [sys.executable, "-c", ""], "node")
    wait_until(lambda: process.ended == 0)
    group.retire(process)
    assert group.running == []
    monkeypatch.setattr(processes.os, "killpg", lambda *_: pytest.fail("signalled"))
    group.close()


def test_a_follower_and_a_node_that_ended_are_forgotten(tmp_path, monkeypatch):
    federation = local.LocalFederation(tmp_path / "fed", 1)
    (federation.folder / "logs").mkdir(parents=True)
    status = {"status": "finished:completed"}
    ends, launch = [sys.executable, "-c", ""], federation.processes.launch
    monkeypatch.setattr(federation.processes, "launch", lambda name, command, home: launch(name, ends, home))
    monkeypatch.setattr(federation, "status", lambda run: status)
    assert federation.wait(7, every=0.01) == status
    assert federation.processes.running == []
    first = federation.start_node(0)
    wait_until(lambda: first.ended == 0)
    federation.tend()
    assert first not in federation.processes.running
    assert federation.nodes[0] in federation.processes.running
    federation.close()


def test_the_environment_keeps_flower_off_the_network(tmp_path):
    made = processes.Processes(tmp_path, 1).environment("node-0")
    assert made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["PATH"].startswith(str(Path(sys.executable).parent))
    assert made["FLWR_HOME"] == str(tmp_path / "node-0")


def test_answers_of_the_flwr_command():
    assert local.json_in('Loading…\n{"success": true, "run-id": "7"}\n') == {"success": True, "run-id": "7"}
    assert local.json_in("no json { here") == {}
    assert local.json_in("[1]") == {}
