"""Dropout that a module's forward calls as a function, `F.dropout` and its kin, with masks from the clients' streams.

Attention calls it so in Hugging Face's `transformers`, and many modules do; `Tensor.bernoulli_` is how timm and
torchvision drop whole samples from a residual block (DropPath, stochastic depth). A `TorchFunctionMode` around the
forward pass sees these calls. All calls of a pass together draw as one more dropout layer that is called several times.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from lamina.objective.dropout import LAYERS, FromStreams, additive_mask

# the layer that computes the same as a function, and whether the function drops unless `training` is given
FUNCTIONS: dict[Any, tuple[type[nn.Module], bool]] = {
    F.dropout: (nn.Dropout, True),
    torch.dropout: (nn.Dropout, True),
    F.dropout1d: (nn.Dropout1d, True),
    F.dropout2d: (nn.Dropout2d, True),
    F.dropout3d: (nn.Dropout3d, True),
    F.alpha_dropout: (nn.AlphaDropout, False),
    F.feature_alpha_dropout: (nn.FeatureAlphaDropout, False),
}


class FunctionalDropout(FromStreams, TorchFunctionMode):
    """A context in which functions that drop elements draw their masks from streams.

    The first forward pass in training mode shows whether a module calls such a function. If it does not, later passes
    run without the context, whose cost is a Python call per operation.
    """

    is_called: bool | None = None  # by the module; None: not known yet

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # after the module's dropout layers

    def in_training(self, train: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass; evaluation is left to torch."""
        return self if train and self.is_called is not False else contextlib.nullcontext()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None and self.is_called is None:
            self.is_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attends, flips = func is F.scaled_dot_product_attention, func is Tensor.bernoulli_
        if not (attends or flips or func in FUNCTIONS) or self.is_left_to_torch(*args, *kwargs.values()):
            return func(*args, **kwargs)
        if flips:
            return self._flip_coins(*args, **kwargs)
        return self._attend(*args, **kwargs) if attends else self._drop(func, *args, **kwargs)

    def _drop(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        *,
        train: bool | None = None,  # the name that `torch.dropout` gives it
    ) -> Tensor:
        """Return what a layer does in place of the function."""
        kind, drops = FUNCTIONS[func]
        given = training if train is None else train
        if not (drops if given is None else given) or p == 0:
            unchanged: Tensor = func(input, p, False)
            return unchanged
        layer: Any = LAYERS[kind](float(p), inplace)  # type: ignore[call-arg]
        layer.streams, layer.under_hooks = self.streams, self.under_hooks
        layer.number, layer.calls = self.number, self.calls
        self.calls, self.is_called = self.calls + 1, True
        dropped: Tensor = layer(input)
        return dropped

    def _flip_coins(self, input: Tensor, p: float | Tensor = 0.5, *, generator: Any = None) -> Tensor:
        """Fill a tensor, whose first axis holds the samples, with ones of probability p and zeros."""
        if isinstance(p, Tensor) or generator is not None:
            return input.bernoulli_(p, generator=generator)
        self.is_called = True
        return input.copy_(self.kept(input.shape, 1 - p))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention written out, if it drops weights."""
        is_opaque = type(attn_mask).__module__ == "torch.nn.attention.bias"  # importing its classes takes a second
        if dropout_p == 0 or is_opaque or (is_causal and attn_mask is not None):  # torch refuses two masks
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:  # every head of a key or value serves several heads of the query
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is None:
            weights = scores.softmax(-1)
        else:  # True marks what a query may see; one that sees nothing gets zeros
            scores = scores + additive_mask(~attn_mask if attn_mask.dtype == torch.bool else attn_mask, scores.dtype)
            is_blind = (scores == float("-inf")).all(-1, keepdim=True)
            weights = scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
        return self._drop(F.dropout, weights, dropout_p) @ value
