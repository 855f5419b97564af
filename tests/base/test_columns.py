"""Rows stored by column: the same rows come back, with their types, their gaps and their order."""

import math

import pytest

from lamina.base.columns import Columns
from lamina.training.history import History

ROWS = [
    {"round": 1, "loss": 2.0, "steps": 3, "big": 2**40},
    {"round": 2, "steps": 3, "accuracy": 1},
    {"round": 3, "loss": 0.5, "steps": 4, "accuracy": 0.25, "big": 2**70},
]


def same(one, other):
    return one == other and [list(map(type, row.values())) for row in one] == [
        list(map(type, row.values())) for row in other
    ]


def in_parts(rows, size):
    return Columns.joined([Columns.from_rows(rows[start : start + size]) for start in range(0, len(rows), size)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_come_back(size):
    table = in_parts(ROWS, size)
    assert len(table) == 3
    assert table.names == ["round", "loss", "steps", "big", "accuracy"]
    assert list(table) == [{**row, **({"big": float(row["big"])} if "big" in row else {})} for row in ROWS]
    assert table[-1]["accuracy"] == 0.25
    assert next(iter(table[1:]))["round"] == 2
    assert [row["round"] for row in table[::-1]] == [3, 2, 1]
    with pytest.raises(IndexError):
        table[3]


def test_whole_numbers_stay_whole_and_nulls_become_nan():
    rows = [{"round": 1, "bytes": 2**40, "loss": None}, {"round": 2, "bytes": 5, "loss": 1.0}]
    first, second = Columns.from_rows(rows)
    assert same([{k: v for k, v in first.items() if k != "loss"}, second], [{"round": 1, "bytes": 2**40}, rows[1]])
    assert math.isnan(first["loss"])


@pytest.mark.parametrize("value", [True, "1", [1], {}, math.inf, math.nan, 10**400])
def test_anything_but_a_finite_number_is_refused(value):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        Columns.from_rows([{"round": 1, "loss": 0.5}, {"round": 2, "loss": value}])


def test_a_history_answers_the_same_from_columns_and_from_rows():
    rows = [
        {"round": i, "loss": abs(7 - i) + 0.5, **({"accuracy": i / 20} if i % 3 == 0 else {})} for i in range(1, 21)
    ]
    one, other = History(rows), History(in_parts(rows, 7))
    assert one.columns == other.columns
    assert one.metric == other.metric == "accuracy"
    for name in ("loss", "accuracy"):
        assert [one.best(name), one.last(name), one.total(name)] == [
            other.best(name),
            other.last(name),
            other.total(name),
        ]
        assert one.column(name) == pytest.approx(other.column(name), nan_ok=True)
    for target in (0.2, 0.5, 0.89, 2.0):
        assert one.rounds_to(target) == other.rounds_to(target)
    assert one.rounds_to(0.6, "loss") == other.rounds_to(0.6, "loss") == 7
    assert repr(one) == repr(other)
    other.append({"round": 21, "loss": 0.0})
    assert len(other) == 21
    assert other.best("loss") == 0.0
    assert list(other)[:20] == rows
