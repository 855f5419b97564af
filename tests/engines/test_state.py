"""The sums of a round over its clients, their weights, and the report of the round."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lamina
from lamina.algorithms.contract import Algorithm
from lamina.engines import state
from lamina.engines.state import RoundSums, client_weights, copy_buffers, undo_weighting
from lamina.rounds.aggregation import MEAN
from small_simulations import simulation


class Up(NamedTuple):
    delta: torch.Tensor
    control: torch.Tensor | None = None


class WithControl:
    state_changes = ("control",)
    displacement = Algorithm.displacement


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def add(sums, c, up, buffers=None, **more):
    figures = {"loss": float(c), "steps": 2.0 * c, "by_examples": False} | more
    sums.add_client(c, WithControl(), up, buffers or {}, **figures)


def test_clients_are_added_with_their_weights():
    weights, deltas = [0.2, 0.5, 0.3], draw(3, 7)
    sums = RoundSums(weights=weights)
    for c in range(3):
        add(sums, c, Up(deltas[c]), {"mean": torch.full((2,), float(c)), "count": torch.tensor(5)})
    mean = torch.tensor(weights, dtype=torch.float64) @ deltas
    torch.testing.assert_close(sums.up.delta, mean)
    assert sums.up.control is None
    assert sums.buffers.keys() == {"mean"}  # whole numbers have no mean
    assert sums.buffers["mean"].tolist() == pytest.approx([1.1, 1.1])
    assert (sums.loss, sums.steps, sums.weight) == (pytest.approx(1.1), pytest.approx(2.2), pytest.approx(1.0))
    expected = sum(w * float((row - mean).square().sum()) for w, row in zip(weights, deltas, strict=True))
    assert sums.spread == pytest.approx(expected, rel=1e-12)


def test_the_spread_of_long_vectors_is_added_up_piece_by_piece(monkeypatch):
    monkeypatch.setattr(state, "AT_A_TIME", 3)
    test_clients_are_added_with_their_weights()
    for length in (0, 1, 3, 4, 9):
        one, other = draw(2, length).float()
        expected = float((one.double() - 0.5 * other.double()).square().sum())
        assert state._squared_distance(one, other, 0.5) == pytest.approx(expected, rel=1e-6)


def test_changes_of_a_state_count_the_same_for_every_client():
    weights, values = [0.1, 0.9], draw(2, 4)
    sums = RoundSums(weights=weights)
    for c in range(2):
        add(sums, c, Up(values[c], values[c]), by_examples=True)
    torch.testing.assert_close(sums.up.delta, 0.1 * values[0] + 0.9 * values[1])
    torch.testing.assert_close(sums.up.control, values.mean(0))


def test_a_change_that_is_not_sent_stays_away():
    up = Up(torch.ones(2))
    assert undo_weighting(WithControl(), up, 0.5) == up


def test_uploads_are_kept_for_robust_aggregations_only():
    median = simulation("mlp", "fedavg", "loop", aggregation="median").protocol.aggregation
    for aggregation, kept in ((MEAN, []), (median, [0, 1])):
        sums = RoundSums(weights=[0.5, 0.5], aggregation=aggregation)
        for c in range(2):
            add(sums, c, Up(torch.full((2,), float(c))))
        assert sorted(sums.uploads) == kept


def test_weights_are_equal_or_by_examples():
    plan = SimpleNamespace(cohort=np.array([4, 7]), examples=np.array([30, 10]))
    assert client_weights(plan, by_examples=False) == [0.5, 0.5]
    assert client_weights(plan, by_examples=True) == [0.75, 0.25]


def test_copies_of_buffers_do_not_share_their_memory():
    buffers = {"mean": torch.zeros(2)}
    copy_buffers(buffers)["mean"].fill_(1.0)
    assert buffers["mean"].tolist() == [0.0, 0.0]


def test_a_server_that_diverges_is_named():
    class Overflows(lamina.FedAvg):
        def update(self, server, up, info):
            return super().update(server, up, info)._replace(x=server.x * torch.inf)

    with pytest.raises(lamina.Diverged, match="round 1: the server's step went non-finite") as caught:
        simulation("mlp", Overflows(), "loop").run(1)
    assert caught.value.client is None


@pytest.mark.parametrize("at_a_time", [3, 1 << 15])
def test_a_rounds_distances_are_those_of_whole_vectors(at_a_time, monkeypatch):
    """||x+ - x||, and the mean of ||y_i - x+||^2, whatever the pieces that they are added up in."""
    monkeypatch.setattr(state, "AT_A_TIME", at_a_time)
    run = simulation("mlp", lamina.create("fedavg", server_lr=0.5), "loop", participation=1.0)
    before, engine, plan = run.state, run.engine, run.plan.round(1)
    deltas, usual = [], RoundSums.add_client

    def add_client(sums, c, algorithm, up, buffers, **more):
        deltas.append(up.delta)
        usual(sums, c, algorithm, up, buffers, **more)

    monkeypatch.setattr(RoundSums, "add_client", add_client)
    after, report = engine.run_round(before, plan)
    moved = after.server.x - before.server.x
    weights = state.client_weights(plan, run.protocol.by_examples)
    assert report.update_norm == pytest.approx(float(moved.norm()), rel=1e-9)
    distances = [float((delta - moved).square().sum()) for delta in deltas]
    assert report.consistency == pytest.approx(sum(w * d for w, d in zip(weights, distances, strict=True)), rel=1e-9)
