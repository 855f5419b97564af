"""Parameters that a module uses directly give the loop's trajectory in the stacked engine."""

import warnings

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.stacked.folding import CannotStack
from lamina.engines.stacked.layers.per_client import PerClient, Samples, StackedLayer
from small_simulations import PARTS, form
from stacked_layers import Masked, Scaled, assert_as_in_the_loop, chain, data, run


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


TENSORS = {
    "a subclass of Linear": lambda: chain(Doubled(6, 4), features=4),
    "parameters of a submodule": Masked,
    "and dropout": lambda: Masked(dropout=0.5),
    "parameters of the model itself": lambda: Scaled(6),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_layers(make):
    assert_as_in_the_loop(make, data((6,)))


def test_a_weight_that_a_hook_computes():
    def model():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return chain(nn.utils.weight_norm(nn.Linear(6, 4)), features=4).double()

    stacked, loop = (run(model, data((6,)), engine) for engine in ("stacked", "loop"))
    assert torch.allclose(stacked.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-11)


def test_the_path_of_a_gpu():
    assert_as_in_the_loop(TENSORS["and dropout"], data((6,)), gpu_path=True)


def test_bfloat16_of_own_and_frozen_parameters(monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = Masked(), data((6,))
    model.scaled.inner.requires_grad_(False)
    exact, rounded = (run(model, (x.float(), y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.precision == "bf16"
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)


def test_in_bfloat16_a_repeated_token_has_the_type_of_the_samples():
    samples = Samples()
    token = PerClient.of(torch.ones(CLIENTS, 1, 5), samples)
    with samples.of_pass(CLIENTS, BATCH, torch.bfloat16, train=True):
        assert token.exp().dtype == torch.float32
        assert token.expand(CLIENTS * BATCH, -1).dtype == torch.bfloat16


CLIENTS, BATCH = 2, 3


FUNCTIONS = {
    "sum": lambda p, x: x + p,
    "difference": lambda p, x: p - x,
    "product in place": lambda p, x: (x * 1).mul_(p),
    "quotient": lambda p, x: p / (3 + x * x),
    "matrix product": lambda p, x: x @ p.transpose(0, 1),
    "einsum": lambda p, x: torch.einsum("ntd,kd->nkt", x, p),
    "written into": lambda p, x: torch.cat([x[:, :1] * 0, x], 1).index_copy(1, torch.tensor([0]), x[:, :1] + p[:1]),
    "several results": lambda p, x: torch.cat(torch.broadcast_tensors(x, p), -1),
    "type of another": lambda p, x: p.type_as(x) + x,
    "as large as another": lambda p, x: p.expand_as(x) * x,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_function_of_parameters_and_samples_is_one_per_client(function):
    rows, samples = torch.randn(CLIENTS, 4, 5, dtype=torch.float64, requires_grad=True), Samples()
    x = torch.randn(CLIENTS * BATCH, 4, 5, dtype=torch.float64)
    with samples.of_pass(1, 31, torch.float64, train=True):
        function(PerClient.of(rows[:1], samples), torch.randn(31, 4, 5, dtype=torch.float64))
    with samples.of_pass(CLIENTS, BATCH, torch.float64, train=True):
        together = function(PerClient.of(rows, samples), x)
    apart = torch.cat([function(row, own) for row, own in zip(rows, x.chunk(CLIENTS), strict=True)])
    assert type(together) is torch.Tensor
    torch.testing.assert_close(together, apart)
    gradients = [torch.autograd.grad(result.square().sum(), rows)[0] for result in (together, apart)]
    torch.testing.assert_close(*gradients)


def test_a_function_of_parameters_alone_keeps_the_rows():
    rows = torch.randn(CLIENTS, 4, 5)
    value = PerClient.of(rows, Samples())
    assert value.shape == (4, 5)
    assert value.softmax(0).rows.equal(rows.softmax(1))
    assert value.T[1:].exp().rows.equal(rows.transpose(1, 2)[:, 1:].exp())


def test_the_first_pass_finds_the_axis_and_later_ones_repeat_it():
    samples = Samples()
    with samples.of_pass(1, 31, torch.float64, train=True):
        assert [samples.axis(shape, 1) for shape in ((20, 5), (20, 31), (62, 4), ())] == [None, 1, 0, None]
    with samples.of_pass(4, 5, torch.float64, train=True):
        assert [samples.axis(shape, 4) for shape in ((20, 5), (20, 20), (40, 4), ())] == [None, 1, 0, None]
        with pytest.raises(CannotStack, match="another number of samples"):
            samples.axis((20, 5), 4)  # a question that the first pass did not ask
    with (
        samples.of_pass(4, 5, torch.float64, train=True),
        pytest.raises(CannotStack, match="another number of samples"),
    ):
        [samples.axis(shape, 4) for shape in ((20, 5), (20, 19))]


class Positions(nn.Module):
    """Positions without an axis of samples, as many as there are samples in a batch of all clients."""

    def __init__(self, count):
        super().__init__()
        self.places, self.scale, self.head = nn.Embedding(count, 4), nn.Parameter(torch.ones(count, 4)), nn.Linear(4, 3)
        self.register_buffer("order", torch.arange(count))
        self.register_buffer("shift", torch.linspace(0, 1, 4 * count).view(count, 4))

    def forward(self, x):
        return self.head(torch.tanh(x + self.places(self.order) * (self.scale + self.shift)).mean(1))


@pytest.mark.parametrize("count", [18, 20, 40, 60])
def test_sizes_that_coincide_with_the_number_of_samples(count):
    torch.manual_seed(0)
    samples = torch.randn(60, count, 4, dtype=torch.float64), torch.arange(60) % 3
    model, parts = Positions(count).double(), [range(12 * i, 12 * i + 12) for i in range(5)]
    stacked, loop = (
        lamina.Simulation(model, samples, "fedlada", clients=parts, batch_size=4, engine=engine, device="cpu")
        for engine in ("stacked", "loop")
    )
    stacked.run(2)
    loop.run(2)
    assert torch.allclose(stacked.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-11)


class Cube(torch.autograd.Function):
    """A function that no rule of torch can see into."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Constant(nn.Module):
    """Outputs without samples."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(1, 3))

    def forward(self, x):
        return self.logits.repeat(2 * len(x), 1)[: len(x)]


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.rand(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x * Cube.apply(self.scale))


@pytest.mark.parametrize("kind", [Opaque, Constant])
def test_what_has_no_rule_runs_in_the_loop(kind, caplog):
    torch.manual_seed(0)
    model = kind().double()
    assert form(lamina.Simulation(model, data((6,)), "fedavg", clients=PARTS, device="cpu")) == "loop"


def test_a_layer_is_itself_outside_a_forward_pass():
    layer = type("Layer", (StackedLayer, nn.Linear), {})(2, 3)
    assert type(layer.weight) is nn.Parameter
    assert layer(torch.ones(4, 2)).shape == (4, 3)
