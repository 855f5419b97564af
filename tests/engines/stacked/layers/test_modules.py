"""Layers get their stacked classes, and give the loop's trajectory."""

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.stacked.layers.modules import PlainMaxPool2d, stack
from lamina.engines.stacked.layers.per_client import PerClient, Samples
from stacked_layers import Scaled, assert_as_in_the_loop, chain, data

TENSORS = {
    "RMSNorm": (lambda: chain(nn.Linear(6, 6), nn.RMSNorm(6), features=6), (6,)),
    "RMSNorm over two axes": (lambda: chain(nn.RMSNorm((4, 6), eps=0.1), features=24), (4, 6)),
    "InstanceNorm1d": (lambda: chain(nn.InstanceNorm1d(4, affine=True), features=24), (4, 6)),
    "InstanceNorm2d": (lambda: chain(nn.InstanceNorm2d(2, affine=True), features=18), (2, 3, 3)),
    "InstanceNorm3d": (lambda: chain(nn.InstanceNorm3d(2, affine=True), features=24), (2, 2, 2, 3)),
    "BatchNorm3d": (lambda: chain(nn.Conv3d(2, 2, 1, bias=False), nn.BatchNorm3d(2), features=24), (2, 2, 2, 3)),
    "SMU": (lambda: chain(nn.Linear(6, 6), lamina.models.SMU(2.0), features=6), (6,)),
    "PReLU": (lambda: chain(nn.PReLU(4), features=24), (4, 6)),
    "PReLU with one slope": (lambda: chain(nn.Linear(6, 6), nn.PReLU(), features=6), (6,)),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "shape"), TENSORS.values(), ids=TENSORS.keys())
def test_layers(make, shape):
    assert_as_in_the_loop(make, data(shape))


def test_an_option_without_a_stacked_form_runs_in_the_loop():
    def make():
        return chain(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), features=24)

    assert_as_in_the_loop(make, data((4, 6)), "loop")


def test_only_plain_max_pooling_has_a_kernel_of_ours():
    stacked = stack(nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)))
    assert [type(layer) is PlainMaxPool2d for layer in stacked] == [True, False, False]
    x = torch.randn(2, 3, 7, 9)
    assert torch.equal(stacked[0](x), nn.functional.max_pool2d(x, 2))


def test_the_kernel_of_a_norm_gets_no_residual_of_another_shape():
    (layer,) = stack(nn.Sequential(nn.GroupNorm(2, 4)))
    parameters = {"weight": torch.ones(1, 4), "bias": torch.zeros(1, 4)}
    x = torch.randn(2, 4, 3, 3)
    expected = torch.func.functional_call(layer, parameters, (x, x.mean((2, 3), keepdim=True)))
    layer.kernel = lambda *inputs: "the kernel's result"
    assert torch.func.functional_call(layer, parameters, (x, x)) == "the kernel's result"
    assert torch.equal(torch.func.functional_call(layer, parameters, (x, x.mean((2, 3), keepdim=True))), expected)


def test_values_without_samples_do_not_reach_kernels():
    def refuse(*inputs, **options):
        raise AssertionError("a kernel does not see all clients of such a value")

    norm, pool, flatten = layers = stack(nn.Sequential(nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten()))
    for layer in layers:
        layer.kernel = refuse
    rows = torch.randn(2, 1, 4, 4, 4)
    value = PerClient.of(rows, Samples())
    assert torch.equal(pool(value).rows, nn.functional.max_pool2d(rows.flatten(0, 1), 2).unsqueeze(1))
    assert torch.equal(flatten(value).rows, rows.flatten(2))
    x, parameters = torch.randn(1, 4, 4, 4), {"weight": torch.ones(2, 4), "bias": torch.zeros(2, 4)}
    norm.samples = value.samples
    with value.samples.of_pass(2, 1, torch.float64, train=True):
        out = torch.func.functional_call(norm, parameters, (x.repeat(2, 1, 1, 1), value))
    torch.testing.assert_close(out, nn.functional.group_norm(x, 2) + rows.flatten(0, 1))


def test_frozen_layers_are_shared_by_all_clients():
    class Frozen(nn.Module):
        """Everything is frozen but one norm, the projection of an attention, and a bias."""

        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.scaled, self.norm, self.head = Scaled(8), nn.LayerNorm(8), nn.Linear(8, 3)
            for parameter in (*self.words.parameters(), *self.scaled.parameters(), self.head.weight):
                parameter.requires_grad_(False)
            self.attention.in_proj_weight.requires_grad_(False)
            self.attention.out_proj.bias.requires_grad_(False)

        def forward(self, tokens):
            x = self.scaled(self.words(tokens))
            return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))

    assert_as_in_the_loop(Frozen, data())
