"""The GPU's convolution kernels against torch's own convolution in float64, client by client. Needs a GPU."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gpu_numbers import error
from lamina.engines.stacked.gpu import convolution, ops

CASES = [  # clients, batch, in, out, height, width, kernel, stride, padding
    (2, 2, 3, 5, 7, 6, (3, 3), (1, 1), (1, 1)),
    (3, 2, 16, 32, 8, 8, (3, 3), (2, 2), (1, 1)),
    (5, 3, 1, 10, 28, 28, (5, 5), (1, 1), (0, 0)),
    (4, 3, 10, 20, 12, 12, (5, 5), (1, 1), (0, 0)),
    (2, 2, 32, 16, 5, 5, (1, 1), (2, 2), (0, 0)),
    (2, 1, 10, 20, 9, 8, (3, 2), (2, 1), (1, 0)),
    (3, 5, 32, 64, 30, 30, (3, 3), (1, 1), (0, 0)),
    (2, 1, 3, 8, 17, 17, (7, 7), (2, 2), (3, 3)),
    (2, 2, 4, 4, 8, 8, (2, 2), (3, 3), (0, 0)),
    (3, 7, 128, 128, 16, 16, (3, 3), (1, 1), (1, 1)),
    (3, 7, 256, 256, 8, 8, (3, 3), (1, 1), (1, 1)),
    (3, 7, 512, 512, 4, 4, (3, 3), (1, 1), (1, 1)),
    (2, 3, 64, 72, 9, 11, (5, 3), (1, 1), (2, 1)),
    (2, 3, 40, 24, 13, 6, (3, 3), (1, 1), (2, 2)),
    # stride 2: every second row and column
    (3, 5, 64, 128, 32, 32, (3, 3), (2, 2), (1, 1)),
    (2, 3, 64, 64, 17, 15, (3, 3), (2, 2), (1, 1)),
    (2, 3, 16, 16, 9, 12, (5, 5), (2, 2), (2, 2)),
    (2, 2, 16, 24, 7, 7, (2, 2), (2, 2), (0, 0)),
    (2, 5, 128, 256, 16, 16, (1, 1), (2, 2), (0, 0)),
    (2, 3, 16, 16, 1, 6, (3, 3), (2, 2), (1, 1)),
    # few channels: boxes with a halo, where the images are large enough
    (3, 7, 64, 64, 32, 32, (3, 3), (1, 1), (1, 1)),
    (3, 2, 16, 24, 40, 20, (3, 3), (1, 1), (0, 2)),
    (150, 2, 8, 64, 17, 16, (3, 3), (1, 1), (1, 1)),
    (2, 3, 64, 32, 64, 64, (3, 3), (1, 1), (1, 1)),
    (2, 3, 32, 32, 40, 4, (3, 3), (1, 1), (1, 1)),
    # ResNet-18 with ImageNet's stem on 32x32: its first layer, and its last ones at 2x2 and 1x1
    (3, 7, 3, 64, 32, 32, (7, 7), (2, 2), (3, 3)),
    (3, 7, 256, 512, 2, 2, (3, 3), (2, 2), (1, 1)),
    (3, 50, 256, 256, 2, 2, (3, 3), (1, 1), (1, 1)),
    (3, 50, 512, 512, 1, 1, (3, 3), (1, 1), (1, 1)),
]


def problem(case, dtype):
    clients, batch, inp, out, height, width, (kh, kw), stride, padding = case
    generator = torch.Generator("cuda").manual_seed(hash(case) % 1000)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    x = draw(clients * batch, height, width, inp).to(dtype).permute(0, 3, 1, 2)
    # a flat vector per client, with something before and after the kernels
    flat = draw(clients, out * inp * kh * kw + 32).requires_grad_()
    w = flat[:, 16:-16].reshape(clients, out, kh, kw, inp).permute(0, 1, 4, 2, 3)
    xs, ws = x.double().requires_grad_(), w.detach().to(dtype).double().requires_grad_()
    parts = zip(xs.reshape(clients, batch, *x.shape[1:]), ws, strict=True)
    expected = torch.cat([F.conv2d(a, b, None, stride, padding) for a, b in parts])
    g = draw(*expected.permute(0, 2, 3, 1).shape).to(dtype).permute(0, 3, 1, 2)
    dx, dw = torch.autograd.grad(expected, (xs, ws), g.double())
    return x.detach().requires_grad_(), flat, w, g, expected.detach(), dx, dw


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_a_convolution_and_its_gradients(case, dtype, tolerance):
    x, flat, w, g, expected, dx, dw = problem(case, dtype)
    for _ in range(5):  # a race would show as an error that moves
        y = ops.convolve(x, w, case[7], case[8])
        grad_x, grad_flat = torch.autograd.grad(y, (x, flat), g, retain_graph=True)
        grad_w = grad_flat[:, 16:-16].reshape(w.permute(0, 1, 3, 4, 2).shape).permute(0, 1, 4, 2, 3)
        assert error(y, expected) < tolerance
        assert error(grad_x, dx) < tolerance
        assert error(grad_w, dw) < 1e-5  # summed in float32 and never rounded to bfloat16
        assert float(grad_flat[:, :16].abs().sum() + grad_flat[:, -16:].abs().sum()) == 0


def test_the_gradient_cut_into_parts_is_the_same(monkeypatch):
    x, _, _, g, _, _, dw = problem(CASES[3], torch.float32)
    window = convolution.Window((5, 5), (1, 1), (0, 0))
    for programs in (1, 528, 10**6):  # one part, the usual number, and as many as there may be
        monkeypatch.setattr(convolution, "PROGRAMS", programs)
        actual, bias = convolution.weight_gradient(g, x.detach(), 4, window, "ieee", biased=True)
        assert error(actual, dw) < 1e-6
        assert error(bias, g.double().reshape(4, -1, *g.shape[1:]).sum((1, 3, 4))) < 1e-6


@pytest.mark.parametrize("case", [*CASES[2:4], *CASES[5:7], CASES[10], *CASES[14:24]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_a_convolution_with_a_bias(case, dtype, tolerance):
    x, _, w, g, expected, *_ = problem(case, dtype)
    bias = torch.randn(case[0], case[3] + 2, device="cuda").requires_grad_()  # its rows lie apart in a flat vector
    y = ops.convolve(x, w.detach().requires_grad_(), case[7], case[8], bias=bias[:, 1:-1])
    shift = bias[:, 1:-1].detach().double().repeat_interleave(case[1], 0)[:, :, None, None]
    assert error(y.detach(), expected + shift) < tolerance
    (actual,) = torch.autograd.grad(y, bias, g)
    assert error(actual[:, 1:-1], g.double().reshape(case[0], case[1], *g.shape[1:]).sum((1, 3, 4))) < 1e-5
    assert float(actual[:, 0].abs().sum() + actual[:, -1].abs().sum()) == 0
