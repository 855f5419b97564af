"""Parts of the stacked engine: convolutions, pooling, the samples of the probe, steps by layer."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from engines.test_per_layer import PerLayer, PerModule
from lamina.engines.stacked.independence import works_by_layer
from lamina.engines.stacked.layers import convolution
from lamina.engines.stacked.layers.fusion import fuse
from lamina.engines.stacked.layers.modules import PlainMaxPool2d, stack, use_kernels
from lamina.engines.stacked.probe import PROBE_BATCH, PROBE_CLIENTS, probe_samples
from lamina.objective.dropout import set_streams, stream_layers, with_streams
from lamina.objective.layers import Layers


@pytest.mark.parametrize(
    ("plain", "kernels", "groups"),
    [
        (functools.partial(F.conv2d, padding=(1, 1)), (5, 4, 3, 3), 1),
        (functools.partial(F.conv2d, padding=(2, 1)), (5, 4, 5, 2), 1),
        (functools.partial(F.conv2d, stride=(2, 1), padding=(1, 1), dilation=(1, 2)), (6, 2, 3, 3), 2),
        (functools.partial(F.conv1d, stride=2), (6, 2, 3), 2),
        (F.conv3d, (5, 4, 2, 3, 2), 1),
        (functools.partial(F.conv_transpose1d, dilation=2), (4, 3, 3), 2),
        (functools.partial(F.conv_transpose2d, stride=2, output_padding=1), (4, 3, 2, 3), 1),
        (F.conv_transpose3d, (4, 1, 2, 2, 2), 4),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_grouped_convolution_is_one_per_client(plain, kernels, groups, biased):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, *(7, 8, 5)[: len(kernels) - 2], dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, *kernels, dtype=torch.float64, requires_grad=True)

    def convolve(x, weight, bias, groups):
        return plain(x, weight, bias, groups=groups)

    features = convolve(x[0], w[0], None, groups).shape[1]
    b = torch.randn(3, features, dtype=torch.float64) if biased else None
    out, expected = (form(convolve, x, w, b, groups) for form in (convolution.grouped, convolution.one_by_one))
    assert torch.allclose(out, expected, rtol=1e-12)
    seed = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(out, (x, w), seed), torch.autograd.grad(expected, (x, w), seed), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_only_plain_max_pooling_has_a_kernel_of_ours():
    stacked = stack(nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)))
    assert [type(layer) is PlainMaxPool2d for layer in stacked] == [True, False, False]
    x = torch.randn(2, 3, 7, 9)
    assert torch.equal(stacked[0](x), nn.functional.max_pool2d(x, 2))


MODEL = Layers({"a.weight": (30, 8), "a.bias": (30,), "b.weight": (5, 30)}), torch.device("cpu")


def test_every_algorithm_of_ours_works_layer_by_layer():
    assert all(works_by_layer(lamina.create(name), *MODEL) for name in lamina.registry())
    assert not works_by_layer(lamina.create("fedlamb", layers="module"), *MODEL)


@pytest.mark.parametrize(("kind", "by_layer"), [(PerLayer, True), (PerModule, False)])
def test_a_step_by_layer_is_found_where_a_layer_is_a_tensor(kind, by_layer):
    assert works_by_layer(kind(), *MODEL) is by_layer


def test_the_samples_of_the_probe_are_the_extreme_ones():
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    x[700, 1], x[800, 1], x[900] = 100.0, -100.0, float("nan")
    batches = probe_samples(x).reshape(PROBE_CLIENTS, PROBE_BATCH)
    means = x[batches].mean((1, 2)).tolist()
    assert means[0] == max(means)
    assert means[-1] == min(means)
    assert {700, 800} <= set(batches[1].tolist())
    assert not {700, 800} & set(batches[2].tolist())
    assert 900 not in batches


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (2,), (1, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.uint16, torch.int64, torch.bool])
def test_a_small_data_set_can_be_probed(samples, shape, dtype):
    chosen = probe_samples(torch.ones(samples, *shape).to(dtype))
    assert len(chosen) == PROBE_CLIENTS * PROBE_BATCH
    assert set(chosen.tolist()) <= set(range(samples))


class Residual(nn.Module):
    """Two norms, a residual sum and ReLUs in all their spellings."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(2, 4) for _ in range(3))
        self.relu, self.head = nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.norm1(self.first(x)))
        x = torch.relu(x + self.norm2(self.second(x)))
        return self.head(self.norm3(x).relu().mean((2, 3)))


def taken_over(fused):
    """Return what every call of a norm does besides normalising."""
    norms = [node for node in fused.graph.nodes if node.op == "call_module" and node.target.startswith("norm")]
    return [set(node.kwargs) - {"input"} for node in norms]


def assert_fused_is_the_same(module):
    """Return the fused module, after a comparison of its outputs and gradients for two clients with three samples."""
    torch.manual_seed(0)
    plain = stack(module.double())
    fused = fuse(copy.deepcopy(plain))
    parameters = {n: torch.stack([p, 1.5 * p]).requires_grad_() for n, p in plain.named_parameters()}
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    outputs = [torch.func.functional_call(one, parameters, (x,)) for one in (plain, fused)]
    torch.testing.assert_close(*outputs)
    leaves = list(parameters.values())
    gradients = [torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True) for out in outputs]
    torch.testing.assert_close(*gradients)
    return fused


def test_norms_take_over_the_sum_and_the_relu_after_them():
    fused = assert_fused_is_the_same(Residual())
    assert taken_over(fused) == [{"relu", "twice"}, {"relu"}, {"relu"}]
    assert "relu" not in {node.target for node in fused.graph.nodes}


def test_a_network_with_an_unused_layer_stays_as_it_is():
    module = Residual()
    module.unused = nn.Linear(2, 2)
    assert not hasattr(assert_fused_is_the_same(module), "graph")


def test_layers_that_are_called_by_keyword_or_twice():
    class Odd(Residual):
        def forward(self, x):
            x = self.relu(input=self.norm1(input=self.first(input=x)))
            x = torch.relu(self.norm2(self.second(x)) + x)
            x = torch.relu(self.norm2(self.second(x)) + x.mean((2, 3), keepdim=True))
            return self.head(self.norm3(x).mean((2, 3)))

    assert taken_over(assert_fused_is_the_same(Odd())) == [set(), {"relu"}, {"relu"}, set()]


def test_the_kernel_of_a_norm_gets_no_residual_of_another_shape():
    (layer,) = stack(nn.Sequential(nn.GroupNorm(2, 4)))
    parameters = {"weight": torch.ones(1, 4), "bias": torch.zeros(1, 4)}
    x = torch.randn(2, 4, 3, 3)
    expected = torch.func.functional_call(layer, parameters, (x, x.mean((2, 3), keepdim=True)))
    layer.kernel = lambda *inputs: "the kernel's result"
    assert torch.func.functional_call(layer, parameters, (x, x)) == "the kernel's result"
    assert torch.equal(torch.func.functional_call(layer, parameters, (x, x.mean((2, 3), keepdim=True))), expected)


def test_layers_under_vmap_use_no_kernels():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 1, 1))
            self.layers = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten())

        def forward(self, x):
            return self.layers(x * self.scale)

    def refuse(*inputs):
        raise AssertionError("a kernel under vmap")

    kernels = SimpleNamespace(LARGEST_WINDOW=127, drop=refuse, flatten=refuse, max_pool=refuse)
    module = stack(with_streams(nn.Sequential(Scaled()))[0])
    set_streams(stream_layers(module), torch.tensor([1, 2]))
    use_kernels(module, kernels, "tf32")
    inputs = {"0.scale": torch.ones(2, 3, 1, 1)}, (torch.randn(6, 3, 4, 4),)
    assert torch.func.functional_call(module, *inputs).shape == (6, 12)


def test_a_norm_whose_result_is_used_twice_stays_as_it_is():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(1, 3)

        def forward(self, x):
            y = self.norm(x)
            return torch.relu(y) + y

    assert taken_over(fuse(stack(Twice()))) == [set()]


def test_users_that_may_write_into_a_result_do_not_share_copies_of_it():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv, self.drop = nn.GroupNorm(1, 3), nn.Conv2d(3, 3, 1), nn.Dropout(0.5, inplace=True)

        def forward(self, x):
            y = torch.relu(self.norm(x))
            return self.conv(y).sum() + self.drop(y).sum()

    assert taken_over(fuse(stack(InPlace()))) == [{"relu"}]


def test_a_network_that_branches_is_not_fused():
    class Branches(nn.Module):
        def __init__(self, condition):
            super().__init__()
            self.norm, self.condition = nn.GroupNorm(1, 3), condition

        def forward(self, x):
            return torch.relu(self.norm(x)) if self.condition(self, x) else self.norm(x)

    for condition in (lambda module, x: module.training, lambda module, x: bool(x.sum() > 0)):
        module = stack(Branches(condition))
        assert fuse(module) is module


class Pooling(nn.Module):
    """One pooling used twice, with ReLUs on both sides and two Dropout2d before it."""

    def __init__(self, inplace=False):
        super().__init__()
        self.more = nn.Dropout2d(0.3, inplace)
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.pool, self.drop, self.head = nn.MaxPool2d(2), nn.Dropout2d(0.5), nn.Linear(16, 3)

    def forward(self, x):
        x = self.pool(torch.relu(self.first(x)))
        x = torch.relu(self.pool(self.more(self.drop(self.second(x)))))
        return self.head(x.flatten(1))


def test_pooling_takes_over_the_relu_and_comes_before_dropout():
    torch.manual_seed(0)
    plain = stack(with_streams(Pooling().double())[0])
    fused = fuse(copy.deepcopy(plain))
    operations = [node.target for node in fused.graph.nodes if node.op in ("call_module", "call_function")]
    assert operations == ["first", "pool", "second", "pool", "drop", "more", "head"]
    parameters = {n: torch.stack([p, -p]).requires_grad_() for n, p in plain.named_parameters()}
    x = torch.randn(6, 1, 14, 14, dtype=torch.float64)  # two clients with three samples
    results = []
    for module in (plain, fused):
        set_streams(stream_layers(module), torch.tensor([1, 2]))
        output = torch.func.functional_call(module, parameters, (x,))
        results.append((output, *torch.autograd.grad(output.square().sum(), list(parameters.values()))))
    for one, other in zip(*results, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other)


def test_dropout_that_works_in_place_stays_before_the_pooling():
    fused = fuse(stack(with_streams(Pooling(inplace=True))[0]))
    operations = [node.target for node in fused.graph.nodes if node.op == "call_module"]
    assert operations == ["first", "pool", "second", "drop", "more", "pool", "head"]
