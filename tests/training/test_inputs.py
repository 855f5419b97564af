"""Algorithms, models and data as objects, functions or names."""

import pytest
import torch
from torch import nn

import lamina
from lamina.training.inputs import as_algorithm, as_model, as_splits

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


class WithoutCard(lamina.FedAvg):
    """An algorithm whose author forgot the decorator."""

    @property
    def card(self):
        raise AttributeError("card")


def test_an_algorithm_is_an_object_or_a_name():
    algorithm = lamina.FedLamb()
    assert as_algorithm(algorithm) is algorithm
    assert isinstance(as_algorithm("fedlamb"), lamina.FedLamb)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (lamina.FedLamb, "algorithm is the class FedLamb: give a name or an instance"),
        (7, "algorithm is 7: give a name or an instance"),
        (WithoutCard(), "the class WithoutCard has no card"),
    ],
)
def test_what_is_no_algorithm_is_refused(algorithm, message):
    with pytest.raises(lamina.BadInput, match=message):
        as_algorithm(algorithm)


def test_test_data_may_be_part_of_a_pair_or_given_apart():
    train, test = (lamina.Dataset(X[part], Y[part]) for part in (slice(3), slice(3, 6)))
    assert as_splits((train, test)) == (train, test)
    assert as_splits((train, test), test=train) == (train, train)
    assert as_splits((X, Y))[1] is None
    assert len(as_splits("digits")[1]) > 0


def test_a_pair_of_pairs_is_refused():
    with pytest.raises(lamina.BadInput, match=r"pass only \(x, y\) of the training data there"):
        as_splits(((X, Y), (X, Y)))


def test_a_module_is_copied_and_a_function_gives_weights_by_seed():
    module, data = nn.Linear(4, 3), lamina.Dataset(X, Y)
    copy = as_model(module, data, 0)
    assert torch.equal(copy.weight, module.weight)
    assert copy.weight is not module.weight

    def make(input_shape, classes):
        return nn.Linear(*input_shape, classes)

    first, again, other = (as_model(make, data, seed).weight for seed in (0, 0, 1))
    assert first.shape == (3, 4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_model_that_cannot_be_used_is_refused():
    data = lamina.Dataset(X, Y)
    with pytest.raises(lamina.BadInput, match=r"model is 7: give an nn\.Module"):
        as_model(7, data, 0)
    module = nn.Linear(4, 3)
    module.generator = (i for i in range(3))  # cannot be copied
    with pytest.raises(lamina.BadInput, match=r"the model cannot be copied \(.*or give a function that returns it"):
        as_model(module, data, 0)
