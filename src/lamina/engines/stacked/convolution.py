"""The convolution of many clients at once, in the form that suits its shape and the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """x [C, B, in, H, W], weight [C, out, in / groups, kh, kw] -> [C, B, out, H', W']."""
    if x.device.type == "cpu":
        return one_by_one(x, weight, stride, padding, dilation, groups)
    return grouped(x, weight, stride, padding, dilation, groups)


def one_by_one(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """Client after client: on a CPU a grouped convolution is no faster, and often slower, than its parts."""
    parts = [
        F.conv2d(one, w, None, stride, padding, dilation, groups)
        for one, w in zip(x.unbind(0), weight.unbind(0), strict=True)
    ]
    return torch.stack(parts)


def grouped(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """One convolution with C times as many groups, channels last."""
    clients, batch = x.shape[:2]
    wide = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)  # [B, C * in, H, W]
    kernels = weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(wide, kernels, None, stride, padding, dilation, groups * clients)
    return out.reshape(batch, clients, -1, *out.shape[2:]).transpose(0, 1)
