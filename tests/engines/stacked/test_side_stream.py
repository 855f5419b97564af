"""Gradients that a side stream computes are claimed once, and added to those of autograd."""

import torch

from lamina.engines.stacked import side_stream
from lamina.engines.stacked.side_stream import Claim, claim, differentiate, weight_gradients


class Immediate:
    """Stands for a side stream: computes at once."""

    def __init__(self):
        self.gradients = {}

    def add(self, weights, work, inputs):
        self.gradients |= dict(zip(weights, work(), strict=True))


def test_losses_and_the_gradients_of_their_sum():
    used, unused = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    losses, gradients = differentiate(lambda: (used**2).sum(1), {"used": used, "unused": unused})
    assert losses.tolist() == [3.0, 3.0]
    assert not losses.requires_grad
    assert torch.equal(gradients["used"], 2 * used)
    assert torch.equal(gradients["unused"], torch.zeros(2, 3))  # the losses do not depend on it


def test_without_a_side_stream_nothing_is_claimed():
    weight = torch.ones(2, requires_grad=True)
    assert claim(weight) is None
    assert weight_gradients(None, lambda: [torch.ones(2)], [])[0].tolist() == [1.0, 1.0]


def test_only_parameters_are_claimed():
    stream, weight = Immediate(), torch.ones(2, requires_grad=True)
    token = side_stream._current.set(stream)
    try:
        assert claim(weight, None) == Claim(stream, [id(weight)])
        assert claim(weight, 2 * weight) is None  # computed from others
        assert claim(weight, torch.ones(2)) is None  # not trained
    finally:
        side_stream._current.reset(token)


def test_autograd_gets_none_for_what_is_claimed():
    stream, weight = Immediate(), torch.ones(2)
    claimed = Claim(stream, [id(weight)])
    assert weight_gradients(claimed, lambda: [torch.full((2,), 3.0)], [weight]) == [None]
    assert stream.gradients[id(weight)].tolist() == [3.0, 3.0]
