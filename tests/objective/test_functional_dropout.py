"""`F.dropout` and its kin draw the masks of dropout layers; the attention with dropout is torch's own."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import has_torch_function

import lamina
from lamina.objective.dropout import set_streams
from lamina.objective.functional_dropout import FunctionalDropout
from small_simulations import PARTS, assert_same, form

DOUBLE = {"dtype": torch.float64}


def simulation(model, engine="auto", seed=3, **settings):
    torch.manual_seed(0)
    data = (torch.randn(48, 8, **DOUBLE), torch.arange(48) % 3)
    run = lamina.Simulation(
        model().double(), data, "fedavg", clients=PARTS, participation=0.6, batch_size=4, lr=0.1, device="cpu",
        engine=engine, seed=seed, **settings,
    )  # fmt: skip
    run.run(2)
    return run


class Net(nn.Module):
    """Drops between two layers, in activations of a given shape."""

    def __init__(self, drop, shape=(16,)):
        super().__init__()
        self.shape, self.drop, self.one, self.two = shape, drop, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.one(x).unflatten(1, self.shape)
        h = self.drop(h) if isinstance(self.drop, nn.Module) else self.drop(h, self.training)
        return self.two(h.flatten(1).tanh())


class Own(nn.Dropout):
    """A subclass, which is not replaced by a layer of ours."""


SAME = {
    "dropout": (lambda x, on: F.dropout(x, 0.3, on), nn.Dropout(0.3), (16,)),
    "default p": (lambda x, on: F.dropout(x, training=on), nn.Dropout(), (16,)),
    "inplace": (lambda x, on: (F.dropout(x, 0.3, on, inplace=True), x)[1], nn.Dropout(0.3), (16,)),
    "p is a tensor": (lambda x, on: F.dropout(x, torch.tensor(0.3, **DOUBLE), on), nn.Dropout(0.3), (16,)),
    "torch": (lambda x, on: torch.dropout(x, 0.3, on), nn.Dropout(0.3), (16,)),
    "torch by name": (lambda x, on: torch.dropout(x, p=0.3, train=on), nn.Dropout(0.3), (16,)),
    "subclass": (Own(0.3), nn.Dropout(0.3), (16,)),
    "1d": (lambda x, on: F.dropout1d(x, 0.3, on), nn.Dropout1d(0.3), (8, 2)),
    "2d": (lambda x, on: F.dropout2d(x, 0.3, on), nn.Dropout2d(0.3), (8, 2, 1)),
    "3d": (lambda x, on: F.dropout3d(x, 0.3, training=on), nn.Dropout3d(0.3), (4, 2, 2, 1)),
    "alpha": (lambda x, on: F.alpha_dropout(x, 0.3, on), nn.AlphaDropout(0.3), (16,)),
    "alpha inplace": (lambda x, on: (F.alpha_dropout(x, 0.3, on, True), x)[1], nn.AlphaDropout(0.3), (16,)),
    "features": (lambda x, on: F.feature_alpha_dropout(x, 0.3, on), nn.FeatureAlphaDropout(0.3), (8, 2)),
    "coins": (
        lambda x, on: x * x.new_empty(x.shape).bernoulli_(1 - 0.3).div_(1 - 0.3) if on else x,
        nn.Dropout(0.3),
        (16,),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", SAME)
def test_a_function_draws_the_masks_of_a_layer(kind):
    function, layer, shape = SAME[kind]
    for engine in ("loop", "stacked"):
        by_function, by_layer = (simulation(lambda drop=drop: Net(drop, shape), engine) for drop in (function, layer))
        assert torch.equal(by_function.state.server.x, by_layer.state.server.x)
    without = simulation(lambda: Net(nn.Identity(), shape), "loop")
    assert not torch.allclose(by_function.state.server.x, without.state.server.x, rtol=1e-3)


class Two(nn.Module):
    """Two calls of dropout after one of a layer: by functions, or by a second layer."""

    def __init__(self, by_functions):
        super().__init__()
        self.fc, self.first = nn.Linear(8, 3), nn.Dropout(0.2)
        self.second = None if by_functions else nn.Dropout(0.3)

    def drop(self, x):
        return F.dropout(x, 0.3, self.training) if self.second is None else self.second(x)

    def forward(self, x):
        return self.fc(self.drop(self.drop(self.first(x)).sin()))


def test_calls_of_functions_are_those_of_one_more_layer():
    ends = [simulation(lambda by_functions=by_functions: Two(by_functions)) for by_functions in (False, True)]
    assert {form(run) for run in ends} == {"stacked"}
    assert torch.equal(*(run.state.server.x for run in ends))


def functional(*streams):
    dropout = FunctionalDropout(number=0)
    set_streams([dropout], torch.tensor(streams))
    return dropout


def test_functions_have_torchs_defaults():
    x = torch.ones(6, 4, 2, 2, 2)
    functions = [F.dropout, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout]
    with functional(1):
        is_changed = [not torch.equal(function(x), x) for function in functions]
    assert is_changed == [not torch.equal(function(x), x) for function in functions] == [True, True, False, False]


def test_coins_with_a_generator_or_a_tensor_of_rates_are_torchs():
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    with functional(1):
        drawn = torch.empty(50).bernoulli_(0.5, generator=generators[0])
        certain = torch.empty(50).bernoulli_(torch.ones(50))
    assert torch.equal(drawn, torch.empty(50).bernoulli_(0.5, generator=generators[1]))
    assert bool(certain.all())


def test_masks_have_the_right_rate_and_scale():
    ones = torch.ones(2, 50_000)
    with functional(5, 6):
        first, second = F.dropout(ones, 0.3), F.dropout(ones, 0.3)
    for mask in (first, second):
        assert (mask == 0).double().mean() == pytest.approx(0.3, abs=0.007)
        assert mask[mask != 0].unique().tolist() == pytest.approx([1 / 0.7])
    for one, two in ((first, second), (first[0], first[1])):
        assert ((one == 0) & (two == 0)).double().mean() == pytest.approx(0.09, abs=0.007)


def test_everything_may_be_dropped_in_place():
    for function in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout):
        x = torch.ones(4, 3)
        with functional(5):
            assert function(x, 1.0, True, True) is x
        assert not x.any()


def test_nothing_happens_in_evaluation_and_without_a_rate():
    x = torch.randn(4, 3, 2)
    with functional(5) as dropout:
        for result in (F.dropout(x, 0.5, False), F.dropout(x, 0.0), F.alpha_dropout(x), torch.dropout(x, 0.5, False)):
            assert result is x
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x, None, 0.0))
        assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x))
    assert dropout.calls == 1
    run = simulation(lambda: Net(SAME["dropout"][0]))
    x = torch.randn(5, 8, **DOUBLE)
    outputs = run.objective.outputs(run.state.server.x, run.state.buffers, x, train=False)
    assert torch.equal(outputs, run.model(x))


# --- attention --------------------------------------------------------------------------------------------------------

SEES = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) > 0.4
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": SEES},
    "blind": {"attn_mask": SEES & torch.tensor([[True], [False], [True], [True], [True]])},  # a query without a key
    "additive": {"attn_mask": torch.randn(3, 1, 5, 6, generator=torch.Generator().manual_seed(0), **DOUBLE)},
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
}


def attention_inputs(options):
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in options else 4
    q = torch.randn(3, 4, 5, 8, **DOUBLE)
    k, v = torch.randn(3, heads, 6, 8, **DOUBLE), torch.randn(3, heads, 6, 7, **DOUBLE)
    return [t.requires_grad_() for t in (q, k, v)]


@pytest.mark.parametrize("kind", OPTIONS)
def test_attention_that_drops_next_to_nothing_is_torchs(kind):
    results = []
    for p in (0.0, 1e-13):
        inputs = attention_inputs(OPTIONS[kind])
        with functional(5):
            out = F.scaled_dot_product_attention(*inputs, dropout_p=p, **OPTIONS[kind])
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["causal", "groups"])
def test_attention_drops_its_weights(kind):
    inputs = attention_inputs(OPTIONS[kind])
    with functional(5, 6, 7):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.4, **OPTIONS[kind])
    with functional(5, 6, 7):
        mask = F.dropout(torch.ones(3, 4, 5, 6, **DOUBLE), 0.4).numpy()
    q, k, v = (np.repeat(t.detach().numpy(), 4 // t.shape[1], axis=1) for t in inputs)
    scores = np.exp(np.einsum("nhle,nhse->nhls", q, k) / np.sqrt(8))
    if kind == "causal":
        scores *= np.arange(6) <= np.arange(5)[:, None]
    weights = scores / scores.sum(-1, keepdims=True) * mask
    np.testing.assert_allclose(out.detach().numpy(), weights @ v, rtol=1e-12)


def test_attention_adds_a_float32_mask_in_bfloat16():
    q, k, v = (t.bfloat16() for t in attention_inputs({}))
    masks = (SEES, torch.zeros(5, 6).masked_fill(~SEES, float("-inf")))
    with functional(5):
        assert torch.equal(*(F.scaled_dot_product_attention(q, k, v, mask, 1e-9) for mask in masks))


def test_attention_with_two_masks_is_refused_by_torch():
    with functional(5), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(*attention_inputs({}), SEES, 0.4, is_causal=True)


def test_attention_whose_mask_is_an_object_is_left_to_torch():
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = attention_inputs({})
    with functional(5) as dropout:
        out = F.scaled_dot_product_attention(q, k, v, causal_lower_right(5, 6), 0.4)
    assert out.shape == (3, 4, 5, 7)
    assert dropout.calls == 0


# --- where masks are drawn --------------------------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """Drops in a tensor [4, n, 2], whose first axis is not the batch."""

    def __init__(self, rate):
        super().__init__()
        self.fc, self.rate = nn.Linear(8, 3), rate

    def forward(self, x):
        h = F.dropout(x.unflatten(1, (4, 2)).transpose(0, 1), self.rate, self.training)
        return self.fc(h.transpose(0, 1).flatten(1))


class Shared(nn.Module):
    """Drops one mask for all samples."""

    def __init__(self, rows):
        super().__init__()
        self.fc, self.rows = nn.Linear(8, 3), rows

    def forward(self, x):
        mask = F.dropout(torch.ones(self.rows, 8 // self.rows, **DOUBLE), 0.5, self.training)
        return self.fc(x * mask.flatten())


class Connections(nn.Module):
    """Drops weights."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return F.linear(x, F.dropout(self.fc.weight, 0.5, self.training), self.fc.bias)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: TimeFirst(0.5), "loop"),
        (lambda: TimeFirst(0.01), "loop"),  # few of the probe's elements would be dropped
        (lambda: Shared(1), "loop"),
        (lambda: Shared(4), "loop"),
        (Connections, "loop"),
    ],
)
def test_masks_that_are_not_of_samples_are_those_of_the_loop(model, expected):
    auto, captured, loop = simulation(model), simulation(model, "captured"), simulation(model, "loop")
    assert form(auto) == expected
    assert_same(captured.state, loop.state, 1e-9)


class Mapped(nn.Module):
    """Asks torch for one mask per sample."""

    def __init__(self, drop):
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 3), drop

    def forward(self, x):
        drop = self.drop or (lambda row: F.dropout(row, 0.5, self.training))
        return self.fc(torch.func.vmap(drop, randomness="different")(x))


@pytest.mark.parametrize("drop", [None, nn.Dropout()], ids=["function", "layer"])
def test_masks_under_a_transform_of_the_module_are_torchs(drop):
    run = simulation(lambda: Mapped(drop))
    assert form(run) == "loop"
    outputs = run.objective.outputs(run.state.server.x, {}, torch.ones(64, 8, **DOUBLE), train=True)
    assert len(outputs.unique(dim=0)) > 32


class Nested(nn.Module):
    """Drops in a tensor whose sequences may have different lengths."""

    def __init__(self, drop):
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 3), drop

    def forward(self, x):
        sequences = torch.nested.nested_tensor_from_jagged(self.fc(x), offsets=torch.arange(len(x) + 1))
        return (self.drop(sequences) if self.drop else F.dropout(sequences, 0.5, self.training)).values()


@pytest.mark.parametrize("drop", [None, nn.Dropout()], ids=["function", "layer"])
def test_masks_of_nested_tensors_are_torchs(drop):
    run = simulation(lambda: Nested(drop))
    assert form(run) == "loop"
    outputs = run.objective.outputs(run.state.server.x, {}, torch.ones(64, 8, **DOUBLE), train=True)
    assert 0.3 < (outputs == 0).double().mean() < 0.7


def test_hooks_around_the_whole_pass_change_no_mask():
    results = []
    for context in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        with context, functional(5):
            results.append(F.dropout(torch.ones(100), 0.5))
    assert torch.equal(*results)


def test_only_modules_that_call_the_functions_are_watched():
    class Watching(Net):
        def forward(self, x):
            is_watched.append(has_torch_function((x,)))
            return super().forward(x)

    for drop, expected in ((nn.Dropout(0.3), False), (SAME["dropout"][0], True)):
        is_watched: list[bool] = []
        run = simulation(lambda drop=drop: Watching(drop))
        is_watched.clear()
        run.run(1)
        assert set(is_watched) == {expected}
