"""Offer the GPU kernels as differentiable functions of torch."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked import folding
from lamina.engines.stacked.gpu import convolution, pooling
from lamina.engines.stacked.gpu.copies import fill_rows, flatten
from lamina.engines.stacked.gpu.images import prepare_images
from lamina.engines.stacked.gpu.launch import Launch, is_recording, recording, start_triton, unrecorded
from lamina.engines.stacked.gpu.masks import drop
from lamina.engines.stacked.gpu.norms import group_norm
from lamina.engines.stacked.gpu.sums import squared_distances, sum_rows
from lamina.engines.stacked.side_stream import claim, weight_gradients

try:
    from lamina.engines.stacked.gpu import boxes, hopper
except ImportError:  # a triton without Gluon, or with another one
    boxes = hopper = None  # type: ignore[assignment]

__all__ = [
    "LARGEST_WINDOW",
    "convolve",
    "drop",
    "fill_rows",
    "flatten",
    "group_norm",
    "launches_of_check",
    "linear",
    "max_pool",
    "prepare",
    "prepare_images",
    "squared_distances",
    "start_triton",
]

log = logging.getLogger(__name__)

_checking = threading.Lock()  # a second thread waits for the check that the first one runs
_hopper_works: dict[int, bool] = {}  # by the GPU's number, once it is known

LARGEST_WINDOW = 127  # pixels of max-pooling's window: where the largest was is kept in a byte


def prepare(device: torch.device) -> None:
    """Check, once, which kernels a GPU can run."""
    with _checking:
        number = device.index or 0
        if number not in _hopper_works:
            _hopper_works[number] = _try_hopper(number)


def launches_of_check(device: torch.device) -> list[Launch]:
    """Return what the check before the first use launches, and a kernel of the first round that no step has."""
    number = device.index or 0
    zeros = torch.zeros(1, 1, device=device)
    with recording() as launches:
        squared_distances(zeros, zeros, torch.zeros(1, dtype=torch.int64, device=device))
        if hopper is not None and number not in _hopper_works and _is_hopper(number):
            for work, _ in _small_convolutions(number):
                work()
    return launches


def convolve(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    precision: str = "tf32x3",
    bias: Tensor | None = None,
) -> Tensor:
    """Convolve x [C * B, in, H, W] with weight [C, out, in, kh, kw], both with the channels last in memory.

    The weights are rounded to the type of the images, products are summed in float32, and the weights' gradient is
    given in their own type. With float32 images, a product is made of three on tensor cores ("tf32x3"), which is as
    exact as float32 arithmetic, or of one ("tf32").
    """
    y: Tensor = _Convolution.apply(x, weight, bias, _pair(stride), _pair(padding), precision)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: convolution.Pair, padding: convolution.Pair,
        precision: str,
    ) -> Tensor:  # fmt: skip
        ctx.claim = claim(weight, bias)
        x, rounded = _channels_last(x), weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.settings = stride, padding, precision
        ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        if not _suits_hopper(x, weight, stride):
            return convolution.forward(x, rounded, stride, padding, precision, bias=bias)
        dense = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
        return hopper.forward(x, rounded, padding, stride[0], dense)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        stride, padding, precision = ctx.settings
        g, size = _channels_last(gradients[0]), _pair(x.shape[2:])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        clients, size_of_kernel, on_hopper = len(rounded), _pair(rounded.shape[3:]), _suits_hopper(x, rounded, stride)
        dx = None
        if needs_x and on_hopper:
            dx = hopper.input_gradient(g, rounded, size, padding, stride[0])
        elif needs_x:
            dx = convolution.input_gradient(g, rounded, size, stride, padding, precision)

        def compute() -> list[Tensor]:
            """Return the gradients of the weights and of the bias, if there is one."""
            if not on_hopper:
                window = convolution.Window(size_of_kernel, stride, padding)
                dw, db = convolution.weight_gradient(g, x, clients, window, precision, bool(needs_bias), ctx.dtype)
                return [dw] if db is None else [dw, db.to(ctx.bias_dtype)]
            dw = hopper.weight_gradient(g, x, clients, size_of_kernel, padding, stride[0], ctx.dtype)
            if not needs_bias:
                return [dw]
            db = sum_rows(g.permute(0, 2, 3, 1).reshape(clients, -1, g.shape[1]))
            return [dw, db.to(ctx.bias_dtype)]

        if not (needs_weight or needs_bias):
            return dx, None, None, None, None, None
        dw, *db = weight_gradients(ctx.claim, compute, (g, x))
        return dx, dw, db[0] if db else None, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return every client's x W^T + b. x [C * B, ..., in], weight [C, out, in], bias [C, out]."""
    if len(weight) == 1:
        return folding.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    """A linear layer whose products have rows of features, which are aligned; autograd's would have rows of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.claim, ctx.bias_dtype = claim(weight, bias), None if bias is None else bias.dtype
        rows = x.reshape(len(weight), -1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        if bias is None:
            y = torch.bmm(rows, weight.transpose(1, 2))
        else:
            y = torch.baddbmm(bias.to(rows.dtype).unsqueeze(1), rows, weight.transpose(1, 2))
        return y.reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        g = gradients[0].reshape(*rows.shape[:2], weight.shape[1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = torch.bmm(g, weight).reshape(ctx.shape) if needs_x else None

        def compute() -> list[Tensor]:
            dw = torch.bmm(g.transpose(1, 2), rows)
            return [dw, g.sum(1, dtype=torch.float32).to(ctx.bias_dtype)] if needs_bias else [dw]

        if not (needs_weight or needs_bias):
            return dx, None, None
        dw, *db = weight_gradients(ctx.claim, compute, (g, rows))
        return dx, dw, db[0] if db else None


def max_pool(x: Tensor, kernel: tuple[int, int], relu: bool = False) -> Tensor:
    """Return the maxima of adjacent windows, at least 0 if `relu`; torch's own is slow for channels-last images."""
    y: Tensor = _MaxPool.apply(x, _pair(kernel), relu)  # type: ignore[no-untyped-call]
    return y


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: convolution.Pair, relu: bool) -> Tensor:
        y, place = pooling.max_pool(_channels_last(x), kernel, relu)
        ctx.save_for_backward(place)
        ctx.size, ctx.kernel = _pair(x.shape[2:]), kernel
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return pooling.max_pool_gradient(_channels_last(gradients[0]), place, ctx.size, ctx.kernel), None, None


def _channels_last(x: Tensor) -> Tensor:
    """Return images in the layout that the kernels read."""
    return x.contiguous(memory_format=torch.channels_last)


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def _suits_hopper(x: Tensor, weight: Tensor, stride: convolution.Pair) -> bool:
    """Return whether Hopper's kernels compute a convolution and its gradients here."""
    _, out, inp, _, _ = weight.shape
    if hopper is None or not x.is_cuda or x.dtype != torch.bfloat16 or stride not in ((1, 1), (2, 2)):
        return False
    if out % boxes.ALIGNED or inp % boxes.ALIGNED:
        return False
    if min(x.shape[2:]) < max(stride):  # one of the images of every second row and column would be empty
        return False
    number = x.device.index or 0
    if is_recording() and number not in _hopper_works:  # do not wait for the check: most likely it will succeed
        return _is_hopper(number)
    prepare(x.device)
    return _hopper_works[number]


def _is_hopper(device: int) -> bool:
    return bool(torch.cuda.get_device_capability(device)[0] == 9)


def _try_hopper(device: int) -> bool:
    """Return whether the chip is a Hopper, and its kernels compute what torch does on small problems."""
    if not _is_hopper(device):
        return False
    works = _small_convolutions(device)

    def error(work: Callable[[], Tensor], right: Tensor) -> float:
        torch.cuda.set_device(device)
        with unrecorded():
            return float((work().cpu().float() - right).norm() / right.norm())

    try:
        start_triton()
        with ThreadPoolExecutor(len(works)) as pool:  # what is not compiled yet, compiles at the same time
            is_right = all(error <= 0.01 for error in pool.map(error, *zip(*works, strict=True)))
    except Exception as failure:  # whatever a triton that has changed raises
        log.warning("the Hopper kernels do not run here, so the portable ones are used: %s", failure)
        return False
    if not is_right:
        log.warning("the Hopper kernels are wrong under this version of triton, so the portable ones are used")
    return is_right


@functools.cache
def _small_convolutions(device: int) -> list[tuple[Callable[[], Tensor], Tensor]]:
    """Return what the Hopper kernels are tried on, each with the right result on the CPU."""
    wide, narrow = (_small_convolution(device, side) for side in (4, 16))  # with 16, `halo.py` does the work
    (x, w, b, g), (xs, ws, bs, gs), one = wide.given, narrow.given, (1, 1)
    return [  # each kernel in one direction, and stride 2 once: compiling takes time
        (lambda: hopper.forward(x, w, one, stride=2, bias=b), wide.y[:, :, ::2, ::2]),
        (lambda: hopper.input_gradient(g, w, (4, 4), one), wide.d_images),
        (lambda: hopper.weight_gradient(g, x, len(w), (3, 3), one), wide.d_weight),
        (lambda: hopper.forward(xs, ws, one, bias=bs), narrow.y),
        (lambda: hopper.weight_gradient(gs, xs, len(ws), (3, 3), one), narrow.d_weight),
    ]


class _SmallConvolution(NamedTuple):
    """A convolution of two clients with torch's result and gradients, on the CPU."""

    given: list[Tensor]  # images, weights, bias and gradients, on the GPU
    y: Tensor
    d_images: Tensor
    d_weight: Tensor


def _small_convolution(device: int, side: int) -> _SmallConvolution:
    """Return a convolution of 64 channels of images of this size."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).bfloat16()
        return values.permute(*range(len(shape) - 3), -1, -3, -2)  # channels last in memory

    x, w, g = draw(6, side, side, 64), draw(2, 64, 3, 3, 64), draw(6, side, side, 64)
    b = torch.randn(2, 64, generator=generator)
    results = []
    for images, weight, bias, gradient in zip(x.chunk(2), w, b, g.chunk(2), strict=True):
        images, weight = images.float().requires_grad_(), weight.float().requires_grad_()
        with torch.enable_grad():
            y = F.conv2d(images, weight, bias, padding=1)
            weighted = (y * gradient.float()).sum()  # a gradient as an argument would make torch import sympy
            results.append((y.detach(), *torch.autograd.grad(weighted, (images, weight))))
    forward, d_images, d_weight = zip(*results, strict=True)
    given = [value.to(device) for value in (x, w, b, g)]
    return _SmallConvolution(given, torch.cat(forward), torch.cat(d_images), torch.stack(d_weight))
