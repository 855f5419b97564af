"""A round that is begun before the round before it is reported has the same numbers. Without a GPU, on its path."""

import pytest
import torch

import lamina
from lamina.base.errors import Diverged
from lamina.engines.stacked.engine import Stacked
from small_simulations import set_chunk, simulation, take_gpu_path

ROUNDS = 4


@pytest.fixture
def begun(monkeypatch):
    """The rounds that were begun early, and whether each was used."""
    log = []
    begin, start = Stacked._begin_next, Stacked._start

    def begin_next(self, now, steps):
        tried = begin(self, now, steps)
        log.append("early" if self._early is not None else "not early")
        return tried

    def spied(self, now, chunk):
        log.append(now.members[0].plan.number)
        return start(self, now, chunk)

    monkeypatch.setattr(Stacked, "_begin_next", begin_next)
    monkeypatch.setattr(Stacked, "_start", spied)
    return log


def on_gpu_path(name, kind="mlp", **more):
    run = simulation(kind, name, "stacked", **more)
    take_gpu_path(run)
    return run


def assert_same_bits(a, b):
    for x, y in zip(a.state.server, b.state.server, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)
    assert all(torch.equal(value, b.state.buffers[name]) for name, value in a.state.buffers.items())
    dropped = ("seconds", "evaluation_seconds")
    rows = [[{k: v for k, v in row.items() if k not in dropped} for row in run.history] for run in (a, b)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("name", "kind"), [("fedavg", "mlp"), ("fedlada", "mlp"), ("fedadam", "batch_norm")])
def test_rounds_begun_early_have_the_same_bits(name, kind, begun):
    run, one_by_one = on_gpu_path(name, kind), on_gpu_path(name, kind)
    run.run(ROUNDS)
    assert begun == [1, 2, "early", 3, "early", 4, "early", "not early"]
    for _ in range(ROUNDS):
        one_by_one.run(1)
    assert begun[-2 * ROUNDS :] == [1, "not early", 2, "not early", 3, "not early", 4, "not early"]
    assert_same_bits(run, one_by_one)


@pytest.mark.parametrize("name", ["fedams", "scaffold", "mime"])  # with client state; with gradients over all data
def test_rounds_that_need_more_than_the_servers_step_are_not_begun_early(name, begun):
    run = on_gpu_path(name)
    run.run(ROUNDS)
    assert "early" not in begun


def test_several_chunks_are_not_begun_early(begun):
    run = on_gpu_path("fedavg")
    set_chunk(run, 2)
    run.run(ROUNDS)
    assert "early" not in begun


def test_a_callback_that_changes_the_model_is_heard():
    runs = [on_gpu_path("fedavg"), on_gpu_path("fedavg")]
    for run, at_once in zip(runs, (True, False), strict=True):
        change = lambda row, run=run: run.state.server.x.add_(0.01 * row["round"])  # noqa: E731
        if at_once:
            run.run(ROUNDS, change)
        for _ in range(0 if at_once else ROUNDS):
            run.run(1, change)
    assert torch.equal(runs[0].state.server.x, runs[1].state.server.x)


def test_a_run_that_a_callback_ends_continues(begun):
    run, whole = on_gpu_path("fedlada"), on_gpu_path("fedlada")

    def stop(row):
        if row["round"] == 2:
            raise StopIteration

    run.run(ROUNDS, stop)
    assert run.state.round == 2
    run.run(ROUNDS - 2)
    whole.run(ROUNDS)
    assert torch.equal(run.state.server.x, whole.state.server.x)


def test_a_population_loses_a_member_as_if_each_round_were_alone(begun):
    def population():
        rates = (0.01, 0.02, 1e80)
        members = [on_gpu_path("fedavg", lr=lr) for lr in rates]
        return lamina.Population(members)

    together, one_by_one = population(), population()
    together.run(ROUNDS)
    assert "early" in begun
    for _ in range(ROUNDS):
        one_by_one.run(1)
    assert together.diverged.keys() == one_by_one.diverged.keys() == {2}
    assert str(together.diverged[2]) == str(one_by_one.diverged[2])
    for a, b in zip(together.simulations[:2], one_by_one.simulations[:2], strict=True):
        assert torch.equal(a.state.server.x, b.state.server.x)


def test_a_divergence_is_explained_by_the_round_it_happened_in(begun):
    messages = []
    for at_once in (True, False):
        run = on_gpu_path("fedavg", lr=1e40)
        calls = [40] if at_once else [1] * 40
        with pytest.raises(Diverged) as error:
            list(map(run.run, calls))
        messages.append((str(error.value), run.state.round))
    assert messages[0] == messages[1]
    assert "early" in begun


def test_what_fails_in_the_next_round_does_not_lose_this_one(monkeypatch):
    start = Stacked._start

    def fails(self, now, chunk):
        if now.members[0].plan.number == 3:
            raise RuntimeError("an augmentation of the user's")
        return start(self, now, chunk)

    monkeypatch.setattr(Stacked, "_start", fails)
    run, rows = on_gpu_path("fedavg"), []
    with pytest.raises(RuntimeError, match="augmentation"):
        run.run(ROUNDS, rows.append)
    assert [row["round"] for row in rows] == [1, 2]
    assert run.state.round == 2
