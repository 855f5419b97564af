"""A round that is begun before the round before it is reported has the same numbers. Without a GPU, on its path."""

import dataclasses
import itertools
import logging

import pytest
import torch

import lamina
from lamina.base.errors import Diverged
from lamina.engines.stacked.engine import Stacked
from small_simulations import problem, set_chunk, simulation, take_gpu_path

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
    run = simulation(kind, name, "stacked", **{"evaluate_every": 100} | more)
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


def test_rounds_whose_batches_the_host_makes_are_not_begun_early(begun):
    run = on_gpu_path("fedavg", augmentation=lambda batch, generator: batch + 1)
    run.run(2)
    assert begun == [1, "not early", 2, "not early"]


def test_only_a_next_round_of_one_chunk_is_begun_early(begun):
    run = on_gpu_path("fedavg", sampling="bernoulli")
    sizes = [len(run.plan.cohort(number)) for number in range(1, 9)]
    most = sorted(sizes)[4]
    assert any(now <= most < following for now, following in itertools.pairwise(sizes))
    set_chunk(run, most)
    run.run(len(sizes))
    expected = [now <= most and following <= most for now, following in itertools.pairwise(sizes)]
    assert [begun[begun.index(number) + 1] == "early" for number in range(2, 9)] == expected


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, [1, "not early", 2, "not early", 3, "not early"]),
        (2, [1, 2, "early", "not early", 3, "not early"]),  # the last round is always evaluated
        (3, [1, 2, "early", 3, "early", "not early"]),
    ],
)
def test_no_round_is_begun_early_before_an_evaluation(every, expected, begun):
    """Its local steps would be counted in the time of the evaluation."""
    run = on_gpu_path("fedavg", evaluate_every=every, test=problem("mlp")[1])
    run.run(3)
    assert begun == expected
    assert ["evaluation_seconds" in row for row in run.history] == [number % every == 0 for number in (1, 2)] + [True]


def test_no_round_of_a_population_is_begun_early_before_an_evaluation(begun):
    lamina.Population([on_gpu_path("fedavg", evaluate_every=every) for every in (100, 2)]).run(4)
    assert begun == [1, 2, "early", "not early", 3, 4, "early", "not early"]


def test_no_round_is_begun_early_before_a_checkpoint(begun, tmp_path):
    on_gpu_path("fedavg", out=tmp_path / "r").run(2)
    assert begun == [1, "not early", 2, "not early"]


def test_a_cpu_begins_no_round_early(begun):
    simulation("mlp", "fedavg", "captured", evaluate_every=100).run(2)
    assert begun == [1, 2]


def add_to_model(run, number):
    run.state.server.x.add_(0.01 * number)


def write_to_buffer(run, number):
    run.state.buffers["1.running_mean"].add_(0.1 * number)


def replace_buffer(run, number):
    run.state.buffers["1.running_mean"] = run.state.buffers["1.running_mean"] + 0.1 * number


def replace_protocol(run, number):
    run.engine.protocol = dataclasses.replace(run.engine.protocol, clip=0.01 * number)


@pytest.mark.parametrize("change", [add_to_model, write_to_buffer, replace_buffer, replace_protocol])
def test_a_callback_that_changes_the_next_round_is_heard(change, begun):
    runs = [on_gpu_path("fedadam", "batch_norm") for _ in range(2)]

    def on_round(run):
        return lambda row: change(run, row["round"])

    runs[0].run(ROUNDS, on_round(runs[0]))
    assert begun == [1, *(entry for number in (2, 3, 4) for entry in (number, "early", number)), "not early"]
    for _ in range(ROUNDS):
        runs[1].run(1, on_round(runs[1]))
    assert_same_bits(*runs)


def test_a_run_that_a_callback_ends_continues(begun):
    run, whole = on_gpu_path("fedlada"), on_gpu_path("fedlada")

    def stop(row):
        if row["round"] == 2:
            raise StopIteration

    run.run(ROUNDS, stop)
    assert run.state.round == 2
    assert begun == [1, 2, "early", 3, "early"]
    run.run(ROUNDS - 2)
    assert begun[5:] == [4, "early", "not early"]  # the third round is not begun again
    whole.run(ROUNDS)
    assert_same_bits(run, whole)


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


def test_what_fails_in_the_next_round_does_not_lose_this_one(monkeypatch, caplog):
    start = Stacked._start

    def fails(self, now, chunk):
        if now.members[0].plan.number == 3:
            raise RuntimeError("an augmentation of the user's")
        return start(self, now, chunk)

    monkeypatch.setattr(Stacked, "_start", fails)
    run, rows = on_gpu_path("fedavg"), []
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="augmentation"):
        run.run(ROUNDS, rows.append)
    assert [row["round"] for row in rows] == [1, 2]
    assert run.state.round == 2
    assert "from round 3 on no round begins before the last one is reported: an augmentation" in caplog.text
    assert not run.engine.begins_early


class EndsAfter2:
    """A schedule of the user's without a rate for round 3."""

    def factor(self, round):
        return float(round <= 2)


def test_a_member_without_a_rate_for_the_next_round_keeps_this_one(begun):
    population = lamina.Population([on_gpu_path("fedavg"), on_gpu_path("fedavg", schedule=EndsAfter2())])
    with pytest.raises(lamina.BadInput, match="round 3"):
        population.run(ROUNDS)
    assert begun == [1, 2, "early", "not early"]
    assert [len(one.history) for one in population.simulations] == [2, 2]
