"""What a federation's owner leaves behind is ended."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from flower_processes import STUBBORN, gone, wait_until
from lamina.flower.local import guard, processes

pytestmark = pytest.mark.usefixtures("empty_folder")


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
