"""Processes of a federation: how they are started, watched and ended."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from flower_processes import STUBBORN, gone, wait_until
from lamina.flower.local import guard, processes

pytestmark = pytest.mark.usefixtures("empty_folder")


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


def test_the_environment_keeps_flower_off_the_network(tmp_path):
    made = processes.Processes(tmp_path, 1).environment("node-0")
    assert made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["PATH"].startswith(str(Path(sys.executable).parent))
    assert made["FLWR_HOME"] == str(tmp_path / "node-0")
