"""The convolution of many clients at once, in the form that suits the device.

- *one by one*: a convolution per client: on a CPU, where a grouped one is no faster than its parts.
- *kernels*: our own in Triton, the client an axis of the launch: on a GPU, wherever they apply (see gpu/).
- *grouped*: one convolution with C times as many groups, channels last: on a GPU for all others.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """x [C * B, in, H, W], weight [C, out, in / groups, kh, kw] -> [C * B, out, H', W']."""
    if x.is_cuda and _kernels_apply(x, weight, padding, dilation, groups):
        from lamina.engines.stacked.gpu import ops

        return ops.convolve(x, weight, stride, padding)
    weight = weight.to(x.dtype)
    by_client = x.reshape(weight.shape[0], -1, *x.shape[1:])
    form = grouped if x.is_cuda else one_by_one
    return form(by_client, weight, stride, padding, dilation, groups).flatten(0, 1)


def _kernels_apply(x: Tensor, weight: Tensor, padding: Any, dilation: Any, groups: int) -> bool:
    """Plain convolutions in the precisions tensor cores have, with the channels last in the flat vector."""
    plain = dilation == (1, 1) and groups == 1 and not isinstance(padding, str)
    usual = x.dtype in (torch.float32, torch.bfloat16) and weight[0].permute(0, 2, 3, 1).is_contiguous()
    return plain and usual and _has_kernels(x.device.index or 0)


@functools.cache
def _has_kernels(device: int) -> bool:
    """Whether there is a Triton, and a chip it compiles tensor-core products for (Ampere or newer)."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


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
