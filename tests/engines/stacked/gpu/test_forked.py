"""Kernels are compiled in forked processes; without a GPU, jobs that write files stand for them."""

import functools
import logging
import os
import sys
import time

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
    paths = [tmp_path / f"{i}" for i in range(7)]
    run_forked([writer(path) for path in paths])
    owners = {path.read_text() for path in paths}
    assert len(owners) == 3
    assert str(os.getpid()) not in owners


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
    assert [path.exists() for path in paths] == [True, True, False]
    assert "in 2 processes instead of 3: no more processes" in caplog.text
    for child in children:
        with pytest.raises(ChildProcessError):  # it was waited for
            os.waitpid(child, os.WNOHANG)


def test_a_job_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(forked, "LONGEST_S", 0.2)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    paths = [tmp_path / f"{i}" for i in range(3)]
    began = time.monotonic()
    # the first process has a job that fails and then one that writes, the second hangs, the third kills itself
    run_forked([lambda: 1 / 0, lambda: time.sleep(60), lambda: os.kill(os.getpid(), 9), *map(writer, paths)])
    assert time.monotonic() - began < 10
    assert paths[0].exists()
    assert not paths[1].exists()
    assert not paths[2].exists()
    assert caplog.messages == ["a process that compiles kernels took over 0.2 s and is stopped"]


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
