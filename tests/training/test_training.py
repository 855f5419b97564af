"""`Training`: its options, when it evaluates, and the plans it makes ahead."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.devices import arithmetic
from lamina.training.training import RunOptions, evaluate_together

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def training(**more):
    torch.manual_seed(0)
    settings = {"test": (X, Y), "clients": 4, "device": "cpu", "lr": 0.1, "participation": 0.5}
    return lamina.Simulation(nn.Linear(4, 3), (X, Y), "fedavg", **settings | more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp12"}, "unknown precision 'fp12'"),
        ({"evaluate_every": 0}, "evaluate_every = 0"),
        ({"diagnostics": ["drfit"]}, "did you mean 'drift'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(lamina.BadInput, match=message):
        RunOptions(**options)


def test_the_last_round_is_evaluated_and_every_round_is_announced():
    run, rows = training(evaluate_every=2), []
    history = run.run(3, on_round=rows.append)
    assert [row["round"] for row in history if "accuracy" in row] == [2, 3]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert run.evaluate()["loss"] == pytest.approx(history[-1]["loss"])


def test_only_simulations_that_are_due_are_evaluated_together():
    runs = [training(evaluate_every=every) for every in (1, 2)]
    for run in runs:
        run.run_round()
    with arithmetic("fp32", False):
        first, second = evaluate_together(runs)
        assert set(first) == {"loss", "accuracy", "evaluation_seconds"}
        assert second == {}
        assert all("loss" in row for row in evaluate_together(runs, always=True))


def test_a_plan_made_ahead_is_used_in_its_round_only():
    run = training()
    assert run.next_plan().number == 1
    (ahead,) = run.plan_ahead()  # while round 1 is running
    assert ahead.number == 2
    start = run.state
    run.state = replace(start, round=1)
    assert run.next_plan() is ahead
    (ahead,) = run.plan_ahead()
    run.state = start
    assert run.next_plan().number == 1
