"""Formulas that several algorithms share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.base.errors import BadInput


def ema(old: Tensor, new: Tensor, beta: Number) -> Tensor:
    """Return the exponential moving average beta * old + (1 - beta) * new."""
    return beta * old + (1 - beta) * new


def precondition(m: Tensor, v: Tensor, eps: Number = 0.0) -> Tensor:
    """Return m / (sqrt(v) + eps), and 0 where that would divide by zero."""
    root = v.sqrt() + eps
    return torch.where(root == 0, 0.0, m / root)  # a NaN stays a NaN


def next_share(share: Tensor | None, beta: Number) -> Tensor | None:
    """Return the share of gradients in a moment after one more gradient: the moment's own recursion with g = 1 (A6).

    Bias correction divides a copy of a moment by the fraction of it that comes from gradients, as opposed to its
    initial value. A moment that started afresh and saw t gradients has the share 1 - beta^t. One that was averaged over
    clients, sent, maximised or restarted has no such t, but its share goes through the same operations.
    """
    return None if share is None else beta * share + (1 - beta)


def corrected(moment: Tensor, share: Tensor | None) -> Tensor:
    """Return the moment divided by its share; an initial value, which has seen no gradient, stays as it is (A6)."""
    return moment if share is None else moment / torch.where(share > 0, share, 1.0)


def is_exactly(option: Number, value: float) -> bool:
    """Return whether an option is this number, so that its term can be skipped; a tensor of several runs never is."""
    return not isinstance(option, Tensor) and option == value


def add_decay(u: Tensor, y: Tensor, decay: Number) -> Tensor:
    """Return u + decay * y."""
    return u if is_exactly(decay, 0) else u + decay * y


def add_l2(grad: Tensor, y: Tensor, options: Any) -> Tensor:
    """Add the decay to the gradient, before the moments, if the algorithm's `decay_form` is "l2"."""
    return add_decay(grad, y, options.decay) if options.decay_form == "l2" else grad


def add_decoupled(direction: Tensor, y: Tensor, options: Any) -> Tensor:
    """Add the decay to the final direction of a step, if the algorithm's `decay_form` is "decoupled"."""
    return add_decay(direction, y, options.decay) if options.decay_form == "decoupled" else direction


def descend(y: Tensor, direction: Tensor, lr: Number) -> Tensor:
    """Return y - lr * direction."""
    if isinstance(lr, Tensor):
        return y - lr * direction
    return torch.sub(y, direction, alpha=lr)  # one pass over memory instead of two


def clip_by_norm(u: Tensor, limit: Number) -> Tensor:
    """Scale u down to Euclidean norm `limit` if it is longer."""
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return torch.where(norm > limit, u * (limit / norm), u)


def first_of(one: Tensor | None, other: Tensor | None) -> Tensor:
    """Return `one`, or `other` if `one` is None."""
    tensor = other if one is None else one
    assert tensor is not None
    return tensor


def larger(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the elementwise maximum, or None if either is None."""
    return None if one is None or other is None else torch.maximum(one, other)


def refuse_dead_moments(options: Any, *added: Number) -> None:
    """Refuse decay rates with which nothing is learned. `added` are the terms beside v in the divisor."""
    if is_exactly(options.beta1, 1):
        raise BadInput("beta1 = 1 never lets a gradient into the momentum, so nothing is learned: choose beta1 < 1")
    if is_exactly(options.beta2, 1) and all(is_exactly(value, 0) for value in (options.v_init, *added)):
        raise BadInput(
            "beta2 = 1 keeps the second moment at v_init = 0, so nothing is learned: choose beta2 < 1 or v_init > 0"
        )


def refuse_uncorrectable(options: Any) -> None:
    """Refuse beta2 = 1 with bias correction, which would divide by 1 - beta2^t = 0."""
    if options.bias_correction and is_exactly(options.beta2, 1):
        raise BadInput("bias_correction divides by 1 - beta2^t, which is 0 for beta2 = 1: choose beta2 < 1")
