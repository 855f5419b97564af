"""Kernels are compiled in forked processes; without a GPU, jobs that write files stand for them."""

import functools
import logging
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from lamina.engines.stacked.gpu import forked
from lamina.engines.stacked.gpu.forked import compile_in_processes, run_forked

if not hasattr(os, "fork"):
    pytest.skip("no fork here", allow_module_level=True)


def writer(path):
    return lambda: path.write_text(str(os.getpid()))


def test_jobs_run_in_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    paths = [tmp_path / f"{i}" for i in range(300)]  # the number of the last ones needs two bytes
    open_files = len(list(Path("/dev/fd").iterdir()))
    run_forked([writer(path) for path in paths])
    owners = {path.read_text() for path in paths}
    assert 1 <= len(owners) <= 3
    assert str(os.getpid()) not in owners
    assert len(list(Path("/dev/fd").iterdir())) == open_files


def test_a_process_takes_the_next_job_when_it_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    paths = [tmp_path / f"{i}" for i in range(6)]
    slow = tmp_path / "slow"

    def wait_for_the_others():
        while not all(path.exists() for path in paths):
            time.sleep(0.005)
        slow.touch()

    run_forked([wait_for_the_others, *map(writer, paths)])
    assert slow.exists()


def test_no_process_waits_for_a_pipe_that_another_fork_holds_open(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(forked, "LONGEST_S", 2.0)
    paths, pipe, held = [tmp_path / f"{i}" for i in range(4)], os.pipe, []

    def pipe_of_two_owners():
        waiting, put = pipe()
        held.append(os.dup(put))
        return waiting, put

    monkeypatch.setattr(os, "pipe", pipe_of_two_owners)
    run_forked([writer(path) for path in paths])
    os.close(held[0])
    assert all(path.exists() for path in paths)
    assert not caplog.messages


def test_a_fork_that_fails_leaves_no_child_behind(tmp_path, monkeypatch, caplog):
    fork, children = os.fork, []

    def few():
        if len(children) == 2:
            raise BlockingIOError("no more processes")
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", few)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    paths = [tmp_path / f"{i}" for i in range(3)]
    with caplog.at_level(logging.INFO):
        run_forked([lambda path=path: (time.sleep(0.1), path.touch()) for path in paths])
    assert all(path.exists() for path in paths)  # the two others do its work
    assert "in 2 processes instead of 3: no more processes" in caplog.text
    for child in children:
        with pytest.raises(ChildProcessError):  # it was waited for
            os.waitpid(child, os.WNOHANG)


def test_a_job_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(forked, "LONGEST_S", 1.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    paths = [tmp_path / f"{i}" for i in range(3)]
    began = time.monotonic()
    # one process hangs, one kills itself, the third has a job that fails and then those that write
    run_forked([lambda: time.sleep(60), lambda: os.kill(os.getpid(), 9), lambda: 1 / 0, *map(writer, paths)])
    assert time.monotonic() - began < 20
    assert all(path.exists() for path in paths)
    assert caplog.messages == ["a process that compiles kernels took over 1 s and is stopped"]


def test_without_triton_nothing_is_compiled(monkeypatch):
    for name in ("triton", "triton.runtime"):  # both: another test may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    compile_in_processes([lambda: pytest.fail("no kernel can be asked for")])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_triton_finds_what_other_processes_compiled(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from lamina.engines.stacked.gpu.launch import recording, start_triton
    from lamina.engines.stacked.gpu.sums import sum_rows

    start_triton()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    values = [torch.rand(2, 300, width, device="cuda") for width in (71, 73)]
    with recording() as launches:
        for each in values:
            sum_rows(each)
    asked = [functools.partial(kernel.warmup, *args, grid=grid, **more) for kernel, grid, args, more in launches]
    compile_in_processes(asked)
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(compiled) == 2
    for each in values:
        torch.testing.assert_close(sum_rows(each), each.sum(1))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == compiled
    monkeypatch.setattr(forked, "run_forked", lambda jobs: pytest.fail("all kernels are there"))
    compile_in_processes(asked)
