"""The indices of the Hopper kernels, on any machine: they run on fake_gluon.py, against torch's convolution."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fake_gluon import Program, hopper_on_cpu

CASES = [  # clients, batch, in, out, height, width, kernel, stride, padding
    # the kernels of hopper.py
    (2, 3, 72, 40, 7, 9, (3, 3), 1, (1, 1)),
    (1, 2, 8, 16, 5, 4, (1, 1), 1, (0, 0)),
    (2, 1, 16, 8, 6, 3, (5, 3), 1, (2, 0)),
    (2, 2, 8, 8, 4, 4, (3, 3), 1, (2, 4)),
    (3, 2, 8, 16, 1, 1, (3, 3), 1, (1, 1)),
    (2, 130, 8, 8, 4, 4, (3, 3), 1, (1, 1)),  # several boxes and parts
    # stride 2
    (2, 3, 16, 8, 8, 8, (3, 3), 2, (1, 1)),
    (2, 2, 8, 16, 7, 10, (3, 3), 2, (1, 1)),
    (1, 3, 16, 16, 9, 6, (1, 1), 2, (0, 0)),
    (2, 1, 8, 8, 5, 7, (2, 2), 2, (0, 0)),
    (2, 1, 8, 8, 9, 8, (5, 5), 2, (2, 3)),
    (2, 1, 8, 8, 6, 11, (3, 2), 2, (0, 1)),
    (1, 1, 8, 8, 11, 12, (7, 7), 2, (3, 3)),
    # those of halo.py: few and more channels, and images that are not whole boxes
    (2, 2, 16, 24, 14, 20, (3, 3), 1, (1, 1)),
    (2, 1, 40, 64, 17, 34, (3, 3), 1, (1, 1)),
    (1, 2, 64, 32, 20, 13, (3, 3), 1, (0, 2)),
    (140, 1, 8, 8, 9, 16, (3, 3), 1, (1, 1)),  # more clients than processors
]


@pytest.mark.parametrize("case", CASES)
def test_convolutions_are_those_of_torch(case, monkeypatch):
    clients, batch, inp, out, height, width, kernel, stride, padding = case
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64)

    def images(count, channels, *size):
        return draw(count, *size, channels).permute(0, 3, 1, 2)

    x = images(clients * batch, inp, height, width).requires_grad_()
    flat = draw(clients, out * inp * kernel[0] * kernel[1] + 32)  # a vector with something before and after the weights
    w = flat[:, 16:-16].reshape(clients, out, *kernel, inp).permute(0, 1, 4, 2, 3).detach().requires_grad_()
    bias = draw(clients, out + 8)[:, 4:-4]
    pairs = zip(x.chunk(clients), w, strict=True)
    y = torch.cat([F.conv2d(one, weights, None, stride, padding) for one, weights in pairs])
    g = images(*y.shape)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    hopper = hopper_on_cpu(monkeypatch)
    with torch.no_grad():
        actual = hopper.forward(x, w, padding, stride, bias)
        torch.testing.assert_close(actual, y + bias.repeat_interleave(batch, 0)[:, :, None, None])
        monkeypatch.setattr(Program, "zeroed", min(kernel) < stride)  # pixels that no tap meets
        torch.testing.assert_close(hopper.input_gradient(g, w, (height, width), padding, stride), dx)
        monkeypatch.setattr(Program, "zeroed", False)
        actual = hopper.weight_gradient(g, x, clients, kernel, padding, stride, torch.float64)
        torch.testing.assert_close(actual, dw, rtol=1e-4, atol=1e-4)  # parts are added up in float32
