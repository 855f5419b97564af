"""Batches that are sent ahead are those of the round, and are used for no other."""

import torch

import lamina
from lamina.data import Augment
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.rows import Member, RoundInProgress

X, Y = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
CLIENTS = [range(0, 5), range(5, 20), range(20, 40)]  # of different sizes, so that rows are ordered and padded


def round_of(run, number):
    plan = run.plan.round(number)
    members = [Member(run.algorithm, run.state, plan, run.protocol)]
    return RoundInProgress(members, run.engine.feed.rows(members))


def test_batches_are_sent_ahead_for_the_round_that_was_planned(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.Dropout(0.5))
    run = lamina.Simulation(
        model, (X, Y), "fedavg", clients=CLIENTS, batch_size=4, augmentation=Augment(1), engine="stacked", device="cpu"
    )  # fmt: skip
    feed, first, second = run.engine.feed, round_of(run, 1), round_of(run, 2)
    expected = feed.batches(second, second.rows)
    assert [row.c for row in second.rows] == [2, 1, 0]  # most steps first

    first.ahead = lambda: [second.members[0].plan]
    feed.look_ahead(first, first.rows)
    assert feed.rows(first.members) == first.rows  # not the round that was planned
    rows = feed.rows(second.members)
    assert rows == second.rows
    second.rows = rows
    sent = feed.batches(second, rows)
    for one, other in zip((*sent.batches, sent.filled), (*expected.batches, expected.filled), strict=True):
        assert (torch.as_tensor(one) == torch.as_tensor(other)).all()

    feed.look_ahead(first, first.rows)
    other_round = feed.batches(first, first.rows)  # not the one that was planned
    assert not torch.equal(other_round.batches.samples, expected.batches.samples)
    feed.look_ahead(first, first.rows)
    some = feed.batches(second, second.rows[:1])  # a chunk
    assert len(some.batches.samples) == 1

    monkeypatch.setattr(Ranks, "owns", lambda ranks, client: False)
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(1, 2))
    feed.look_ahead(first, first.rows)  # another process has all clients of the next round
    assert feed.rows(second.members) == []
    monkeypatch.undo()

    feed.look_ahead(first, first.rows[:1])  # a round of several chunks: nothing is sent
    assert feed.batches(second, second.rows) is not sent
