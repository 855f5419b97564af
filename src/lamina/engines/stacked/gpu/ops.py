"""The kernels as torch operators, so that autograd differentiates them and `torch.compile` leaves them whole."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from lamina.engines.stacked.gpu import kernels

try:
    from lamina.engines.stacked.gpu import hopper
except ImportError:  # a triton without Gluon, or with another one
    hopper = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LARGEST_WINDOW = 127  # pixels of max-pooling's window: where the largest was is kept in a byte


def convolve(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    precision: str = "tf32x3",
    bias: Tensor | None = None,
) -> Tensor:
    """x [C * B, in, H, W], weight [C, out, in, kh, kw], both with the channels last in memory -> [C * B, out, H', W'].

    The weights are rounded to the type of the images, products are summed in float32, and the weights' gradient is
    given in their own type. With float32 images, a product is made of three on tensor cores ("tf32x3"), which is as
    exact as float32 arithmetic, or of one ("tf32").
    """
    rounded = weight.detach().to(x.dtype)
    made: Tensor = _forward(_channels_last(x), weight, rounded, bias, list(stride), list(padding), precision)
    return made


def max_pool(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Max-pooling over windows that lie side by side: torch's own is slow where channels are last in memory."""
    y: Tensor = _max_pool(_channels_last(x), list(kernel))[0]
    return y


@custom_op("lamina::convolve", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    rounded: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    precision: str,
) -> Tensor:
    """`rounded` is `weight` in the images' type, made once for both passes; gradients go to `weight`."""
    if _suits_hopper(x, weight, stride):
        y: Tensor = hopper.forward(x, rounded, _pair(padding))
        if bias is None:
            return y
        by_client = y.reshape(len(bias), -1, *y.shape[1:])
        return (
            (by_client + bias.to(y.dtype)[:, None, :, None, None])
            .reshape(y.shape)
            .contiguous(memory_format=torch.channels_last)
        )
    return kernels.forward(x, rounded, _pair(stride), _pair(padding), precision, bias=bias)


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    rounded: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    precision: str,
) -> Tensor:
    height, width = (
        kernels.out_size(n, k, s, p) for n, k, s, p in zip(x.shape[2:], weight.shape[3:], stride, padding, strict=True)
    )
    return _images(x, weight.shape[1], height, width)


@custom_op("lamina::convolve_input_gradient", mutates_args=())
def _input_gradient(
    g: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int], precision: str
) -> Tensor:
    if _suits_hopper(g, weight, stride):
        return hopper.input_gradient(g, weight, _pair(size), _pair(padding))
    return kernels.input_gradient(g, weight, _pair(size), _pair(stride), _pair(padding), precision)


@_input_gradient.register_fake
def _(g: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int], precision: str) -> Tensor:
    return _images(g, weight.shape[2], *size)


@custom_op("lamina::convolve_weight_gradient", mutates_args=())
def _weight_gradient(
    g: Tensor, x: Tensor, weight: Tensor, biased: bool, stride: list[int], padding: list[int], precision: str
) -> tuple[Tensor, Tensor]:
    """The gradients of the kernels and of the bias (empty if there is none), both in float32."""
    clients, kernel = weight.shape[0], _pair(weight.shape[3:])
    none = g.new_empty(0, dtype=torch.float32)
    if _suits_hopper(g, weight, stride):
        by_client = g.reshape(clients, -1, *g.shape[1:])
        db = by_client.sum((1, 3, 4), dtype=torch.float32) if biased else none
        return hopper.weight_gradient(g, x, clients, kernel, _pair(padding)), db
    sides = _pair(stride), _pair(padding)
    dw, sums = kernels.weight_gradient(g, x, clients, kernel, *sides, precision, biased=biased)
    return dw, none if sums is None else sums


@_weight_gradient.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, biased: bool, stride: list[int], padding: list[int], precision: str
) -> tuple[Tensor, Tensor]:
    clients, out, inp, kh, kw = weight.shape
    dw = g.new_empty((clients, out, kh, kw, inp), dtype=torch.float32).permute(0, 1, 4, 2, 3)
    return dw, g.new_empty((clients, out) if biased else (0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, rounded, bias, *ctx.settings = inputs
    ctx.save_for_backward(x, rounded)
    ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, rounded = ctx.saved_tensors
    g = _channels_last(g)
    needs_x, needs_w, _, needs_bias = ctx.needs_input_grad[:4]
    dx = _input_gradient(g, rounded, list(x.shape[2:]), *ctx.settings) if needs_x else None
    dw = db = None
    if needs_w or needs_bias:
        dw, db = _weight_gradient(g, x, rounded, ctx.bias_dtype is not None, *ctx.settings)
        dw, db = dw.to(ctx.dtype), None if ctx.bias_dtype is None else db.to(ctx.bias_dtype)
    return dx, dw, None, db, None, None, None


_forward.register_autograd(_backward, setup_context=_save)


@custom_op("lamina::max_pool", mutates_args=())
def _max_pool(x: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    return kernels.max_pool(x, _pair(kernel))


@_max_pool.register_fake
def _(x: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    y = _images(x, x.shape[1], x.shape[2] // kernel[0], x.shape[3] // kernel[1])
    return y, torch.empty_like(y, dtype=torch.int8)


@custom_op("lamina::max_pool_gradient", mutates_args=())
def _max_pool_gradient(g: Tensor, place: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return kernels.max_pool_gradient(g, place, _pair(size), _pair(kernel))


@_max_pool_gradient.register_fake
def _(g: Tensor, place: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return _images(g, g.shape[1], *size)


def _save_places(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.kernel = inputs
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)  # the places have no gradient
    ctx.size = list(x.shape[2:])


def _pool_backward(ctx: Any, g: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _max_pool_gradient(_channels_last(g), *ctx.saved_tensors, ctx.size, ctx.kernel), None


_max_pool.register_autograd(_pool_backward, setup_context=_save_places)


def _channels_last(x: Tensor) -> Tensor:
    """The layout the kernels read; asked for outside of them, so that a compiler makes it where x is made."""
    return x.contiguous(memory_format=torch.channels_last)


def _images(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (like.shape[0], channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def _suits_hopper(x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    _, out, inp, _, _ = weight.shape
    if hopper is None or not x.is_cuda or x.dtype != torch.bfloat16 or list(stride) != [1, 1]:
        return False
    if out % hopper.ALIGNED or inp % hopper.ALIGNED:
        return False
    return _hopper_works(x.device.index or 0)


@functools.cache
def _hopper_works(device: int) -> bool:
    """Whether the chip is a Hopper, and its kernels give what the portable ones do: tried once, on a small problem."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        return values.permute(*range(len(shape) - 3), -1, -3, -2)  # channels last in memory

    x, g, w = draw(6, 8, 8, 64), draw(6, 8, 8, 64), draw(2, 64, 3, 3, 64)
    one = (1, 1)
    try:
        pairs = [
            (hopper.forward(x, w, one), kernels.forward(x, w, one, one, "ieee")),
            (hopper.input_gradient(g, w, (8, 8), one), kernels.input_gradient(g, w, (8, 8), one, one, "ieee")),
            (
                hopper.weight_gradient(g, x, 2, (3, 3), one),
                kernels.weight_gradient(g, x, 2, (3, 3), one, one, "ieee")[0],
            ),
        ]
        right = all(bool((a.float() - b.float()).norm() <= 0.01 * b.float().norm()) for a, b in pairs)
    except Exception as error:  # whatever a triton that has changed raises
        log.warning("the Hopper kernels do not run here, the portable ones do: %s", error)
        return False
    if not right:
        log.warning("the Hopper kernels are wrong under this version of triton: using the portable ones")
    return right
