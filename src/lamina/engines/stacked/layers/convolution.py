"""Convolve the images of many clients, each with its own weights, in the form that suits the device.

- *one by one*, on a CPU: one convolution per client, because a grouped one is not faster there.
- *kernels*, on a GPU where they apply: our own kernels in Triton, with the client as an axis of the launch (see gpu/).
- *grouped*, on a GPU otherwise: one convolution with C times as many groups and the channels last.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.layers.per_client import StackedLayer

Convolution = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]  # of x, weight, bias and the number of groups
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _of_all_clients(plain: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Apply a plain convolution with the weights of every client, in the form that suits the device."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    by_client = x.reshape(weight.shape[0], -1, *x.shape[1:])
    form = grouped if x.is_cuda else one_by_one
    return form(plain, by_client, weight, bias, groups).flatten(0, 1)


class StackedConvolution(StackedLayer):
    """A convolution of one to three axes. weight [C, out, in / groups, ...], bias [C, out]."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """[C * B, in, ...] -> [C * B, out, ...]."""
        function = CONVOLUTIONS[input.dim() - 2]

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
            return function(x, weight, bias, self.stride, self.padding, self.dilation, groups)

        return _of_all_clients(plain, input, self.weight, self.bias, self.groups)


class StackedTransposed(StackedLayer):
    """A transposed convolution. weight [C, in, out / groups, ...], bias [C, out]."""

    def forward(self: Any, input: Tensor, output_size: Any = None) -> Tensor:
        """[C * B, in, ...] -> [C * B, out, ...]."""
        axes = input.dim() - 2
        if input.is_cuda and output_size is None and self._enlarges():
            return enlarge(input, self.weight, self.bias)
        extra = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, axes, self.dilation
        )

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
            return TRANSPOSED[axes](x, weight, bias, self.stride, self.padding, extra, groups, self.dilation)

        return _of_all_clients(plain, input, self.weight, self.bias, self.groups)

    def _enlarges(self: Any) -> bool:
        """Return whether every pixel becomes a block of its own, as in most networks that enlarge images."""
        is_plain = self.groups == 1 and not any((*self.padding, *self.output_padding))
        return is_plain and self.stride == self.kernel_size and all(step == 1 for step in self.dilation)


def enlarge(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a transposed convolution whose blocks do not overlap, as one matrix product per client.

    x [C * B, in, ...], weight [C, in, out, ...], bias [C, out] -> [C * B, out, ...], with the channels last in memory.
    torch's grouped convolutions start slowly here: they try many algorithms.
    """
    weight, block = weight.to(x.dtype), weight.shape[3:]
    clients, inputs, outputs = weight.shape[:3]
    pixels = x.movedim(1, -1).reshape(clients, -1, inputs)
    matrix = weight.movedim(2, -1).reshape(clients, inputs, -1)  # [C, in, block * out]
    if bias is None:
        rows = torch.bmm(pixels, matrix)
    else:
        shift = bias.to(x.dtype).repeat(1, math.prod(block)).unsqueeze(1)
        rows = torch.baddbmm(shift, pixels, matrix)
    axes = len(block)
    blocks = rows.reshape(len(x), *x.shape[2:], *block, outputs)
    order = (axis for i in range(1, axes + 1) for axis in (i, i + axes))  # a pixel's axis beside its block's
    sizes = (size * factor for size, factor in zip(x.shape[2:], block, strict=True))
    return blocks.permute(0, *order, -1).reshape(len(x), *sizes, outputs).movedim(-1, 1)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Any:
    """Return our own kernels (the module gpu/ops.py); None without Triton or tensor cores, or for other types."""
    if device.type != "cuda" or dtype != torch.float32 or torch.version.hip is not None:
        return None
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    return importlib.import_module("lamina.engines.stacked.gpu.ops")


_preparing: dict[torch.device, threading.Thread] = {}


def prepare_kernels(device: torch.device, precision: str) -> None:
    """Start to import Triton and what it compiles with, in a thread: a run in bf16 most likely needs our kernels."""

    def prepare() -> None:
        with contextlib.suppress(Exception):  # raised again when the run needs the kernels
            kernels = kernels_for(device, torch.float32)
            if kernels is not None:
                kernels.start_triton()

    if device.type == "cuda" and precision == "bf16" and device not in _preparing:
        _preparing[device] = threading.Thread(target=prepare)
        _preparing[device].start()


def wait_for_kernels() -> None:
    """Wait for the threads of `prepare_kernels`: nothing else may run on a GPU while a step is captured."""
    for thread in _preparing.values():
        thread.join()


def kernels_apply(layer: nn.Conv2d) -> bool:
    """Return whether our own kernels support the options of a layer."""
    return layer.dilation == (1, 1) and layer.groups == 1 and not isinstance(layer.padding, str)


def one_by_one(plain: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Client after client: x [C, B, in, ...] -> [C, B, out, ...]."""
    if len(x) == 1:  # squeezed, not taken apart: the backward pass then copies nothing
        shift = None if bias is None else bias.squeeze(0)
        return plain(x.squeeze(0), weight.squeeze(0), shift, groups).unsqueeze(0)
    biases = [None] * len(x) if bias is None else bias.unbind(0)
    parts = zip(x.unbind(0), weight.unbind(0), biases, strict=True)
    return torch.stack([plain(one, w, b, groups) for one, w, b in parts])


def grouped(plain: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """One convolution with C times as many groups: x [C, B, in, ...] -> [C, B, out, ...]."""
    clients, batch = x.shape[:2]
    wide, kernels = x.transpose(0, 1).flatten(1, 2), weight.flatten(0, 1)  # [B, C * in, ...]
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(wide.dim(), torch.contiguous_format)
    wide, kernels = wide.contiguous(memory_format=order), kernels.contiguous(memory_format=order)
    out = plain(wide, kernels, None if bias is None else bias.flatten(), groups * clients)
    return out.reshape(batch, clients, -1, *out.shape[2:]).transpose(0, 1)
