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


@pytest.fixture
def group(tmp_path):
    group = processes.Processes(tmp_path / "fed", 1)
    (group.folder / "logs").mkdir(parents=True)
    group.start_guard()
    yield group
    group.close()


@pytest.mark.long
def test_all_processes_end_together(group, tmp_path, monkeypatch):
    """Also one that ignores SIGTERM, and its child in a session of its own."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    process = group.launch("node", [sys.executable, str(tmp_path / "stubborn.py"), "escape"], "node")
    wait_until(lambda: process.output().count("ready") == 2)
    pids = guard.marked(group.mark)
    assert len(pids) == 2
    if shutil.which("ps"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", lambda path: False)  # no /proc, as on macOS
            assert sorted(guard.marked(group.mark)) == sorted(pids)
    group.close()
    assert all(map(gone, pids))
    assert guard.marked(group.mark) == []
    group.close()


def test_a_process_that_was_killed_is_one_line(group):
    process = group.launch("node", [sys.executable, "-c", "import time; time.sleep(60)"], "node")
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process.ended is not None)
    assert (
        str(process.failed(f"it {process.how_it_ended}")) == f"it was ended by signal 9 (Killed) (log: {process.log})"
    )


def test_the_environment_keeps_flower_off_the_network(tmp_path):
    made = processes.Processes(tmp_path, 1).environment("node-0")
    assert made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["PATH"].startswith(str(Path(sys.executable).parent))
    assert made["FLWR_HOME"] == str(tmp_path / "node-0")
