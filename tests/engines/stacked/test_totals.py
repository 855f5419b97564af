"""The sums of a chunk's rows for each member, against sums by hand."""

import pytest
import torch

import lamina
from lamina.algorithms.contract import Displacement
from lamina.base.errors import Diverged
from lamina.engines.stacked.rows import Member, RoundInProgress, Trained, plan_rows
from lamina.engines.stacked.totals import Totals
from small_simulations import PARTS, noise


@pytest.fixture
def population():
    """A round of two members, one weighted by examples; uploads and buffers of every row."""
    runs = [noise(0, clients=PARTS), noise(1, clients=PARTS, weighting="examples")]
    members = [Member(run.algorithm, run.state, run.plan.round(1), run.protocol) for run in runs]
    rows = plan_rows([member.plan for member in members], [member.protocol for member in members])
    now = RoundInProgress(members, rows)
    now.sums = [run.engine._empty_sums(member) for run, member in zip(runs, members, strict=True)]
    totals = Totals(runs[0].objective, runs[0].engine.forward)
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(len(rows), runs[0].objective.layers.size, generator=generator)
    up = Displacement(deltas)
    trained = Trained(torch.zeros(len(rows)), up, up, None, {}, torch.zeros(len(rows)), None, ([], torch.zeros(0)))
    return now, totals, trained


def by_hand(now, e, deltas):
    member = now.members[e]
    shares = member.plan.examples if member.protocol.by_examples else [1] * len(member.plan.cohort)
    rows = {row.c: r for r, row in enumerate(now.rows) if row.member == e}
    return sum(deltas[rows[c]].double() * float(share / sum(shares)) for c, share in enumerate(shares))


def test_every_member_has_the_weighted_mean_of_its_rows(population):
    now, totals, trained = population
    sums = totals.add(now, now.rows, trained, totals.row_weights(now, now.rows))
    assert sums.keys() == {0, 1}
    for e, (up, _) in sums.items():
        torch.testing.assert_close(up.delta.double(), by_hand(now, e, trained.up.delta), rtol=1e-5, atol=1e-6)


def test_a_member_that_diverged_counts_in_no_sum(population):
    now, totals, trained = population
    bad = next(r for r, row in enumerate(now.rows) if row.member == 0)
    trained.up.delta[bad] = torch.nan
    now.failed[0] = Diverged("lost", round=1, client=0, layer="0.weight")
    sums = totals.add(now, now.rows, trained, totals.row_weights(now, now.rows))
    assert sums.keys() == {1}
    torch.testing.assert_close(sums[1][0].delta.double(), by_hand(now, 1, trained.up.delta), rtol=1e-5, atol=1e-6)
    now.failed[1] = Diverged("lost, too", round=1, client=None, layer="0.weight")
    assert totals.add(now, now.rows, trained, totals.row_weights(now, now.rows)) == {}


def test_relative_weights_are_those_of_members_weighted_by_examples(population):
    now, totals, _ = population
    relative = totals.relative_weights(now, now.rows)[:, 0]
    for row, weight in zip(now.rows, relative.tolist(), strict=True):
        plan = now.members[row.member].plan
        expected = 1.0 if row.member == 0 else plan.examples[row.c] / plan.examples.mean()
        assert weight == pytest.approx(expected)
    alone = RoundInProgress(now.members[:1], [row for row in now.rows if row.member == 0])
    assert totals.relative_weights(alone, alone.rows) is None


def test_a_chunk_of_one_row_adds_to_what_is_there():
    run = noise(0, clients=PARTS, algorithm=lamina.FedAvg())
    member = Member(run.algorithm, run.state, run.plan.round(1), run.protocol)
    now = RoundInProgress([member], plan_rows([member.plan], [member.protocol]))
    now.sums = [run.engine._empty_sums(member)]
    totals = Totals(run.objective, run.engine.forward)
    deltas = torch.randn(len(now.rows), run.objective.layers.size)
    for r, row in enumerate(now.rows):
        up = Displacement(deltas[r : r + 1])
        trained = Trained(torch.zeros(1), up, up, None, {}, torch.zeros(1), None, ([], torch.zeros(0)))
        (now.sums[0].up, _) = totals.add(now, [row], trained, totals.row_weights(now, [row]))[0]
    torch.testing.assert_close(now.sums[0].up.delta.double(), by_hand(now, 0, deltas), rtol=1e-5, atol=1e-6)
