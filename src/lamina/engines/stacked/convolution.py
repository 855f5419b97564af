"""Convolve the images of many clients, each with its own weights, in the form that suits the device.

- *one by one*, on a CPU: one convolution per client, because a grouped one is no faster there.
- *kernels*, on a GPU where they apply: our own kernels in Triton, with the client as an axis of the launch (see gpu/).
- *grouped*, on a GPU otherwise: one convolution with C times as many groups and the channels last.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolve x [C * B, in, H, W] with weight [C, out, in / groups, kh, kw] and bias [C, out]."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    by_client = x.reshape(weight.shape[0], -1, *x.shape[1:])
    form = grouped if x.is_cuda else one_by_one
    return form(by_client, weight, bias, stride, padding, dilation, groups).flatten(0, 1)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Any:
    """Return our own kernels (the module gpu/ops.py); None without Triton or tensor cores, or for other types."""
    if device.type != "cuda" or dtype != torch.float32 or torch.version.hip is not None:
        return None
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    return importlib.import_module("lamina.engines.stacked.gpu.ops")


def kernels_apply(layer: nn.Conv2d) -> bool:
    """Return whether our own kernels support the options of a layer."""
    return layer.dilation == (1, 1) and layer.groups == 1 and not isinstance(layer.padding, str)


def one_by_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolve one client after another: x [C, B, in, H, W] -> [C, B, out, H', W']."""
    if len(x) == 1:  # squeezed, not taken apart: the backward pass then copies nothing
        shift = None if bias is None else bias.squeeze(0)
        one = F.conv2d(x.squeeze(0), weight.squeeze(0), shift, stride, padding, dilation, groups)
        return one.unsqueeze(0)
    biases = [None] * len(x) if bias is None else bias.unbind(0)
    parts = [
        F.conv2d(one, w, b, stride, padding, dilation, groups)
        for one, w, b in zip(x.unbind(0), weight.unbind(0), biases, strict=True)
    ]
    return torch.stack(parts)


def grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolve with C times as many groups: x [C, B, in, H, W] -> [C, B, out, H', W']."""
    clients, batch = x.shape[:2]
    wide = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)  # [B, C * in, H, W]
    kernels = weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    shift = None if bias is None else bias.flatten()
    out = F.conv2d(wide, kernels, shift, stride, padding, dilation, groups * clients)
    return out.reshape(batch, clients, -1, *out.shape[2:]).transpose(0, 1)
