"""The convolution of many clients at once, in the form that suits its shape and the device.

- *one by one*: a convolution per client: on a CPU, where a grouped one is no faster than its parts.
- *patches*: im2col and one batched matrix product: on a GPU for narrow layers, where cuDNN's grouped kernels are slow.
- *grouped*: one convolution with C times as many groups, channels last: on a GPU for all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

PATCHES_UP_TO = 320  # in-channels x kernel area


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """x [C, B, in, H, W], weight [C, out, in / groups, kh, kw] -> [C, B, out, H', W']."""
    if x.device.type == "cpu":
        return one_by_one(x, weight, stride, padding, dilation, groups)
    plain = stride == (1, 1) and dilation == (1, 1) and groups == 1 and not isinstance(padding, str)
    if plain and weight[0, 0].numel() <= PATCHES_UP_TO:
        return patches(x, weight, padding)
    return grouped(x, weight, stride, padding, dilation, groups)


def one_by_one(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """Client after client."""
    parts = [
        F.conv2d(one, w, None, stride, padding, dilation, groups)
        for one, w in zip(x.unbind(0), weight.unbind(0), strict=True)
    ]
    return torch.stack(parts)


def grouped(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """One convolution with C times as many groups."""
    clients, batch = x.shape[:2]
    wide = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)  # [B, C * in, H, W]
    kernels = weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(wide, kernels, None, stride, padding, dilation, groups * clients)
    return out.reshape(batch, clients, -1, *out.shape[2:]).transpose(0, 1)


def patches(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """im2col and a batched matrix product, stride 1."""
    made: Tensor = _Patches.apply(x, weight, padding)  # type: ignore[no-untyped-call]
    return made


class _Patches(torch.autograd.Function):
    """The patches form with its own backward pass: the input's gradient is a gather too, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return _correlate(x, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        clients, out, inp, kh, kw = weight.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:  # correlation of the padded gradient with the flipped, transposed kernels
            back = weight.flip(3, 4).transpose(1, 2)
            dx = _correlate(grad, back, (kh - 1 - ctx.padding[0], kw - 1 - ctx.padding[1]))
        if ctx.needs_input_grad[1]:
            rows = grad.permute(0, 2, 1, 3, 4).reshape(clients, out, -1)
            dw = torch.bmm(rows, _columns(x, kh, kw, ctx.padding))
            dw = dw.reshape(clients, out, kh, kw, inp).permute(0, 1, 4, 2, 3)
        return dx, dw, None


def _correlate(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    clients, out, _, kh, kw = weight.shape
    batch = x.shape[1]
    height, width = x.shape[3] + 2 * padding[0] - kh + 1, x.shape[4] + 2 * padding[1] - kw + 1
    kernels = weight.permute(0, 3, 4, 2, 1).reshape(clients, -1, out)
    rows = torch.bmm(_columns(x, kh, kw, padding), kernels)
    return rows.reshape(clients, batch, height, width, out).permute(0, 1, 4, 2, 3)


def _columns(x: Tensor, kh: int, kw: int, padding: tuple[int, int]) -> Tensor:
    """Every patch as a row: [C, B, in, H, W] -> [C, B * H' * W', kh * kw * in].

    Channels come last: the product's output has them last in memory too, so neighbouring threads read neighbours.
    """
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    windows = x.unfold(3, kh, 1).unfold(4, kw, 1)  # [C, B, in, H', W', kh, kw]
    return windows.permute(0, 1, 3, 4, 5, 6, 2).reshape(x.shape[0], -1, kh * kw * x.shape[2])
