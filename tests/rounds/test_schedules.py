"""Learning-rate schedules: their factors, their names, and rates that leave the range of a float."""

import pytest

from lamina.base.errors import BadInput
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.schedules import Constant, Cosine, Exponential, Milestones, make_schedule
from lamina.rounds.settings import TrainSettings
from ragged_clients import ragged


def test_schedules():
    rates = [make_schedule("exponential").factor(r) for r in (1, 2, 3)]
    assert rates == pytest.approx([1, 0.998, 0.998**2])
    assert [Milestones((30, 70)).factor(r) for r in (29, 30, 69, 70)] == pytest.approx([1, 0.1, 0.1, 0.01])
    assert [Cosine(4).factor(r) for r in (1, 3, 5, 9)] == pytest.approx([1, 0.5, 0, 0])
    assert Cosine(4, floor=0.2).factor(3) == pytest.approx(0.6)
    assert Constant().factor(99) == 1
    plan = Plan(ragged([1]), TrainSettings(0.5, schedule=Exponential(0.5)))
    assert plan.round(3).lr == 0.125


def test_a_schedule_that_leaves_the_floats_is_one_line():
    clients = Clients([range(4)], samples=4)
    for schedule in (Exponential(1e300), Milestones((1, 2, 3), 1e300)):
        with pytest.raises(BadInput, match="gives the learning rate"):
            Plan(clients, TrainSettings(lr=0.1, schedule=schedule)).round(3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: make_schedule("cosin"), "did you mean 'cosine'"),
        (lambda: make_schedule("cosine"), "rounds"),
        (lambda: make_schedule("exponential", gama=0.9), "did you mean 'gamma'"),
    ],
)
def test_bad_schedules_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)
