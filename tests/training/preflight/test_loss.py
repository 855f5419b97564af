"""Losses that do not return one number per sample, from that sample alone."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import lamina
from kinds import Tokens, conv, draw, integers, linear
from lamina.objective import losses

X, Y = draw(12, 4), integers(3, 12)


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


def centred(outputs, targets):
    each = F.cross_entropy(outputs, targets, reduction="none")
    return each - each.mean()


def noisy(outputs, targets):
    return (outputs[:, 0] - targets) ** 2 + torch.rand(len(outputs))


def one_number(outputs, targets):
    return (outputs[:, 0] - targets).mean()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), Y)), "one integer target per position.*targets of shape"),
    (lambda: simulate(nn.Conv2d(1, 2, 1), (torch.zeros(9, 1, 4, 4), integers(2, 9, 1, 4, 4))), r"y\.squeeze\(1\)"),
    (lambda: simulate(Tokens(5), (integers(9, 12, 6), integers(5, 12, 6))), "use loss='token_cross_entropy'"),
    (lambda: simulate(linear(1), (X, draw(12, 2)), loss="bce"), r"2 outputs, or .* one-hot .* y\.argmax\(1\)"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: (o[:, 0] - t).log()), "NaN before the first step"),
    (lambda: simulate(linear(3), (X, draw(12, 2))), "soft labels of the outputs' shape"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3))), "for several labels a sample use loss='bce'"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).bool())), "for several labels a sample use loss='bce'"),
    (lambda: simulate(linear(3), (X, draw(12, 2)), loss="nll"), "nll needs .* one integer target"),
    (lambda: simulate(linear(3), (X, Y), loss="bce"), "the binary cross entropy needs outputs of the targets' shape"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4).double())), r"y\.astype\('int64'\)"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3)), loss=nn.BCEWithLogitsLoss()), "use loss='bce' instead"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).double()), loss=nn.BCEWithLogitsLoss()), "use loss='bce', or"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3)), loss=losses.BinaryCrossEntropy([1.0, 2.0])),
     r"positive weights of shape \[2\], but a sample has targets of shape \[3\]"),
    (lambda: simulate(linear(1), (X, Y % 2), loss=losses.BinaryCrossEntropy([1.0, 2.0])), r"of shape \[\]: give"),
    (lambda: simulate(linear(3), (X, Y), loss="causal_lm"), "causal_lm needs outputs"),
    (lambda: simulate(linear(3), (X, Y), loss=losses.CrossEntropy([1.0, 2.0])), "2 class weights, but .* 3 outputs"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=one_number), r"one value per sample, shape \[2\], not shape \[\]"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: (o - t) ** 2),
     r"not shape \[2, 2\], from outputs of shape \[2, 1\] and targets of shape \[2\]: use outputs.squeeze\(1\)"),
    (lambda: simulate(linear(3), (X, draw(12, 3)), loss=lambda o, t: (o - t) ** 2), "mean over a sample's other axes"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: ((o - t) ** 2).mean(1)),
     r"the loss mixes samples.* outputs \[n, 1\] and targets \[n\]: use outputs.squeeze\(1\)"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: ((o - t) ** 2).mean(0)), "the loss mixes samples"),
    (lambda: simulate(linear(2), (X, draw(12, 1)), loss=lambda o, t: (o[:, 0] - t).abs().mean(1)),
     r"the loss mixes samples.* use targets.squeeze\(1\)"),
    (lambda: simulate(linear(1), (X, torch.tensor([0, 0, 0, 1] * 3)), loss=lambda o, t: ((o - t) ** 2).mean(1)),
     "the loss mixes samples"),
    (lambda: simulate(linear(3), (X, Y), loss=centred), "the loss mixes samples"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: o[:, 0] > t), "not torch.bool values"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: None), r"number per sample, shape \[2\], not a NoneType:"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda model, x, y: 0), r"argument: 'y'; define it as loss\(outputs, t"),
    (lambda: simulate(Two(lambda x: True, form=lambda h: (h, h)), (X, Y), loss=lambda o, t: o[0].mean()),
     r"not shape \[\], from outputs \(a tuple\) and targets of shape \[2\]: use reduction='none'"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: 1 / 0), r"ZeroDivisionError: .* \(test_loss.py:\d+\)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("own", [
    lambda o, t: (o[:, 0].sort()[0] - t) ** 2, lambda o, t: (o[:, 0] - t) ** 2 / len(t),
    lambda o, t: (o[:, 0] - t) ** 2 * torch.arange(len(t)), lambda o, t: (o[:, 0].cumsum(0) - t) ** 2,
    lambda o, t: (o[:, 0] - t.roll(1)) ** 2, lambda o, t: (o[:, 0] - t) ** 2 * (t > t.median()),
])  # fmt: skip
def test_a_loss_that_depends_on_the_rest_of_the_batch_is_refused(own, is_zero):
    model = linear(1)
    for parameter in model.parameters() if is_zero else ():
        nn.init.zeros_(parameter)  # all outputs are equal, and nothing about them says what the loss does
    with pytest.raises(lamina.BadInput, match="the loss mixes samples") as refused:
        simulate(model, (X, draw(12).sort()[0]), loss=own)
    assert "squeeze" not in str(refused.value)
    simulate(model, (X, draw(12)), loss=lambda o, t: (o[:, 0] - t) ** 2)


def test_a_loss_may_check_that_its_outputs_are_probabilities():
    def entropy(outputs, targets):
        assert (outputs.sum(1) - 1).abs().max() < 1e-6
        return -outputs[torch.arange(len(targets)), targets].log()

    simulate(nn.Sequential(linear(3), nn.Softmax(1)), (X, Y), loss=entropy, engine="loop")


def test_a_loss_of_ones_own_may_draw_random_numbers_and_a_sample_be_alone():
    simulate(linear(1), (X, draw(12)), loss=noisy, engine="loop")
    lamina.Simulation(linear(1).double(), (X[:1], draw(1)), "fedavg", clients=1, loss=noisy, engine="loop")


def test_a_loss_of_maps_gets_a_hint():
    images, maps = torch.randn(8, 3, 4, 4), torch.arange(8 * 16).reshape(8, 4, 4) % 3
    with pytest.raises(lamina.BadInput, match=r"not shape \[2, 4, 4\].*mean over a sample's other axes"):
        lamina.Simulation(nn.Conv2d(3, 3, 1), (images, maps), clients=2, loss=nn.CrossEntropyLoss(reduction="none"))


class Two(nn.Module):
    """A body and two heads, the second of which only large batches use, or none."""

    def __init__(self, uses_second, recomputes=False, form=lambda hidden: hidden):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.uses_second, self.recomputes, self.form = uses_second, recomputes, form

    def forward(self, x):
        hidden = self.body(x)
        hidden = checkpoint(self.first, hidden, use_reentrant=True) if self.recomputes else self.first(hidden)
        return self.form(hidden + self.second(self.body(x)) if self.uses_second(x) else hidden)


def test_parameters_that_never_receive_a_gradient_are_named(caplog):
    simulate(Two(lambda x: False), (X, Y)).run(1)
    (said,) = caplog.messages
    assert said.startswith("2 trainable parameters of the model never receive a gradient (second.weight, second.bias)")
    assert "(18 numbers); freeze them with requires_grad_(False), or use them in the loss" in said
    caplog.clear()
    frozen = Two(lambda x: False)
    frozen.second.requires_grad_(False)
    simulate(frozen, (X, Y))
    simulate(Two(lambda x: True), (X, Y))
    simulate(Two(lambda x: len(x) > 6), (X, Y))  # larger batches than a dry run's first
    assert caplog.messages == []


class Adversaries(nn.Module):
    """A generator and a discriminator; what the second says of false samples, of detached ones and of real ones."""

    def __init__(self, form):
        super().__init__()
        self.generator, self.discriminator, self.form = nn.Linear(4, 4), nn.Linear(4, 1), form

    def forward(self, x):
        false = self.generator(x)
        said = [self.discriminator(each).squeeze(1) for each in (false, false.detach(), x)]
        return self.form(false, *said)


@pytest.mark.parametrize(("form", "loss", "ignored"), [
    (lambda *o: o, lambda o, t: F.softplus(o[2]) + F.softplus(-o[3]), r"\[0\], \[1\] of the tuple .* use them in"),
    (lambda *o: o[1:], lambda o, t: F.softplus(o[1]) + o[2], r"\[0\] of the tuple .* use it in"),
    (lambda *o: dict(zip("abcd", o, strict=True)), lambda o, t: o["b"] ** 2, r"\['c'\], \['d'\] of the dict"),
])  # fmt: skip
def test_outputs_that_a_users_loss_ignores_are_named(caplog, form, loss, ignored):
    simulate(Adversaries(form), (X, Y), loss=loss)
    assert re.match(f"the loss ignores {ignored}", caplog.messages[0])  # not the false samples, if they lead to others


def test_outputs_that_a_users_loss_uses_or_that_no_gradient_reaches_are_not_named(caplog):
    simulate(Adversaries(lambda *o: o), (X, Y), loss=lambda o, t: sum(o[1:]))
    simulate(Adversaries(lambda *o: (*o[:2], o[2].detach())), (X, Y), loss=lambda o, t: o[1])
    rare = lamina.losses.per_batch(lambda o, t: (o[1] + (o[2] + o[3] if len(t) > 6 else 0)).mean())
    simulate(Adversaries(lambda *o: o), (X, Y), loss=rare)  # larger batches than a dry run's first
    assert caplog.messages == []


@pytest.mark.long  # torch takes long to checkpoint for the first time
def test_activation_checkpointing_that_cuts_the_gradient_after_frozen_layers_is_explained(caplog):
    model = Two(lambda x: True, recomputes=True)
    model.body.requires_grad_(False)
    simulate(model, (X, Y))
    (said,) = caplog.messages
    assert "(first.weight, first.bias)" in said
    assert said.endswith("use_reentrant=True cuts the gradient after frozen layers: call checkpoint(..., "
                         "use_reentrant=False)")  # fmt: skip
    model.second.requires_grad_(False)
    with pytest.raises(lamina.BadInput, match="does not depend on any trainable parameter; activation checkpointing"):
        simulate(model, (X, Y))


def test_a_loss_of_several_outputs_or_targets_is_checked_sample_by_sample():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            out, state = self.lstm(x)
            return {"scores": self.head(out[:, -1]), "state": state}

    def loss(outputs, targets):
        sizes = outputs["state"][0][-1].square().sum(1)  # [layers, n, units]: the samples are not first
        return F.cross_entropy(outputs["scores"], targets["kind"], reduction="none") + (sizes - targets["size"]) ** 2

    data = draw(12, 3, 4), {"kind": Y, "size": draw(12)}
    simulate(Recurrent(), data, loss=loss)
    with pytest.raises(lamina.BadInput, match=r"the loss mixes samples.*own row of outputs and targets, or"):
        simulate(Recurrent(), data, loss=lambda o, t: loss(o, t) - loss(o, t).mean())
    with pytest.raises(lamina.BadInput, match=r"KeyError: 'other'.* it gets the dict that the model returns$"):
        simulate(Recurrent(), data, loss=lambda o, t: o["other"])
    with pytest.raises(lamina.BadInput, match=r"one tensor of targets, and there are 2 \(y\['kind'\], y\['size'\]"):
        simulate(linear(3), (X, data[1]))


@pytest.mark.filterwarnings("ignore:std")  # torch's, of the deviation of one sample
@pytest.mark.parametrize(("function", "message"), [
    (lambda o, t: F.cross_entropy(o, t, reduction="none"), r"not torch.float64 values of shape \[6\]; for one"),
    (lambda o, t: 0.5, "must return one number as a tensor with a gradient, not a float"),
    (lambda o, t: o.std(0).log().sum(), "is nan for a batch of 1 sample, the smallest of a client: choose"),
])  # fmt: skip
def test_a_loss_of_a_whole_batch_that_is_not_a_number_is_refused(function, message):
    with pytest.raises(lamina.BadInput, match=message):
        simulate(linear(3), (X, Y), loss=losses.per_batch(function), batch_size=5)
