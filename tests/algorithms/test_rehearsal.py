"""The rehearsal names the function of an algorithm that breaks the contract, before a run starts."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lamina
from lamina import BadInput, FedAvg
from lamina.algorithms.contract import Analysis, Displacement, LocalModel, Model
from lamina.algorithms.rehearsal import rehearse, sent_fields, sent_vectors


class Change(NamedTuple):
    change: torch.Tensor


class Sent(NamedTuple):
    delta: torch.Tensor
    count: int


class Two(NamedTuple):
    delta: torch.Tensor
    head: torch.Tensor


class Moments(NamedTuple):
    y: torch.Tensor
    m: torch.Tensor


def writes_up(self, server, up, info):
    up.delta.mul_(2.0)
    return Model(server.x + up.delta)


BROKEN = {  # a function of FedAvg, replaced
    "init returns a tensor": (
        "init",
        lambda self, x, layers: x,
        "init must return a NamedTuple of tensors, found Tensor",
    ),
    "init without x": (
        "init",
        lambda self, x, layers: LocalModel(x),
        "init must return .* the field 'x', found LocalModel",
    ),
    "a field of another shape": (
        "init",
        lambda self, x, layers: Model(x[:3]),
        r"init field 'x' must be .* found one of shape",
    ),
    "broadcast without x": ("broadcast", lambda self, server, info: Change(server.x), "broadcast must .* field 'x'"),
    "begin without y": ("begin", lambda self, down, client, info: down, "begin must return .* field 'y', found Model"),
    "step in place": (
        "step",
        lambda self, local, down, grad, lr, layers: LocalModel(local.y.sub_(lr * grad)),
        "step writes into its arguments",
    ),
    "step returns nothing": ("step", lambda *_: None, "step must return a NamedTuple of tensors, found NoneType"),
    "step returns another state": (
        "step",
        lambda self, local, down, grad, lr, layers: Moments(local.y, local.y),
        r"step must return the state it was given, LocalModel\(y\), found Moments",
    ),
    "step returns another type": (
        "step",
        lambda self, local, down, grad, lr, layers: LocalModel((local.y - lr * grad).double()),
        r"step field 'y' must stay float32 \[10\], found float64 \[10\]",
    ),
    "step returns another shape": (
        "step",
        lambda self, local, down, grad, lr, layers: LocalModel(local.y[:1]),
        r"step field 'y' must stay float32 \[10\], found float32 \[1\]",
    ),
    "finish sends another type": (
        "finish",
        lambda self, local, down, client, info: (Displacement((local.y - down.x).half()), client),
        r"finish field 'delta' must stay float32 \[10\], found float16 \[10\]",
    ),
    "an analysis of another shape": (
        "analysis",
        lambda self, server, previous: Analysis(server.x[:1]),
        "analysis must return an Analysis of vectors",
    ),
    "trust ratios of another shape": ("trust_ratios", lambda self, local: local.y, r"trust_ratios must .* \[10\]"),
    "finish returns one thing": (
        "finish",
        lambda self, local, down, client, info: Displacement(local.y - down.x),
        "finish must return two things",
    ),
    "a displacement beside delta": (
        "displacement",
        lambda self, up: up.delta,
        "finish must leave 'delta' of the upload None beside displacement, found Displacement",
    ),
    "a trained model of another shape": (
        "trained_model",
        lambda self, server: server.x[:3],
        r"trained_model must return a model like server.x, .* found one of shape \[3\]",
    ),
    "finish without delta": (
        "finish",
        lambda self, local, down, client, info: (Change(local.y - down.x), client),
        r"finish must return a state with the field 'delta', found Change\(change\)",
    ),
    "finish with a number": (
        "finish",
        lambda self, local, down, client, info: (Sent(local.y - down.x, 3), client),
        "finish field 'count' must be a tensor .* or None, found 3",
    ),
    "finish changes the client's state": (
        "finish",
        lambda self, local, down, client, info: (Displacement(local.y - down.x), local),
        r"finish must return the state it was given, Nothing\(\), found",
    ),
    "update writes what came up": ("update", writes_up, "update writes into its arguments"),
    "update returns another state": ("update", lambda self, server, up, info: up, "update must return .* field 'x'"),
    "init with numpy": (
        "init",
        lambda self, x, layers: Model(x.numpy()),
        "init field 'x' must be a tensor .* found a numpy array: compute with",
    ),
    "step with numpy": (
        "step",
        lambda self, local, down, grad, lr, layers: local._replace(y=np.asarray(local.y) - lr * np.asarray(grad)),
        "step field 'y' must be a tensor .* found a numpy array: compute with torch",
    ),
    "update with numpy": (
        "update",
        lambda self, server, up, info: np.asarray(server.x),
        "update must return a NamedTuple of tensors, found ndarray",
    ),
    "trust ratios with numpy": (
        "trust_ratios",
        lambda self, local: np.ones(3),
        "trust_ratios must return a tensor, .* a numpy arr",
    ),
    "needs returns nothing": ("needs", lambda self, round: None, "needs must return a Needs, found None"),
    "begin raises": (
        "begin",
        lambda self, down, client, info: np.zeros(3) - down.x,
        r"begin fails in a trial round: TypeError: unsupported operand .*\(test_rehearsal.py:\d+\)",
    ),
    "step takes too little": (
        "step",
        lambda self, local, down, grad, lr: local,
        r"step fails .* \(it is called as step\(self, local, down, grad, lr, layers\)\)",
    ),
    "an unknown field is declared": ("non_negative", ("v",), r"non_negative names 'v', which is not a field of Disp"),
    "an unknown reference is declared": ("references", {"delta": "v"}, r"references names 'v', .* a field of Model"),
}


def test_what_is_sent_in_some_rounds_at_least():
    layers = lamina.Layers({"a": (4, 2), "b": (3,)})
    assert sent_fields(lamina.FedLamb(sync_every=3)) == ["delta", "v"]
    assert sent_vectors(lamina.FedAdamW(), layers) == ["delta"]  # v has one number per layer
    assert sent_fields(lamina.FedAdamW(), layers) == ["delta", "v"]
    assert sent_vectors(lamina.FedAdamW(v_sync="full")) == ["delta", "v"]

    class SendsMore(FedAvg):  # on the layers of the real model
        def finish(self, local, down, client, info):
            return Two(local.y - down.x, local.y[..., :5]), client

    assert (sent_fields(SendsMore(), layers), sent_vectors(SendsMore(), layers)) == (["delta", "head"], ["delta"])


def test_a_client_uses_the_shared_model_by_default():
    x = torch.ones(3)
    assert FedAvg().client_model(x, None) is x


def normalised(**functions):
    """Return FedAvg that sends (y_K - x) / 2 in another field, with some functions replaced."""
    return own(
        finish=lambda self, local, down, client, info: (Two(None, (local.y - down.x) / 2), client),
        update=lambda self, server, up, info: Model(server.x + 2 * up.head),
        **functions,
    )


def test_an_upload_without_delta_has_a_displacement():
    rehearse(normalised(displacement=lambda self, up: 2 * up.head))
    for wrong in (lambda self, up: up.head[..., :3], lambda self, up: None):
        with pytest.raises(BadInput, match="displacement must return y_K - x"):
            rehearse(normalised(displacement=wrong))
    with pytest.raises(BadInput, match="finish must return a state with the field 'delta', found Two"):
        rehearse(normalised())
    with pytest.raises(NotImplementedError):
        FedAvg().displacement(Two(None, torch.ones(3)))


def test_a_nan_that_is_passed_on_is_no_write():
    class Divides(FedAvg):
        def step(self, local, down, grad, lr, layers):
            return LocalModel(local.y * torch.nan)  # the real round says where it diverged

    rehearse(Divides())


def own(**functions):
    """Return FedAvg with some functions replaced."""
    cls = type("Own", (FedAvg,), {"card": FedAvg.card._replace(name="own"), **functions})
    return dataclasses.dataclass(frozen=True, eq=False)(cls)()


@pytest.mark.parametrize(("function", "body", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_an_algorithm_that_breaks_the_contract_is_refused_in_one_line(function, body, text):
    data = torch.randn(20, 4), torch.arange(20) % 2
    with pytest.raises(BadInput, match=f"the algorithm 'own' breaks the contract: {text}") as caught:
        lamina.Simulation(torch.nn.Linear(4, 2), data, own(**{function: body}), clients=2)
    assert "\n" not in str(caught.value)


def test_an_own_error_of_an_algorithm_is_passed_on_as_it_is():
    class Refusing(FedAvg):
        def begin(self, down, client, info):
            raise BadInput("this algorithm needs labels")

    with pytest.raises(BadInput, match=r"^this algorithm needs labels$"):
        rehearse(Refusing())


@pytest.mark.parametrize(
    "draw", [torch.randn_like, lambda x: x + np.random.default_rng().random()], ids=["torch", "numpy"]
)
def test_random_numbers_are_warned_of_once(draw, caplog):
    class Noisy(FedAvg):
        def finish(self, local, down, client, info):
            return Displacement(local.y - down.x + draw(down.x)), client

    for _ in range(2):
        rehearse(Noisy())
    (line,) = caplog.messages
    assert "do not follow from the seed" in line


def test_a_class_without_a_card_is_refused():
    class Bare(lamina.Algorithm):
        def init(self, x, layers):
            return Model(x)

        def step(self, local, down, grad, lr, layers):
            return LocalModel(local.y - lr * grad)

        def update(self, server, up, info):
            return Model(server.x + up.delta)

    with pytest.raises(BadInput, match="the class Bare has no card: decorate it"):
        lamina.Simulation(torch.nn.Linear(4, 2), (torch.randn(20, 4), torch.arange(20) % 2), Bare())


LEADING_AXIS = {  # a function of the client, replaced
    "three": ("step", lambda self, local, down, grad, lr, layers: LocalModel(torch.cat([2 * grad[:3], grad[3:]]))),
    "many": ("step", lambda self, local, down, grad, lr, layers: LocalModel(torch.cat([2 * grad[:30], grad[30:]]))),
    "dim": ("step", lambda self, local, down, grad, lr, layers: LocalModel(local.y - lr * grad / grad.dim())),
    "rows": ("step", lambda self, local, down, grad, lr, layers: LocalModel(local.y - lr * grad / len(grad))),
    "begin": ("begin", lambda self, down, client, info: LocalModel(down.x - down.x.mean(0))),
    "shape": ("begin", lambda self, down, client, info: LocalModel(down.x.flatten())),
    "finish": (
        "finish",
        lambda self, local, down, client, info: (Displacement((local.y - down.x).cumsum(0)), client),
    ),
}


@pytest.mark.parametrize(("function", "body"), LEADING_AXIS.values(), ids=LEADING_AXIS.keys())
def test_a_function_that_uses_the_leading_axis_is_refused(function, body):
    data = torch.randn(20, 4), torch.arange(20) % 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2))
    with pytest.raises(BadInput, match=rf"'own' breaks the contract: {function} computes .* for a row \[1, p\]"):
        lamina.Simulation(model, data, own(**{function: body}), clients=2)


def test_a_function_that_takes_vectors_only_is_for_the_loop():
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad / torch.dot(grad, grad))

    rehearse(own(step=step))


def test_the_rehearsal_has_the_layers_of_the_real_model():
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad - lr * grad.topk(40, dim=-1).values.mean(-1, keepdim=True))

    data = torch.randn(20, 4), torch.arange(20) % 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2))
    lamina.Simulation(model, data, own(step=step), clients=2).run(1)
    with pytest.raises(BadInput, match="'own' breaks the contract: step fails in a trial round: RuntimeError"):
        lamina.Simulation(torch.nn.Linear(4, 2), data, own(step=step), clients=2)
