"""Fused networks compute the same with fewer operations."""

import copy

import pytest
import torch
from torch import nn

from lamina.engines.stacked.layers.fusion import fuse
from lamina.engines.stacked.layers.modules import stack
from lamina.objective.dropout import set_streams, stream_layers, with_streams


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


def test_a_shortcut_that_is_an_identity_counts_as_no_user():
    class WithIdentity(Residual):
        def __init__(self):
            super().__init__()
            self.shortcut = nn.Identity()

        def forward(self, x):
            x = self.relu(self.norm1(self.first(x)))
            x = torch.relu(self.shortcut(x) + self.norm2(self.second(x)))
            return self.head(self.norm3(x).relu().mean((2, 3)))

    assert taken_over(assert_fused_is_the_same(WithIdentity())) == [{"relu", "twice"}, {"relu"}, {"relu"}]


@pytest.mark.parametrize("name", ["shortcut", "relu", "norm1"])
def test_a_network_with_hooks_stays_as_it_is(name):
    module = Residual()
    module.shortcut = nn.Identity()
    module.relu = nn.Sequential(nn.ReLU(), module.shortcut)
    hooked = module.relu[0] if name == "relu" else getattr(module, name)
    hooked.register_forward_hook(lambda layer, inputs, output: 2 * output)
    assert not hasattr(assert_fused_is_the_same(module), "graph")


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
