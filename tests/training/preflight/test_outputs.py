"""Outputs that do not fit the labels, that are ignored, or that are not what the loss and the accuracy need."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lamina
from kinds import Tokens, conv, draw, integers, linear

X, Y = draw(12, 4), integers(3, 12)


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


def test_outputs_without_an_axis_of_samples_are_refused():
    message = r"outputs have shape \(6,\) for 2 samples of the train data; the first axis must be the samples'"
    with pytest.raises(lamina.BadInput, match=message):
        simulate(nn.Sequential(linear(3), nn.Flatten(0)), (X, Y))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(Tokens(5), (integers(9, 12, 3), integers(5, 12, 3))), "on the last axis: use loss='token_c"),
    (lambda: simulate(Tokens(5), (integers(9, 12, 3), Y * 2)), "5 on the first .* mean over them in the model"),
    (lambda: simulate(linear(1), (X, Y)), "labels go up to 2: it needs 3; for regression, use loss='mse'"),
    (lambda: simulate(linear(1), (X, Y % 2)), "labels go up to 1: it needs 2; use loss='bce' for two classes"),
    (lambda: simulate(linear(3), (X, Y + 1)), "classes are numbered from 0, and the labels start at 1"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4) + 1)), "classes are numbered from 0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.layer, self.result = nn.Linear(4, 3), result

    def forward(self, x):
        return self.result(self.layer(x))


@pytest.mark.parametrize(("result", "taken", "ignored"), [
    (lambda h: (h, 2 * h), r"tuple: .* \[0\]", r"\[1\]"),
    (lambda h: [h, h, [h]], r"list: .* \[0\]", r"\[1\], \[2\]"),
    (lambda h: {"aux": h, "logits": h}, r"dict: .* \['logits'\]", r"\['aux'\]"),
    (lambda h: SimpleNamespace(logits=h, value=h), r"SimpleNamespace: .* \.logits", r"\.value"),
])  # fmt: skip
def test_outputs_that_a_named_loss_ignores_are_named(caplog, result, taken, ignored):
    simulate(Returns(result), (X, Y), test=(X, Y))
    (said,) = caplog.messages
    words = taken.replace(".*", "the loss 'cross_entropy' takes its element")
    assert re.match(f"the model returns a {words} and ignores {ignored}; to use them, give a loss", said)
    caplog.clear()
    simulate(Returns(result), (X, Y), loss=lambda outputs, targets: sum(all_of(outputs)).sum(1), engine="loop")
    assert caplog.messages == []


def all_of(outputs):
    """Return all tensors, in a test's own way."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs if isinstance(outputs, tuple | list) else getattr(outputs, "__dict__", outputs).values()
    return [tensor for value in values for tensor in all_of(value)]


@pytest.mark.parametrize("result", [lambda h: h, lambda h: (h,), lambda h: (h, "state"), lambda h: {"logits": h}])
def test_one_output_needs_no_warning(caplog, result):
    simulate(Returns(result), (X, Y))
    assert caplog.messages == []


def test_a_model_without_log_softmax_is_warned_of_nll(caplog):
    torch.manual_seed(0)  # by chance, all outputs of a start may be negative
    simulate(nn.Sequential(linear(3), nn.LogSoftmax(1)), (X, Y), loss="nll")
    assert not caplog.text
    simulate(linear(3), (X, Y), loss="nll")
    assert "nll needs log-probabilities" in caplog.text


@pytest.mark.parametrize(("last", "loss", "is_warned_of"), [
    (nn.Softmax(1), "cross_entropy", True),
    (nn.Softmax(1), lamina.losses.CrossEntropy(label_smoothing=0.1), True),
    (nn.Softmax(1), lambda o, t: nn.functional.nll_loss(o.log(), t, reduction="none"), False),
    (nn.Sigmoid(), "cross_entropy", False),  # of any sum
    (nn.LogSoftmax(1), "cross_entropy", False),  # whose softmax they are again
])  # fmt: skip
def test_a_softmax_before_a_cross_entropy_is_warned_of(caplog, last, loss, is_warned_of):
    simulate(nn.Sequential(linear(3), last), (X, Y), loss=loss)
    assert ("sum to 1, and" in caplog.text and "leave the Softmax out" in caplog.text) is is_warned_of


def test_a_softmax_over_the_classes_of_tokens_is_warned_of(caplog):
    data = integers(9, 12, 3), integers(5, 12, 3)
    for last in (nn.Softmax(1), nn.Softmax(2)):  # over the tokens, and over the classes
        simulate(nn.Sequential(Tokens(5), last), data, loss="token_cross_entropy")
    assert caplog.text.count("sum to 1, and token_cross_entropy needs logits") == 1


def test_probabilities_in_place_of_logits_are_warned_of(caplog):
    def entropy(outputs, targets):
        return nn.functional.binary_cross_entropy(outputs[:, 0], targets.double(), reduction="none")

    x, y = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(120) % 2
    for last, expected in ((nn.Sigmoid(), True), (nn.Identity(), False)):
        model, loss = nn.Sequential(nn.Linear(4, 1), last).double(), entropy if expected else own_binary
        lamina.Simulation(model, (x, y), "fedavg", clients=2, loss=loss)
        assert ("the accuracy needs logits" in caplog.text) is expected
        caplog.clear()


def own_binary(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.double(), reduction="none")
