"""What a model returns: which element named losses take, and how the whole is changed, joined and searched."""

import dataclasses
import types
from collections import namedtuple

import pytest
import torch
from torch import nn

import lamina
from kinds import draw, integers
from lamina.objective.outputs import (
    join_outputs,
    map_outputs,
    other_elements,
    outputs_of,
    sample_axes,
    select_samples,
    tensors_in,
)

ONE, TWO = torch.arange(6.0).reshape(3, 2), torch.arange(3.0)
Named = namedtuple("Named", ["mean", "logits"])


@dataclasses.dataclass(frozen=True)
class Record:
    logits: torch.Tensor
    parts: list
    note: str = "text"


WRAPPED = {
    "tensor": (lambda t: t, []),
    "tuple": (lambda t: (t, "hidden"), []),
    "list": (lambda t: [t, [TWO]], ["[1]"]),
    "dict": (lambda t: {"aux": TWO, "logits": t, "loss": 0}, ["['aux']"]),
    "namedtuple": (lambda t: Named(TWO, t), [".mean"]),
    "dataclass": (lambda t: Record(t, [TWO]), [".parts"]),
    "namespace": (lambda t: types.SimpleNamespace(logits=t), []),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_main_element_is_found_and_the_others_are_named(kind):
    wrap, others = WRAPPED[kind]
    assert outputs_of(wrap(ONE)) is ONE
    assert other_elements(wrap(ONE)) == others


@pytest.mark.parametrize("result", [None, (), {"hidden": ONE}, ("hidden", ONE), types.SimpleNamespace(logits=None)])
def test_a_result_without_outputs_is_refused(result):
    with pytest.raises(lamina.BadInput, match=f"the model returns a {type(result).__name__}.*: named losses"):
        outputs_of(result)


@pytest.mark.parametrize("kind", WRAPPED)
def test_every_tensor_is_mapped_and_the_rest_stays(kind):
    result = WRAPPED[kind][0](ONE)
    doubled = map_outputs(lambda tensor: 2 * tensor, result)
    assert type(doubled) is type(result)
    for one, two in zip(tensors_in(result), tensors_in(doubled), strict=True):
        assert torch.equal(two, 2 * one)
    assert outputs_of(result) is ONE  # the original is as it was
    if kind == "dataclass":
        assert doubled.note == "text"


def test_batches_are_joined_along_their_samples_and_other_numbers_are_averaged_over_samples():
    """The hidden state of an LSTM has the samples on axis 1."""
    hidden, penalty = torch.randn(2, 5, 4), (torch.tensor(1.0), torch.tensor(6.0))
    parts = [
        {"out": torch.arange(5.0)[rows], "state": hidden[:, rows], "penalty": number}
        for rows, number in zip((slice(3), slice(3, 5)), penalty, strict=True)
    ]
    whole = join_outputs(parts, [3, 2], [0, 1, None])
    assert torch.equal(whole["out"], torch.arange(5.0))
    assert torch.equal(whole["state"], hidden)
    assert float(whole["penalty"]) == pytest.approx((3 * 1 + 2 * 6) / 5)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: (t, "hidden"), lambda t: {"logits": t}, lambda t: [t]])
def test_outputs_may_be_wrapped(make):
    class Wrapped(nn.Linear):
        def forward(self, input):
            return make(super().forward(input))

    data = draw(12, 4), integers(3, 12)
    run = lamina.Simulation(Wrapped(4, 3).double(), data, "fedavg", clients=2, device="cpu")
    assert run.run(1)[0]["round"] == 1


def test_the_axis_of_the_samples_is_not_one_that_has_their_number_by_chance():
    def lstm(samples):  # of two layers, with a code book of two rows
        return {"state": torch.zeros(2, samples, 4), "out": torch.zeros(samples, 2), "book": torch.ones(2, 3)}

    axes = sample_axes(lstm)
    assert axes == [1, 0, None]
    whole = join_outputs([lstm(2), lstm(2)], [2, 2], axes)
    assert [list(part.shape) for part in whole.values()] == [[2, 4, 4], [4, 2], [2, 3]]
    assert [list(part.shape) for part in select_samples(lstm(2), torch.tensor([1]), axes).values()] == [
        [2, 1, 4],
        [1, 2],
        [2, 3],
    ]
