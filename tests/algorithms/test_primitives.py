"""Formulas that algorithms share, at the places where they would divide by zero or learn nothing."""

from types import SimpleNamespace

import pytest
import torch

from lamina import BadInput, algorithms
from lamina.algorithms import primitives


def test_a_division_by_zero_gives_zero_and_a_nan_stays():
    m, v = torch.tensor([1.0, 1.0, float("nan"), 1.0]), torch.tensor([4.0, 0.0, 4.0, float("nan")])
    result = primitives.precondition(m, v)
    assert result[:2].tolist() == [0.5, 0.0]
    assert result[2:].isnan().all()
    assert primitives.precondition(m, v, eps=2.0)[:2].tolist() == [0.25, 0.5]


def test_a_corrected_moment_of_a_constant_gradient_is_the_gradient():
    gradient, moment, weight = torch.tensor([3.0]), torch.zeros(1), torch.zeros(1)
    assert primitives.corrected(moment, weight).tolist() == [0.0]  # it has seen no gradient
    for _ in range(3):
        moment, weight = primitives.ema(moment, gradient, 0.9), primitives.next_weight(weight, 0.9)
        assert primitives.corrected(moment, weight).item() == pytest.approx(3.0)
    assert primitives.next_weight(None, 0.9) is None
    assert primitives.corrected(moment, None) is moment


def test_rows_are_clipped_each_by_its_own_norm():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert primitives.clip_by_norm(rows, 1.0).tolist() == [
        pytest.approx(row) for row in ([0.6, 0.8], [0.3, 0.4], [0.0, 0.0])
    ]


def test_the_decay_acts_in_one_place():
    u, y = torch.tensor([1.0]), torch.tensor([10.0])
    for form, expected in (("l2", (3.0, 1.0)), ("decoupled", (1.0, 3.0)), ("ratio", (1.0, 1.0))):
        options = SimpleNamespace(decay=0.2, decay_form=form)
        assert (primitives.add_l2(u, y, options).item(), primitives.add_decoupled(u, y, options).item()) == expected


def test_a_rate_may_be_a_tensor_of_several_runs():
    y, direction, rates = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.tensor([[0.1], [0.2]])
    together = primitives.descend(y, direction, rates)
    for row, rate in zip(together, (0.1, 0.2), strict=True):
        assert torch.allclose(row, primitives.descend(y[0], direction[0], rate))
    assert not primitives.is_exactly(torch.zeros(2), 0)  # its term is never skipped


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *(
            (lambda name=name, given=given: algorithms.create(name, beta2=1.0, v_init=0.0, **given), "beta2 = 1 keeps")
            for name, given in (
                ("fedlamb", {"second_moment": "running"}),
                ("fedlada", {}),
                ("fedlada_lamb", {}),
                ("localadam", {}),
                ("fedadam", {"tau": 0.0}),
                ("fedadam_star", {"tau": 0.0}),
            )
        ),
    ],
)
def test_a_second_moment_that_stays_zero_is_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("fedams_server", {"bias_correction": True}, "which is 0 for beta2 = 1"),
        ("fedlion", {}, "beta2 = 1 never lets a gradient into the momentum"),
        ("localadamw", {}, "beta2 = 1 never lets a gradient into the second moment"),
    ],
)
def test_other_second_decay_rates_of_one_are_refused(name, given, text):
    with pytest.raises(BadInput, match=text) as caught:
        algorithms.create(name, beta2=1.0, **given)
    assert "\n" not in str(caught.value)


OPTIONS = {name: algorithms.options(algorithm) for name, algorithm in algorithms.registry().items()}


@pytest.mark.parametrize("name", [n for n, each in OPTIONS.items() if "beta1" in each and n != "fedlion"])
def test_a_momentum_that_never_changes_is_refused(name):
    for corrected in {False, "bias_correction" in OPTIONS[name]}:
        with pytest.raises(BadInput, match="beta1 = 1 never lets a gradient into the momentum"):
            algorithms.create(name, beta1=1.0, **({"bias_correction": True} if corrected else {}))
