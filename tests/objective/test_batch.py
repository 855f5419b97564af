"""A batch is a tensor, a tuple or a dict of tensors; a model's outputs may be wrapped."""

import types

import pytest
import torch
from torch import nn

import lamina
from kinds import draw, integers
from lamina.objective.batch import arguments, map_batch, named_tensors, outputs_of, same_kind, tensors

ONE, TWO = torch.arange(6.0).reshape(3, 2), torch.arange(3)


def test_a_batch_of_each_kind_keeps_its_structure():
    for batch, expected in ((ONE, ONE[1:]), ((ONE, TWO), (ONE[1:], TWO[1:])), ({"a": TWO}, {"a": TWO[1:]})):
        rest = map_batch(lambda tensor: tensor[1:], batch)
        assert type(rest) is type(expected)
        assert same_kind(rest, expected)
        for tensor, other in zip(tensors(rest), tensors(expected), strict=True):
            assert torch.equal(tensor, other)


def test_a_model_gets_a_tuple_by_place_and_a_dict_by_name():
    assert arguments(ONE) == ((ONE,), {})
    assert arguments((ONE, TWO)) == ((ONE, TWO), {})
    assert arguments({"ids": TWO}) == ((), {"ids": TWO})


def test_messages_name_the_tensors_of_a_batch():
    assert list(named_tensors(ONE)) == ["x"]
    assert list(named_tensors((ONE, TWO))) == ["x[0]", "x[1]"]
    assert list(named_tensors({"ids": TWO})) == ["x['ids']"]


@pytest.mark.parametrize(
    "other",
    [ONE.double(), ONE[:, :1], (ONE,), {"a": ONE}],
    ids=["another type", "another shape", "a tuple", "a dict"],
)
def test_other_samples_are_of_another_kind(other):
    assert same_kind(ONE, ONE[:1])  # the number of samples does not count
    assert not same_kind(ONE, other)
    assert not same_kind(other, ONE)


def test_dicts_with_other_names_are_of_another_kind():
    assert same_kind({"a": ONE, "b": TWO}, {"a": ONE, "b": TWO})
    assert not same_kind({"a": ONE}, {"b": ONE})


@pytest.mark.parametrize("wrap", [lambda t: (t, "hidden"), lambda t: [t], lambda t: {"logits": t, "loss": 0},
                                  lambda t: types.SimpleNamespace(logits=t)])  # fmt: skip
def test_outputs_are_found_in_what_a_model_returns(wrap):
    assert outputs_of(wrap(ONE)) is ONE


@pytest.mark.parametrize("result", [None, (), {"hidden": ONE}, ("hidden", ONE), types.SimpleNamespace(logits=None)])
def test_a_result_without_outputs_is_refused(result):
    with pytest.raises(lamina.BadInput, match=f"the model returns a {type(result).__name__} without outputs"):
        outputs_of(result)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: (t, "hidden"), lambda t: {"logits": t}, lambda t: [t]])
def test_outputs_may_be_wrapped(make):
    class Wrapped(nn.Linear):
        def forward(self, input):
            return make(super().forward(input))

    data = draw(12, 4), integers(3, 12)
    run = lamina.Simulation(Wrapped(4, 3).double(), data, "fedavg", clients=2, device="cpu")
    assert run.run(1)[0]["round"] == 1
