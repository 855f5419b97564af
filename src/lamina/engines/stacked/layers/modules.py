"""Turn a module into one that computes many clients at once, each with its own parameters.

The clients of a cohort are folded into the batch: inputs are [C * B, ...], client-major. Operations that treat samples
independently (activations, pooling, reshapes, residual sums, attention over tokens) need no change. `stack` gives the
layers with parameters another class, whose parameters have a leading axis C: a Linear becomes one batched matrix
product, a convolution one convolution of all clients, and so on.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.base.errors import BadInput
from lamina.engines.stacked.folding import (
    CannotStack,
    NormOptions,
    at_least_float32,
    linear,
    per_client,
    unfold_clients,
)
from lamina.engines.stacked.layers.convolution import StackedConvolution, StackedTransposed, kernels_apply
from lamina.engines.stacked.layers.embedding import PlainEmbedding, StackedEmbedding, StackedEmbeddingBag
from lamina.engines.stacked.layers.per_client import PerClient, StackedLayer
from lamina.engines.stacked.layers.recurrent import StackedGRU, StackedLSTM, StackedRNN, VmapLSTMCell
from lamina.objective.dropout import StreamAttention, StreamDropout
from lamina.objective.objective import ONE_SAMPLE, copy_module


class StackedLinear(StackedLayer, nn.Linear):
    """Linear as one batched matrix product; weight [C, out, in], bias [C, out]."""

    kernel: Callable[..., Tensor] = staticmethod(linear)  # another one on a GPU: set by `use_kernels`

    def forward(self, input: Tensor) -> Tensor:
        """[C * B, ..., in] -> [C * B, ..., out]."""
        return self.kernel(input, self.weight, self.bias)


class StackedConv2d(StackedConvolution, nn.Conv2d):
    """Conv2d as one convolution of all clients; weight [C, out, in / groups, kh, kw], bias [C, out]."""

    kernel: Callable[..., Tensor] | None = None  # our own, where it applies: set by `use_kernels`

    def forward(self, input: Tensor) -> Tensor:
        """[C * B, in, H, W] -> [C * B, out, H', W']."""
        if self.kernel is None:
            return super().forward(input)
        return self.kernel(input, self.weight, self.stride, self.padding, bias=self.bias)


class StackedGroupNorm(StackedLayer, nn.GroupNorm):
    """GroupNorm with scale and shift per client, and, if fused, the residual sum and the ReLU that follow it."""

    kernel: Callable[..., Any] | None = None  # our own, where it applies: set by `use_kernels`

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False, twice: bool = False) -> Any:
        """[C * B, channels, ...], the same shape out. `fuse` gives the other arguments; see `NormOptions`."""
        is_broadcast = residual is not None and (isinstance(residual, PerClient) or residual.shape != input.shape)
        if self.kernel is not None and input.dim() == 4 and not is_broadcast:
            options = NormOptions(self.num_groups, self.eps, relu, twice)
            return self.kernel(input, self.weight, self.bias, options, residual)
        shape = (input.shape[0], self.num_groups, -1, *input.shape[2:])
        groups = input.view(shape).to(at_least_float32(input))  # a view in any memory format: no copy
        variance, mean = torch.var_mean(groups, dim=list(range(2, groups.dim())), correction=0, keepdim=True)
        out = ((groups - mean) * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        x = unfold_clients(out, self.weight.shape[0])
        out = (x * per_client(self.weight, x, 2) + per_client(self.bias, x, 2)).flatten(0, 1).to(input.dtype)
        out = out if residual is None else out + residual
        out = F.relu(out) if relu else out
        return (out, out) if twice else out


class StackedLayerNorm(StackedLayer, nn.LayerNorm):
    """LayerNorm with scale and shift per client."""

    def forward(self, input: Tensor) -> Tensor:
        """[C * B, ..., *normalized_shape], the same shape out."""
        out = F.layer_norm(input.to(at_least_float32(input)), self.normalized_shape, eps=self.eps)
        return _scaled(out, self.weight, self.bias).to(input.dtype)


class StackedRMSNorm(StackedLayer, nn.RMSNorm):
    """Root mean square per position, scale per client."""

    def forward(self, x: Tensor) -> Tensor:
        """[C * B, ..., *normalized_shape], the same shape out."""
        out = F.rms_norm(x.to(at_least_float32(x)), self.normalized_shape, eps=self.eps)
        return _scaled(out, self.weight, None).to(x.dtype)


def _scaled(out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scale and shift values [C * B, ..., *shape] by every client's own weight and bias [C, *shape]."""
    x = unfold_clients(out, weight.shape[0])
    view = (weight.shape[0], *[1] * (x.dim() - weight.dim()), *weight.shape[1:])
    x = x * weight.reshape(view)
    return (x if bias is None else x + bias.reshape(view)).flatten(0, 1)


class PlainMaxPool2d(nn.MaxPool2d):
    """Max-pooling over adjacent windows. It has no parameters; it is replaced because our kernel is faster."""

    kernel: Callable[..., Tensor] | None = None  # our own: set by `use_kernels`

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        """[N, channels, H, W] -> [N, channels, H', W'], perhaps with a ReLU (see `fuse`)."""
        height, width = _two(self.kernel_size)
        is_small = input.dim() != 4 or input.shape[2] < height or input.shape[3] < width
        if self.kernel is None or is_small or isinstance(input, PerClient):
            out = F.max_pool2d(input, self.kernel_size)
            return F.relu(out) if relu else out
        return self.kernel(input, (height, width), relu)


class PlainFlatten(nn.Flatten):
    """Flatten. It is replaced because our kernel is faster for images with their channels last."""

    kernel: Callable[[Tensor], Tensor] | None = None  # our own: set by `use_kernels`

    def forward(self, input: Tensor) -> Tensor:
        """[N, ...] -> [N, features]."""
        is_plain = input.dim() == 4 and (self.start_dim, self.end_dim) == (1, -1)
        if self.kernel is None or not is_plain or isinstance(input, PerClient):
            return super().forward(input)
        return self.kernel(input)


def _two(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


class _StackedBatchNorm(StackedLayer):
    """BatchNorm with the statistics of every client's own batch, and running statistics per client [C, channels].

    `sample_mask` [C, B], set by the engine, marks the padding of short batches: those samples do not count.
    """

    sample_mask: Tensor | None = None
    lone_sample: bool = False  # set by the engine: some client's batch holds one sample only

    def forward(self: Any, input: Tensor) -> Tensor:
        """[C * B, channels, ...], the same shape out."""
        clients = (self.weight if self.affine else self.running_mean).shape[0]
        x = unfold_clients(input, clients).to(at_least_float32(input))  # [C, B, channels, ...]
        if self.training or self.running_mean is None:
            mean, variance, count = self._moments(x)
            if self.training and self.running_mean is not None:
                with torch.no_grad():
                    unbiased = variance * (count / (count - 1).clamp(min=1))
                    self.running_mean.lerp_(mean, self.momentum)
                    self.running_var.lerp_(unbiased, self.momentum)
        else:
            mean, variance = self.running_mean, self.running_var
        out = (x - per_client(mean, x, 2)) * torch.rsqrt(per_client(variance, x, 2) + self.eps)
        if self.affine:
            out = out * per_client(self.weight, x, 2) + per_client(self.bias, x, 2)
        return out.flatten(0, 1).to(input.dtype)

    def _moments(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance [C, channels] over samples and positions, and how many there are [C, 1]."""
        axes = [1, *range(3, x.dim())]
        positions = x[0, 0, 0].numel() if x.dim() > 3 else 1
        if self.lone_sample and positions == 1:
            raise BadInput(ONE_SAMPLE)
        if self.sample_mask is None:
            variance, mean = torch.var_mean(x, dim=axes, correction=0)
            return mean, variance, torch.full_like(mean[:, :1], float(x.shape[1] * positions))
        mask = self.sample_mask.reshape(*x.shape[:2], *[1] * (x.dim() - 2)).to(x.dtype)
        count = (self.sample_mask.sum(1, keepdim=True) * positions).to(x.dtype).clamp(min=1)
        mean = (x * mask).sum(axes) / count
        centred = (x - per_client(mean, x, 2)) * mask
        return mean, (centred**2).sum(axes) / count, count


class StackedMultiheadAttention(StackedLayer, StreamAttention):
    """MultiheadAttention with four projections per client, in training and in evaluation."""

    forward = StreamAttention.attend
    call_folded = nn.Module.__call__  # it knows the axis of its samples

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[C * B, T, E] with a weight [C, out, E] per client."""
        return linear(x, weight, bias)


def _of_any_axes(form: type, *kinds: type[nn.Module]) -> dict[type[nn.Module], type[nn.Module]]:
    """Return the stacked classes of layers that have one form for any number of axes, by the layers' own classes."""
    return {kind: type(f"Stacked{kind.__name__}", (form, kind), {}) for kind in kinds}


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: StackedLinear,  # the out_proj of attention
    nn.Conv2d: StackedConv2d,
    **_of_any_axes(StackedConvolution, nn.Conv1d, nn.Conv3d),
    **_of_any_axes(StackedTransposed, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    **_of_any_axes(_StackedBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
    nn.RMSNorm: StackedRMSNorm,
    nn.Embedding: StackedEmbedding,
    nn.EmbeddingBag: StackedEmbeddingBag,
    nn.RNN: StackedRNN,
    nn.GRU: StackedGRU,
    nn.LSTM: StackedLSTM,
    nn.MultiheadAttention: StackedMultiheadAttention,
    StreamAttention: StackedMultiheadAttention,
}


def stack(module: nn.Module) -> nn.Module:
    """A copy of the module whose layers take trainable parameters, given by `functional_call`, with a leading axis C.

    A layer whose parameters are all frozen is the same for every client, so it stays as it is. So does a module of
    another class: `used_directly` names its parameters. Raises `CannotStack` for a layer with an option that has no
    stacked form.
    """
    # torch warns of operations that vmap runs in a loop; the loop engine would be slower still.
    warnings.filterwarnings("ignore", message="There is a performance drop")
    stacked = copy_module(module)
    for name, layer in list(stacked.named_modules()):
        if type(layer) is nn.MaxPool2d and _windows_lie_apart(layer):
            layer.__class__ = PlainMaxPool2d
        elif type(layer) is nn.Flatten:
            layer.__class__ = PlainFlatten
        elif type(layer) is nn.LSTMCell:
            layer.__class__ = VmapLSTMCell
        kind = STACKED.get(type(layer))
        if kind is None or not _differs(layer) or "weight" in vars(layer):  # the old weight_norm computes it in a hook
            continue
        _check_options(name, layer)
        layer.__class__ = kind
        if isinstance(layer, nn.MultiheadAttention):  # it uses the parameters of this layer directly
            layer.out_proj.__class__ = StackedLinear  # type: ignore[assignment]
    return stacked


def used_directly(stacked: nn.Module) -> set[str]:
    """Return the names of the trainable parameters that belong to no stacked layer."""
    return {
        f"{name}.{own}" if name else own
        for name, layer in stacked.named_modules()
        for own, parameter in layer._parameters.items()
        if parameter is not None and parameter.requires_grad and not isinstance(layer, StackedLayer)
    }


def frozen_per_client(stacked: nn.Module) -> set[str]:
    """Return the names of the frozen parameters that a stacked module also takes with a leading axis C."""
    kinds = set(STACKED.values())
    layers = [(name, layer) for name, layer in stacked.named_modules() if type(layer) in kinds]
    return {
        f"{name}.{own}" if name else own
        for name, layer in layers
        for own, parameter in layer._parameters.items()
        if parameter is not None and not parameter.requires_grad
    }


def _differs(layer: nn.Module) -> bool:
    """Whether a layer has something of its own for every client: trained parameters, or statistics."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return True
    return any(p.requires_grad for p in layer.parameters(recurse=isinstance(layer, nn.MultiheadAttention)))


def to_be_watched(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose embeddings do without the option `padding_idx`, which the probe refuses."""
    module = copy_module(module)
    for layer in module.modules():
        if type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq:
            layer.__class__ = PlainEmbedding
    return module


def use_kernels(stacked: nn.Module, kernels: Any, precision: str) -> None:
    """Let layers use our own kernels where they apply; convolutions then keep their channels last in memory."""
    has_images = any(isinstance(layer, nn.Conv2d) for layer in stacked.modules())
    for layer in stacked.modules():
        if isinstance(layer, StackedConv2d) and kernels_apply(layer):
            layer.kernel = functools.partial(kernels.convolve, precision=precision)
        elif isinstance(layer, StreamDropout):
            layer.kernel = kernels.drop
        elif isinstance(layer, StackedLinear) and layer.in_features % 8 == 0 and layer.out_features % 8 == 0:
            layer.kernel = kernels.linear  # rows of aligned matrices
        elif not has_images:  # the others are for images with their channels last
            continue
        elif isinstance(layer, StackedGroupNorm):
            layer.kernel = kernels.group_norm
        elif isinstance(layer, PlainMaxPool2d) and math.prod(_two(layer.kernel_size)) <= kernels.LARGEST_WINDOW:
            layer.kernel = kernels.max_pool
        elif isinstance(layer, PlainFlatten):
            layer.kernel = kernels.flatten


def _check_options(name: str, layer: nn.Module) -> None:
    """Refuse options of a layer that its stacked class does not support."""
    problem = ""
    if isinstance(layer, nn.modules.conv._ConvNd) and layer.padding_mode != "zeros":
        problem = f"padding_mode '{layer.padding_mode}'"
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
        problem = "a cumulative average (momentum=None)"
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.affine and not layer.track_running_stats:
        problem = "neither parameters nor running statistics"
    elif isinstance(layer, nn.RNNBase) and layer.num_layers > 1 and layer.dropout > 0:
        problem = "dropout"
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        problem = "max_norm or scale_grad_by_freq"
    elif isinstance(layer, nn.MultiheadAttention) and (
        not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn
    ):
        problem = "separate key/value sizes, bias_k or add_zero_attn"
    if problem:
        raise CannotStack(f"layer '{name}' ({type(layer).__name__}) uses {problem}, which has no stacked form")


def _windows_lie_apart(layer: nn.MaxPool2d) -> bool:
    apart = _two(layer.kernel_size) == _two(layer.stride) and _two(layer.padding) == (0, 0)
    return apart and _two(layer.dilation) == (1, 1) and not layer.ceil_mode and not layer.return_indices


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether a stacked layer keeps statistics per client."""
    return isinstance(layer, _StackedBatchNorm)
