"""The other implementation: which half it is, how it is created and called, and what is refused in one line."""

import functools
from importlib import metadata

import pytest
import torch

import lamina
from lamina import BadInput
from lamina.conformance.target import version_of


def sgd(y, grad, lr):
    return y - lr * grad


class Momentum:
    """FedAvgM; an object that can be called."""

    def __init__(self, mu=0.9):
        self.mu, self.b = mu, 0

    def __call__(self, x, delta):
        self.b = self.mu * self.b + delta
        return x + self.b


def make_momentum(mu=0.9):
    return Momentum(mu)


def make_optimizer(params, lr, momentum=0.0):
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


@pytest.mark.parametrize("theirs", [Momentum, Momentum(), make_momentum, Momentum().__call__])
def test_a_server_is_a_class_an_object_a_factory_or_a_method(theirs):
    assert lamina.conform("fedavgm", theirs, steps=5).same


def test_a_class_and_a_factory_take_options():
    for theirs in (Momentum, make_momentum):
        result = lamina.conform(lamina.FedAvgM(mu=0.5), theirs, options={"mu": 0.5}, steps=5)
        assert result.same
        assert result.theirs.endswith("(mu=0.5)")


@pytest.mark.parametrize(
    ("name", "theirs", "half"),
    [
        ("localadamw", torch.optim.AdamW, "local half"),  # its clients keep moments
        ("fedavg", torch.optim.SGD, "local half"),  # nobody does
        ("fedadam", functools.partial(torch.optim.Adam, eps=1e-3), "server half"),  # its server does
        ("fedavgm", lambda params, lr: make_optimizer(params, lr, 0.9), "server half"),
        ("scaffold", sgd, "local half"),
        ("fedlada", lambda model, batches: model, "whole client"),
    ],
)
def test_the_half_follows_from_the_implementation_or_from_the_method(name, theirs, half):
    assert lamina.conform(name, theirs, steps=1).ours.endswith(half)


def test_a_parameter_without_a_default_takes_our_option():
    seen = {}

    def step(y, grad, lr, mu, decay=0.5):
        seen.update(mu=mu, decay=decay)
        return y

    lamina.conform(lamina.FedProx(mu=0.25, decay=0.1), step, steps=1)
    assert seen == {"mu": 0.25, "decay": 0.5}
    lamina.conform("fedprox", step, options={"mu": 0.75}, steps=1)
    assert seen == {"mu": 0.75, "decay": 0.5}


def test_what_a_function_writes_into_stays_on_its_side():
    def step(y, grad, lr):
        grad.mul_(lr)
        return y.sub_(grad)

    assert lamina.conform("fedavg", step).same

    def corrected(y, grad, lr, c, kept):
        y = y - lr * (grad + c - kept.c)
        kept.c.zero_()
        return y

    assert lamina.conform("scaffold", corrected, local_steps=1).same


def test_an_instance_begins_every_comparison_with_the_state_that_it_has():
    momentum = Momentum()
    assert all(lamina.conform("fedavgm", momentum, steps=3).same for _ in range(2))
    assert momentum.b == 0


def fails(y, grad):
    raise RuntimeError("a problem\nof two lines")


def quits(y, grad):
    raise SystemExit(3)


LAYERS = ("conv.weight", "conv.bias", "fc.weight", "fc.bias")


class NeedsMore:
    def __init__(self, size):
        pass


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (3, "^the other implementation is 3, which cannot be called: give a torch optimizer's class"),
        (fails, r"fails fails: RuntimeError: a problem \(test_target.py:\d+\)$"),
        (lambda y, gradd: y, r"takes y, gradd; did you mean 'grad'\?: give a torch optimizer's class"),
        (lambda: 3, "the result of .*<lambda> is 3, which cannot be called"),
        (lambda y, grad, momentum: y, "takes 'momentum': a local half may take grad, k, kept, lr, round, state, x, y"),
        (lambda x, delta, rows: x, "takes 'rows': a server half may take delta, deltas, examples, lr, mean_steps"),
        (lambda y, grad: None, "y of .* is None: return a tensor or array"),
        (lambda y, grad: "text", "is 'text': return a tensor or array"),
        (lambda y, grad: y[:3], r"y of .* has the shape \(3,\), and the model is a vector of 121 numbers"),
        (lambda model, batches: 0.5, r"has the shape \(\), .* 92 numbers; a client may train `model` in place"),
        (lambda y, grad: y.long(), "y of .* is of type int64: return floating-point numbers"),
        (lambda y, grad: y + 1j, "y of .* has complex numbers: return real ones"),
        (lambda y, grad: y.to("meta"), "y of .* is tensor.*: return a tensor or array"),
        (lambda y, grad: (y, {}), "y of .* is a tuple of Tensor, dict: return a tensor or array"),
        (
            lambda x, delta: {"conv.weight": x[:72]},
            r"is a dict without 'conv.bias': return all of conv.weight",
        ),
        (lambda x, delta: dict.fromkeys(LAYERS, x), r"'conv.weight' has the shape \(121,\), and ours \(4, 2, 3, 3\)"),
        (lambda *arguments: 3, "takes no arguments by name: give a torch optimizer's class"),
        (lambda y, grad, /: y, "takes no arguments by name: give a torch optimizer's class"),
        (quits, r"quits fails: SystemExit: 3 \(test_target.py:\d+\)$"),
        (lambda y, grad: {"x": y}, "returns x, and no 'y'"),
        (NeedsMore, r"NeedsMore needs size: give --theirs size=… \(in Python, options\)"),
        (lambda params, lr, betas: params, "<lambda> needs betas: give --theirs betas=…"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), "SGD is an optimizer that exists already: give its class"),
        (lambda params: params, "takes parameters, but creates no torch optimizer: it returns a list"),
        (lambda params, lr: torch.optim.SGD(params, lr=-lr), "ValueError: Invalid learning rate"),
        (lamina.FedProx, "FedProx is an algorithm of lamina's contract"),
        ("nowhere_at_all:thing", "cannot load the implementation 'nowhere_at_all:thing': No module named"),
        ("math:sqroot", "has no attribute 'sqroot'; did you mean 'sqrt'"),
        ("math", "your own implementation is named 'package.module:name', not 'math'"),
    ],
)
def test_what_is_no_implementation_is_refused_in_one_line(theirs, message):
    with pytest.raises(BadInput, match=message) as refused:
        lamina.conform("fedavg", theirs, steps=2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "theirs", "more", "message"),
    [
        ("fedavg", sgd, {"half": "server"}, "sgd is a local half, not a server half"),
        ("fedavg", sgd, {"options": {"rate": 3}}, "sgd takes no 'rate'"),
        ("fedavgm", Momentum(), {"options": {"mu": 0.5}}, "Momentum takes no 'mu'"),
        ("fedavg", torch.optim.SGD, {"options": {"moment": 0.9}}, "SGD takes no 'moment'; did you mean 'momentum'"),
        ("fedsam", torch.optim.SGD, {}, "gets one gradient per step, but the method needs two"),
        ("fedavg", torch.optim.SGD, {"half": "client"}, "is an optimizer, which is a local half or a server half"),
    ],
)
def test_a_half_that_does_not_fit_is_refused(name, theirs, more, message):
    with pytest.raises(BadInput, match=message):
        lamina.conform(name, theirs, steps=2, **more)


def test_the_version_is_that_of_the_package():
    torchs = f"torch {metadata.version('torch')}"  # torch.__version__ may name the kind of GPU, too
    assert version_of(torch.optim.Adam) == torchs
    assert version_of(functools.partial(torch.optim.Adam)) == torchs
    assert version_of(sgd) == ""
