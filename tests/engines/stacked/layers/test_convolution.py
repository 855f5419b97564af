"""Convolutions of many clients are those of every client, in all forms."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.layers import convolution
from lamina.engines.stacked.layers.modules import stack
from stacked_layers import assert_as_in_the_loop, chain, data

TENSORS = {
    "Conv1d": (lambda: chain(nn.Conv1d(4, 6, 3, stride=2, groups=2), features=12), (4, 6)),
    "Conv3d": (lambda: chain(nn.Conv3d(2, 3, 2, padding=1, dilation=2), features=24), (2, 2, 2, 2)),
    "ConvTranspose1d": (lambda: chain(nn.ConvTranspose1d(4, 2, 3, groups=2, dilation=2), features=20), (4, 6)),
    "ConvTranspose2d": (
        lambda: chain(nn.ConvTranspose2d(2, 3, 3, 2, 1, output_padding=1), features=48),
        (2, 2, 2),
    ),
    "ConvTranspose3d": (lambda: chain(nn.ConvTranspose3d(2, 1, 2, bias=False), features=27), (2, 2, 2, 2)),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "shape"), TENSORS.values(), ids=TENSORS.keys())
def test_layers(make, shape):
    assert_as_in_the_loop(make, data(shape))


def test_the_path_of_a_gpu():
    make, shape = TENSORS["ConvTranspose2d"]
    assert_as_in_the_loop(make, data(shape), gpu_path=True)


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


def test_a_cpu_has_no_kernels_of_ours():
    assert convolution.kernels_for(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    ("options", "apply"),
    [
        ({"stride": 2, "padding": 1}, True),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
        ({"padding": "same"}, False),
    ],
    ids=str,
)
def test_kernels_of_ours_support_plain_convolutions(options, apply):
    assert convolution.kernels_apply(nn.Conv2d(4, 4, 3, **options)) is apply


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("block", [(3,), (2, 2), (2, 3), (2, 1, 2)], ids=str)
def test_blocks_that_do_not_overlap_are_a_matrix_product(block, has_bias):
    clients, batch, inputs, outputs = 3, 2, 4, 5
    torch.manual_seed(0)
    x = torch.randn(clients * batch, inputs, *(5, 6, 7)[: len(block)], dtype=torch.double)
    weight = torch.randn(clients, inputs, outputs, *block, dtype=torch.double)
    bias = torch.randn(clients, outputs, dtype=torch.double) if has_bias else None
    plain, biases = convolution.TRANSPOSED[len(block)], [None] * clients if bias is None else bias
    expected = [plain(*each, stride=block) for each in zip(x.chunk(clients), weight, biases, strict=True)]
    torch.testing.assert_close(convolution.enlarge(x, weight, bias), torch.cat(expected))


@pytest.mark.parametrize(
    ("options", "enlarges"),
    [
        ({}, True),
        ({"kernel_size": 3}, False),
        ({"stride": 1}, False),
        ({"padding": 1}, False),
        ({"output_padding": 1}, False),
        ({"groups": 2}, False),
        ({"dilation": 2}, False),
    ],
)
def test_only_blocks_that_do_not_overlap_are_one(options, enlarges):
    layer = stack(nn.ConvTranspose2d(4, 6, **{"kernel_size": 2, "stride": 2} | options))
    assert layer._enlarges() == enlarges
