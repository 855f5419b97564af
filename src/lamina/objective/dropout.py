"""Dropout whose masks depend only on (seed, round, client, step, layer), so that every engine draws the same ones.

torch's own dropout layers draw from a process-wide generator: a mask depends on everything drawn before it, hence on
the clients and experiments that train beside this one. `with_streams` gives those layers another class, which draws
from one random stream per client (see base/rng.py). Element i of a client's tensor always gets the i-th number of its
stream. The padding of a short batch comes last, so it does not change the masks of the samples before it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.base import rng
from lamina.base.errors import BadInput

CALL_BITS = 16  # of the counter that numbers all draws of a step: the layer, then the call of that layer

SELU_FLOOR = -1.7580993408473766  # the value that AlphaDropout gives to dropped elements: -scale * alpha of SELU


class FromStreams:
    """Base of the layers that draw masks from streams, one per client."""

    streams: Tensor | None = None  # [clients], or one number under vmap; set before every forward pass
    number = 0  # of this layer among those of its module
    calls = 0  # of this layer in this forward pass
    under_hooks = False  # whether the whole pass runs under hooks on saved tensors

    def is_left_to_torch(self, *inputs: Any) -> bool:
        """Whether torch must draw the next mask, which the engine then sees as a random number of the module's own.

        Activation checkpointing, which hooks into the tensors that autograd saves, lets torch draw a mask again in the
        backward pass. A `torch.func.vmap` in the module's forward may ask for one mask per sample. A nested tensor has
        no shape that a mask could have.
        """
        if any(isinstance(value, Tensor) and value.is_nested for value in inputs):
            return True
        if _has_saved_tensor_hooks() and not self.under_hooks:
            return True
        level = torch._C._functorch.maybe_current_level() or -1  # of nested transforms; -1: none
        return self.streams is not None and level != torch._C._functorch.maybe_get_level(self.streams)

    def kept(self, shape: Sequence[int], p: float) -> Tensor:
        """Draw which elements stay, each with probability 1 - p; the first axis holds the clients' samples in turn."""
        of_clients, counter = self.next_call(shape)
        streams: Tensor = rng.fork(of_clients.reshape(-1, 1), counter)
        elements = math.prod(shape) // len(streams)
        if self.streams is not None and self.streams.dim() and _is_cut(streams, elements):
            drawn = _kept_in_blocks(streams, elements, lowest_kept(p)).reshape(shape)
            return drawn & False if p == 1 else drawn
        counters = torch.arange((elements + 1) // 2, device=streams.device)
        words = rng.words(streams, counters)  # two numbers from one word
        if self.streams is not None and self.streams.dim() == 0:
            # Under vmap no tensor can be viewed as another type: compute the lower and the upper bits of every word.
            halves = torch.stack([words << 32 >> 32, words >> 32], -1).flatten(-2)
        else:
            halves = words.view(torch.int32)
        kept: Tensor = (halves[:, :elements] >= lowest_kept(p)).reshape(shape)
        return kept & False if p == 1 else kept

    def next_call(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the clients' streams, and the counter that forks those of this call off them (see `rng.fork`)."""
        if self.streams is None:
            raise BadInput("dropout runs outside the forward pass: do without activation checkpointing")
        if (shape[0] if shape else 1) % self.streams.numel():
            raise ValueError("the first axis of dropout's input does not hold the samples of the batch")
        self.calls += 1
        return self.streams, (self.number << CALL_BITS) + self.calls - 1


BLOCK_WORDS = 32_768  # random words that a CPU's core draws at a time: they stay in its cache


def _is_cut(streams: Tensor, elements: int) -> bool:
    """Return whether the words of a mask are drawn in blocks: on a CPU, if there are many."""
    return streams.device.type == "cpu" and streams.numel() * elements > 2 * BLOCK_WORDS


def _kept_in_blocks(streams: Tensor, elements: int, lowest: int) -> Tensor:
    """Return which elements [clients, elements] of the streams [clients, 1] stay, as `kept` draws them.

    Drawing a word takes twelve operations, so whole vectors would pass through memory twelve times.
    """
    count = (elements + 1) // 2
    width = min(count, max(1, BLOCK_WORDS * torch.get_num_threads() // len(streams)))
    kept = streams.new_empty((len(streams), 2 * count), dtype=torch.bool)
    counters = torch.arange(width)
    words = [streams.new_empty((len(streams), width)) for _ in range(2)]
    for first in range(0, count, width):
        size = min(width, count - first)
        block, scratch = (each.flatten()[: len(streams) * size].view(-1, size) for each in words)
        rng.words_into(block, scratch, streams, counters[:size])
        torch.ge(block.view(torch.int32), lowest, out=kept[:, 2 * first : 2 * (first + size)])
        counters += width
    return kept[:, :elements]


_probe_rate: float | None = None  # see `dropping_half`


def lowest_kept(p: float) -> int:
    """Return the smallest of the random 32-bit numbers whose elements are kept."""
    p = p if _probe_rate is None else _probe_rate
    return min(round(p * 2**32), 2**32 - 1) - 2**31


@contextlib.contextmanager
def dropping_half() -> Iterator[None]:
    """Drop half of the elements within a block, so that a comparison of few samples shows whether masks are equal.

    At a small rate, two different masks might keep all of them.
    """
    global _probe_rate
    _probe_rate = 0.5
    try:
        yield
    finally:
        _probe_rate = None


class _Mask(FromStreams):
    """The forward pass of a dropout layer, but for what happens to the elements."""

    sample_axis = 0  # 1 in transformer layers with batch_first=False

    def mask_shape(self, input: Tensor) -> Sequence[int]:
        """Return the shape of the mask: one entry per element."""
        return input.shape

    def apply_mask(self, input: Tensor, kept: Tensor, p: float) -> Tensor:
        """Drop what is not kept and scale the rest, so that the mean stays."""
        factor = kept.to(input.dtype) * (0.0 if p == 1 else 1 / (1 - p))
        return input.mul_(factor) if self.inplace else input * factor  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training mode."""
        p: float = self.p  # type: ignore[attr-defined]
        if not self.training or self.is_left_to_torch(input):  # type: ignore[attr-defined]
            by_torch: Tensor = super().forward(input)  # type: ignore[misc]
            return by_torch
        turned = input.transpose(0, self.sample_axis) if self.sample_axis else input
        kept = self.kept(self.mask_shape(turned), p)
        return self.apply_mask(input, kept.transpose(0, self.sample_axis) if self.sample_axis else kept, p)


class _ChannelMask(_Mask):
    """One entry of the mask per channel [n, channels, ...], as in torch also for some inputs without a batch axis."""

    unbatched_axes = 0  # torch takes an input with this many axes for one sample [channels, ...]

    def mask_shape(self, input: Tensor) -> Sequence[int]:
        """Return the shape of the mask: one entry per sample and channel."""
        axes = 1 if input.dim() == self.unbatched_axes else 2
        return (*input.shape[:axes], *[1] * (input.dim() - axes))


class _AlphaMask(_Mask):
    """Dropped elements get SELU's lowest value, and an affine map keeps mean and variance."""

    def apply_mask(self, input: Tensor, kept: Tensor, p: float) -> Tensor:
        """Set what is not kept to the lowest value, then scale and shift."""
        if p == 1:
            out = input * 0.0
        else:
            scale = 1 / math.sqrt((1 - p) * (1 + p * SELU_FLOOR**2))
            noise = kept.to(input.dtype)
            out = input * (noise * scale) + ((1 - noise) * (SELU_FLOOR * scale) - SELU_FLOOR * scale * p)
        return input.copy_(out) if self.inplace else out  # type: ignore[attr-defined]


class StreamDropout(_Mask, nn.Dropout):
    """`nn.Dropout` from streams."""

    kernel: Callable[..., Tensor] | None = None  # one for all of it, where there is one

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training mode."""
        is_plain = self.training and not self.sample_axis and self.p != 1 and not self.inplace
        if self.kernel is None or not is_plain or self.is_left_to_torch(input):
            return super().forward(input)
        return self.kernel(input, *self.next_call(input.shape), lowest_kept(self.p), 1 / (1 - self.p))


class StreamAttention(FromStreams, nn.MultiheadAttention):
    """`nn.MultiheadAttention` written out, with its dropout from streams."""

    def forward(self, query: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Attend in training mode; evaluation, and a query without a batch axis, are left to torch."""
        is_ours = self.training and query.dim() == 3 and not self.is_left_to_torch(query)
        attend = self.attend if is_ours else super().forward
        return attend(query, *inputs, **options)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs and, if needed, the attention weights; a causal attention also gives its mask."""
        if not self.batch_first:  # [T, N, E]: bring the samples to the front
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        weights_in, bias_in = self.in_proj_weight.chunk(3, dim=-2), self.in_proj_bias
        biases_in = (None,) * 3 if bias_in is None else bias_in.chunk(3, dim=-1)
        inputs = zip((query, key, value), weights_in, biases_in, strict=True)
        q, k, v = (self._heads(self.project(t, w, b)) for t, w, b in inputs)
        mask = self._mask(attn_mask, key_padding_mask, q)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights or p:
            scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
            attention = (scores if mask is None else scores + mask).softmax(-1)
            if p:
                attention = attention * (self.kept(attention.shape, p).to(attention.dtype) * (1 / (1 - p)))
            mixed = attention @ v
            if need_weights:
                weights = attention.mean(1) if average_attn_weights else attention
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = self.project(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        return out if self.batch_first else out.transpose(0, 1), weights

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        return F.linear(x, weight, bias)

    def _heads(self, x: Tensor) -> Tensor:
        """[N, T, E] -> [N, heads, T, E / heads]."""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """One additive mask of [N or 1, heads or 1, T, S], or None."""
        total: Tensor | None = None
        if attn is not None:
            total = additive_mask(attn, q.dtype)
            total = total.reshape(-1, self.num_heads, *total.shape[-2:]) if total.dim() == 3 else total[None, None]
        if padding is not None:
            columns = additive_mask(padding, q.dtype)[:, None, None, :]
            total = columns if total is None else total + columns
        return total


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores of a given type, of a boolean one whose True hides a key."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _from_streams(layer: type[nn.Module], *masks: type[_Mask], **attributes: Any) -> type[FromStreams]:
    """Return the class of a torch layer whose masks come from streams."""
    return type(f"Stream{layer.__name__}", (*masks, layer), attributes)


LAYERS: dict[type[nn.Module], type[FromStreams]] = {
    nn.Dropout: StreamDropout,
    nn.Dropout1d: _from_streams(nn.Dropout1d, _ChannelMask, unbatched_axes=2),
    nn.Dropout2d: _from_streams(nn.Dropout2d, _ChannelMask),
    nn.Dropout3d: _from_streams(nn.Dropout3d, _ChannelMask, unbatched_axes=4),
    nn.AlphaDropout: _from_streams(nn.AlphaDropout, _AlphaMask),
    nn.FeatureAlphaDropout: _from_streams(nn.FeatureAlphaDropout, _ChannelMask, _AlphaMask),
    nn.MultiheadAttention: StreamAttention,
}


def with_streams(module: nn.Module) -> tuple[nn.Module, list[FromStreams]]:
    """Return the module with dropout from streams, and those layers; a copy with the same tensors if it is changed.

    Embeddings with sparse gradients get dense ones of the same value. Subclasses of torch's layers, and functions that
    a module's forward calls, are left to `FunctionalDropout`.
    """
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    if not any(_draws(layer) or (isinstance(layer, embeddings) and layer.sparse) for layer in module.modules()):
        return module, []
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    module = copy.deepcopy(module, dict(tensors))
    layers: list[FromStreams] = []
    for layer in module.modules():
        if isinstance(layer, embeddings):
            layer.sparse = False
        if _draws(layer):
            layer.__class__ = LAYERS[type(layer)]  # type: ignore[assignment]
            assert isinstance(layer, FromStreams)
            layer.number = len(layers)
            layers.append(layer)
    for block in module.modules():
        if isinstance(block, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            for child in block.children():
                if isinstance(child, _Mask):
                    child.sample_axis = 0 if block.self_attn.batch_first else 1
    return module, layers


def _draws(layer: nn.Module) -> bool:
    """Return whether we have a stream version of this layer."""
    if type(layer) is nn.MultiheadAttention:
        plain = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
        return plain and 0 < layer.dropout < 1
    return type(layer) in LAYERS and float(layer.p) > 0  # type: ignore[arg-type]


def stream_layers(module: nn.Module) -> list[FromStreams]:
    """Return the layers of a module, or of a copy of it, that draw from streams."""
    return [layer for layer in module.modules() if isinstance(layer, FromStreams)]


def set_streams(layers: Sequence[FromStreams], streams: Tensor | None) -> None:
    """Give the layers the clients' streams of the next forward pass, or take them away after it."""
    under_hooks = _has_saved_tensor_hooks()
    for layer in layers:
        layer.streams, layer.calls, layer.under_hooks = streams, 0, under_hooks


def _has_saved_tensor_hooks() -> bool:
    """Return whether hooks on the tensors that autograd saves are in use: torch fails to switch such hooks off."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True
