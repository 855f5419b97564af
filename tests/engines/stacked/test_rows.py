"""Records and plans of many clients become tensors with a leading axis, and rows of them records again."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lamina
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.rows import (
    Row,
    pad_plans,
    per_member,
    plan_rows,
    row_algorithm,
    row_of,
    rows_of,
    stack_records,
    to_layout,
)
from lamina.objective.layers import Layers


class Record(NamedTuple):
    x: torch.Tensor
    absent: torch.Tensor | None = None


def plan(steps, width, cohort=None, first=0):
    """A plan whose clients have so many steps, each with a full batch of their own samples."""
    steps = np.array(steps)
    index = first + np.arange(len(steps) * steps.max() * width).reshape(len(steps), steps.max(), width)
    filled = np.where(np.arange(steps.max()) < steps[:, None], width, 0)
    cohort = np.arange(len(steps)) if cohort is None else np.array(cohort)
    return SimpleNamespace(steps=steps, index=index, filled=filled, cohort=cohort, examples=steps * width)


def test_records_become_rows_in_their_order():
    one, other = Record(torch.tensor([1.0, 2.0])), Record(torch.tensor([3.0, 4.0]))
    for records in ([one, other], [one, other, one], [other, other]):
        stacked = stack_records(records)
        assert stacked.absent is None
        assert torch.equal(stacked.x, torch.stack([record.x for record in records]))
    assert stack_records([one] * 3).x.data_ptr() == one.x.data_ptr()  # no copy of one record


def test_rows_have_memory_of_their_own():
    stacked = Record(torch.arange(6.0).reshape(2, 3))
    rows = rows_of(stacked)
    assert [row.x.tolist() for row in rows] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(rows[1].x, row_of(stacked, 1).x)
    stacked.x.zero_()
    assert rows[1].x.tolist() == [3.0, 4.0, 5.0]
    assert rows[1].absent is None


def test_numbers_that_differ_between_members_become_columns():
    members = {e: SimpleNamespace(algorithm=lamina.FedLamb(decay=decay)) for e, decay in enumerate((0.1, 0.2))}
    chunk = [Row(1, 0, 1.0), Row(0, 0, 0.5), Row(0, 1, 0.5)]
    algorithm = row_algorithm(chunk, members, torch.zeros(1, dtype=torch.float64))
    assert algorithm.decay.tolist() == [[0.2], [0.1], [0.1]]
    assert algorithm.beta1 == members[0].algorithm.beta1
    assert row_algorithm(chunk[1:], {0: members[0]}, torch.zeros(1)) is members[0].algorithm
    assert per_member(chunk, {0: 0.3, 1: 0.3}, torch.zeros(1)) == 0.3
    assert per_member(chunk, {0: 1.0, 1: 2.0}, torch.zeros(1)).tolist() == [[2.0], [1.0], [1.0]]


def test_rows_with_most_steps_come_first():
    plans = [plan([2, 4], 3), plan([3, 4, 1], 3)]
    rows = plan_rows(plans, [SimpleNamespace(by_examples=False), SimpleNamespace(by_examples=True)])
    assert [(row.member, row.c) for row in rows] == [(0, 1), (1, 1), (1, 0), (0, 0), (1, 2)]
    assert [row.weight for row in rows] == pytest.approx([1 / 2, 4 / 8, 3 / 8, 1 / 2, 1 / 8])


def test_a_rank_has_the_rows_of_its_own_clients(monkeypatch):
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(1, 2))
    rows = plan_rows([plan([1, 2, 3], 3, cohort=[4, 5, 7])], [SimpleNamespace(by_examples=False)])
    assert [row.c for row in rows] == [2, 1]


def test_shorter_plans_are_padded_with_steps_of_no_samples():
    long, short = plan([3, 1], 2), plan([2], 4, first=100)
    index, counts = pad_plans([long, short, long], [0, 0, 1])
    assert index.shape == (3, 3, 4)
    assert counts.tolist() == [[2, 2, 2], [4, 4, 0], [2, 0, 0]]
    assert index[0, :, :2].tolist() == long.index[0].tolist()
    assert index[1, :2].tolist() == short.index[0].tolist()
    assert set(index[1, 2]) == {100}  # a sample of the client's own
    alone, filled = pad_plans([long], [1])
    assert (alone.shape, filled.tolist()) == ((1, 1, 2), [[2]])


def test_vectors_are_reordered_and_back():
    layout = Layers({"conv.weight": (2, 3, 2, 2)}).channels_last()
    vector = torch.arange(24.0)
    ordered = to_layout(vector, layout)
    assert not torch.equal(ordered, vector)
    assert torch.equal(to_layout(ordered, layout, back=True), vector)
    assert torch.equal(to_layout(torch.ones(1), layout), torch.ones(1))  # a number per layer has no order
    assert to_layout(vector, None) is vector
