"""A batch is a tensor, a tuple or a dict of tensors."""

import pytest
import torch

from lamina.objective.batch import arguments, named_tensors, same_kind, take, tensors

ONE, TWO = torch.arange(6.0).reshape(3, 2), torch.arange(3)


def test_a_batch_of_each_kind_keeps_its_structure():
    for batch, expected in ((ONE, ONE[1:]), ((ONE, TWO), (ONE[1:], TWO[1:])), ({"a": TWO}, {"a": TWO[1:]})):
        rest = take(batch, slice(1, None))
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
    assert list(named_tensors({"ids": TWO}, "y")) == ["y['ids']"]


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
