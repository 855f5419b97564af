"""Kernels are compiled in forked processes; without a GPU, jobs that write files stand for them."""

import functools
import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from lamina.engines.stacked.gpu import forked
from lamina.engines.stacked.gpu.forked import start_compiling, start_forked

if not hasattr(os, "fork"):
    pytest.skip("no fork here", allow_module_level=True)


def writer(path):
    return lambda: path.write_text(str(os.getpid()))


def ends_within(process, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_jobs_run_in_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    paths = [tmp_path / f"{i}" for i in range(7)]
    start_forked([writer(path) for path in paths]).wait()
    owners = [path.read_text() for path in paths]
    assert sorted(map(owners.count, set(owners))) == [2, 2, 3]  # equal shares
    assert str(os.getpid()) not in owners


def test_other_work_goes_on_until_it_waits(tmp_path):
    path = tmp_path / "end"
    forked = start_forked([lambda: (time.sleep(0.5), path.touch())])
    assert not path.exists()
    forked.wait()
    assert path.exists()
    forked.wait()  # it has nothing to wait for


def test_jobs_that_nobody_needs_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    paths = [tmp_path / "one", tmp_path / "other"]
    forked = start_forked([lambda path=path: (writer(path)(), time.sleep(60)) for path in paths])
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.01)
    forked.stop()
    assert all(ends_within(int(path.read_text()), seconds=5) for path in paths)
    forked.stop()  # there is nothing left
    forked.wait()


def test_jobs_end_with_the_process_that_needs_them(tmp_path):
    code = f"""
import pathlib, os, time
from lamina.engines.stacked.gpu.forked import start_forked
path = pathlib.Path({str(tmp_path / "file")!r})
start_forked([lambda: (path.write_text(str(os.getpid())), time.sleep(60))])
while not path.exists() or not path.read_text():
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.PIPE)  # its pipe closes, too
    assert ends_within(int((tmp_path / "file").read_text()), seconds=5)


def test_jobs_of_a_process_that_cannot_be_forked_are_run_by_another(tmp_path, monkeypatch):
    fork, count = os.fork, []

    def few():
        count.append(1)
        if len(count) > 2:
            raise BlockingIOError("no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", few)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    paths = [tmp_path / f"{i}" for i in range(8)]
    start_forked([writer(path) for path in paths]).wait()
    assert len({path.read_text() for path in paths}) == 2


def test_without_any_other_process_nothing_is_run(tmp_path, monkeypatch, caplog):
    def none():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", none)
    with caplog.at_level(logging.INFO):
        start_forked([writer(tmp_path / "file")]).wait()
    assert not (tmp_path / "file").exists()
    assert caplog.messages == ["kernels are compiled in one process: no more processes"]


def test_a_job_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(forked, "LONGEST_S", 0.5)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    paths, hanging = [tmp_path / f"{i}" for i in range(4)], tmp_path / "hanging"
    began = time.monotonic()
    # one process has a job that fails and then one that writes, one kills itself, one hangs, and one only writes
    jobs = [lambda: 1 / 0, lambda: os.kill(os.getpid(), 9), lambda: (writer(hanging)(), time.sleep(60)), lambda: None]
    start_forked([*jobs, *map(writer, paths)]).wait()
    assert time.monotonic() - began < 10
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert caplog.messages == ["processes that compile kernels took over 0.5 s and are stopped"]
    assert ends_within(int(hanging.read_text()), seconds=5)


@pytest.mark.parametrize("which", ["the first", "the second"])
def test_if_a_process_is_killed_those_that_it_has_forked_are_stopped(tmp_path, monkeypatch, which):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    first, second, third, fourth = paths = [tmp_path / f"{i}" for i in range(4)]
    sleeps = {first: 0.5, second: 60, third: 0.5, fourth: 60}  # the second is forked by the first, the fourth by it
    forked = start_forked([lambda path=path: (writer(path)(), time.sleep(sleeps[path])) for path in paths])
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.01)
    os.kill(forked.child if which == "the first" else int(second.read_text()), 9)
    forked.wait()
    assert all(ends_within(int(path.read_text()), seconds=5) for path in paths)


def test_without_triton_nothing_is_compiled(monkeypatch):
    for name in ("triton", "triton.runtime"):  # both: another test may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    start_compiling([lambda: pytest.fail("no kernel can be asked for")]).wait()


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
    start_compiling(asked).wait()
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(compiled) == 2
    for each in values:
        torch.testing.assert_close(sum_rows(each), each.sum(1))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == compiled
    monkeypatch.setattr(forked, "start_forked", lambda jobs: pytest.fail("all kernels are there"))
    start_compiling(asked)
