"""Launches run, are recorded, or are compiled ahead; kernels are replaced by what counts their calls."""

import threading

import pytest
import torch

from lamina.engines.stacked.gpu import launch as launches
from lamina.engines.stacked.gpu.forked import Forked
from lamina.engines.stacked.gpu.launch import (
    compile_ahead,
    is_recording,
    launch,
    recording,
    start_compiling_ahead,
    unrecorded,
    wait_for_compilers,
)


class Kernel:
    """Remembers its launches and compilations."""

    def __init__(self):
        self.launched, self.compiled = [], []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((grid, arguments, options))


def test_a_launch_runs_the_kernel():
    kernel = Kernel()
    launch(kernel, (2, 3), 1, BLOCK=64)
    assert kernel.launched == [((2, 3), (1,), {"BLOCK": 64})]


def test_a_recorded_launch_does_not_run():
    kernel = Kernel()
    with recording() as recorded:
        assert is_recording()
        launch(kernel, (2,), 1, BLOCK=64)
    assert not is_recording()
    assert kernel.launched == []
    assert recorded == [(kernel, (2,), (1,), {"BLOCK": 64})]
    with pytest.raises(ValueError, match="while recording"), recording():
        raise ValueError("while recording")
    assert not is_recording()


def test_launches_of_another_thread_are_recorded_unless_it_asks():
    """Autograd launches from threads of its own."""
    kernel = Kernel()

    def work():
        launch(kernel, (1,))
        with unrecorded():
            launch(kernel, (2,))
        launch(kernel, (3,))

    with recording() as recorded:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [grid for _, grid, *_ in recorded] == [(1,), (3,)]
    assert [grid for grid, *_ in kernel.launched] == [(2,)]


def test_equal_kernels_are_compiled_once(monkeypatch):
    kernel, started = Kernel(), []
    monkeypatch.setattr(launches, "start_compiling", lambda jobs: Forked(None))
    monkeypatch.setattr(launches, "start_triton", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    tensor = torch.zeros(64)
    same = [(kernel, (1,), (tensor, 5), {}), (kernel, (9,), (torch.zeros(64), 5), {})]
    others = [
        (kernel, (1,), (tensor.double(), 5), {}),
        (kernel, (1,), (tensor, 6), {}),
        (kernel, (1,), (tensor[1:], 5), {}),
    ]
    compile_ahead([*same, *others])
    assert len(kernel.compiled) == 4  # another type, number or alignment is another kernel
    assert started == [1]
    compile_ahead([])
    assert started == [1]


def test_kernels_that_compile_already_are_waited_for_first(monkeypatch):
    events = []

    class Compilers:
        def __init__(self, jobs):
            events.append(f"start {len(jobs)}")

        def wait(self):
            events.append("wait")

    monkeypatch.setattr(launches, "start_compiling", Compilers)
    monkeypatch.setattr(launches, "start_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    kernel = Kernel()
    start_compiling_ahead([(kernel, (1,), (5,), {}), (kernel, (2,), (5,), {}), (kernel, (1,), (6,), {})])
    assert events == ["start 2"]
    assert kernel.compiled == []
    compile_ahead([(kernel, (1,), (7,), {})])
    assert events == ["start 2", "wait", "start 1", "wait"]
    wait_for_compilers()
    assert len(events) == 4
