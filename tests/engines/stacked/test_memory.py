"""Clients that do not fit the GPU's memory are trained fewer at a time. These tests replace parts of the engine."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina.engines.loop import Loop
from lamina.engines.stacked import graphs, memory
from lamina.engines.stacked.graphs import CapturedSteps
from lamina.engines.stacked.steps import StackedObjective
from lamina.engines.state import RoundSums
from small_simulations import PARTS, assert_same, set_chunk, simulation, take_gpu_path


def out_of_memory(*_arguments, **_options):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to. If reserved but unallocated ...")


@pytest.mark.parametrize("before", [0, 2])  # steps that go well: Mime-LAMB's full gradients are the first
@pytest.mark.parametrize("name", ["scaffold", "mimelamb"])  # with state of the clients; with full gradients
def test_a_chunk_that_does_not_fit_the_memory_is_halved(name, before, monkeypatch, caplog):
    holds, sizes = 3, []

    def mean_losses(self, parameters, buffers, batch):
        rows = len(batch.samples)
        sizes.append(rows)
        if rows > holds and len(sizes) > before:
            out_of_memory()
        return usual(self, parameters, buffers, batch)

    run, alone = (
        simulation("mlp", name, engine, clients=[range(i, i + 9) for i in range(0, 45, 9)], participation=1.0)
        for engine in ("stacked", "loop")
    )
    usual = StackedObjective.mean_losses
    monkeypatch.setattr(StackedObjective, "mean_losses", mean_losses)
    set_chunk(run, 5)
    run.run(2)
    alone.run(2)
    assert sizes[: before + 1] == [5] * (before + 1)
    assert set(sizes[before + 1 :]) == {3, 2}
    assert [line for line in caplog.messages if "memory" in line] == [
        "5 clients at a time do not fit the GPU's memory: from here on at most 3"
    ]
    assert_same(run.state, alone.state, 1e-9)

    holds = 0
    with pytest.raises(lamina.BadInput, match="too small for one client: take smaller batches, or a CPU"):
        run.run(4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "what", "which"),
    [
        (CapturedSteps, "__init__", 1),
        (torch, "tensordot", 2),  # of the mean; the second time without those that have diverged
        (Loop, "explain", 2),
        (RoundSums, "plus", 2),
        (torch, "_foreach_mul", 1),
    ],
)
def test_wherever_the_memory_runs_out_nothing_is_counted_twice(place, what, which, monkeypatch, caplog):
    """One call fails in the first round of four members, two of which diverge."""

    def population():
        members = lamina.Population(
            [
                simulation("batch_norm", lamina.create("scaffold", decay=decay), "stacked", lr=lr, participation=1.0)
                for lr, decay in ((0.01, 0.0), (0.02, 0.1), (1e200, 0.2), (1e200, 0.3))
            ]
        )
        take_gpu_path(members.simulations[0])
        set_chunk(members.simulations[0], 16)
        return members

    reference = population()
    reference.run(2)
    calls = []

    def fails_once(*arguments, **options):
        calls.append(1)
        if len(calls) == which:
            out_of_memory()
        return usual(*arguments, **options)

    usual = getattr(place, what)
    monkeypatch.setattr(place, what, fails_once)
    run = population()
    run.run(2)
    assert "16 clients at a time do not fit the GPU's memory: from here on at most 8" in caplog.text
    assert list(run.diverged) == list(reference.diverged) == [2, 3]
    for one, other in zip(run.simulations[:2], reference.simulations[:2], strict=True):
        assert_same(one.state, other.state, 1e-9)
        for row, expected in zip(one.history, other.history, strict=True):
            assert row["consistency"] == pytest.approx(expected["consistency"], rel=1e-9)
            assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-9)


def test_one_client_fits_once_what_others_hold_is_given_back(monkeypatch):
    """Chunks of four and of one: the second captured step does not fit beside the first, but alone."""
    run, reference = (simulation("mlp", "fedlamb", "stacked", participation=1.0) for _ in range(2))
    take_gpu_path(run)
    reference.run(2)

    captured = weakref.WeakSet()

    def beside_none(*arguments):
        if captured:
            out_of_memory()
        steps = CapturedSteps(*arguments)
        captured.add(steps)
        return steps

    monkeypatch.setattr(graphs, "CapturedSteps", beside_none)
    set_chunk(run, 4)
    run.run(2)
    assert_same(run.state, reference.state, 1e-9)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 78.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_that_the_memory_ran_out(error, is_it):
    assert memory.is_out_of_memory(error) is is_it


class Dropping(nn.ReLU):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


@pytest.mark.parametrize("layer", [nn.ReLU, Dropping])
def test_the_memory_of_a_row_is_measured(layer):
    """Linear(8, 64)-ReLU-Linear(64, 3): the saved activations grow by the batch, the vectors do not."""
    net = nn.Sequential(nn.Linear(8, 64), layer(), nn.Linear(64, 3))
    run = lamina.Simulation(net, (torch.randn(64, 8), torch.arange(64) % 3), "fedavg", clients=2, device="cpu")
    problem = StackedObjective(run.objective, run.train_data, run.engine.forward)
    small, large = (memory.row_bytes(problem, batch) for batch in (8, 32))
    p = sum(t.numel() for t in net.parameters())
    assert small >= memory.VECTORS_PER_ROW * 4 * p
    assert large - small >= 2 * 24 * 64 * 4  # at least the hidden layer of 24 more samples, twice


def test_a_row_is_measured_once_and_how_many_fit_is_decided_twice(monkeypatch):
    """Before round 1 less may be free than in round 1."""
    measured, free = [], iter([1000, 2000])
    monkeypatch.setattr(memory, "row_bytes", lambda problem, batch: measured.append(batch) or 100)
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(free))
    run = simulation("mlp", "fedlamb", "stacked")
    of_engine = memory.Memory(torch.device("cuda"))
    assert of_engine.undecided().rows_that_fit(run.engine.problem, batch=8, graphs=1) == 6
    assert [of_engine.rows_that_fit(run.engine.problem, batch=8, graphs=1) for _ in range(2)] == [12, 12]
    assert measured == [8]


def test_a_large_model_on_a_cpu_has_a_chunk_for_itself():
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    for net, rows in ((nn.Linear(8, 40_000), 1), (nn.Linear(8, 100), 4660)):
        run = lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", engine="stacked")
        problem = StackedObjective(run.objective, run.train_data, run.engine.forward)
        chunks = memory.Memory(torch.device("cpu")).cut(list(range(5000)), problem, batch=8, graphs=1)
        assert len(chunks[0]) == rows  # 16 MB / (900 parameters x 4 bytes)


def test_a_client_that_never_fits_the_memory_is_refused(monkeypatch):
    """A failed attempt holds nothing that could be given back, so that trying again would not help."""
    attempts = []

    def fail(self, work):
        attempts.append(work.rows)
        if len(attempts) > 20:
            raise AssertionError("it tries for ever")
        raise RuntimeError("CUDA out of memory")

    run = simulation("mlp", "fedlamb", "stacked")
    take_gpu_path(run)
    run.run(1)
    monkeypatch.setattr(CapturedSteps, "train", fail)
    with pytest.raises(lamina.BadInput, match="too small for one client"):
        run.run(1)
    assert attempts[-1] == 1
