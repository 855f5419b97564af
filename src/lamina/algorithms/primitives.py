"""Formulas that several algorithms share."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lamina.algorithms.contract import Number
from lamina.base.errors import BadInput


def ema(old: Tensor, new: Tensor, beta: Number) -> Tensor:
    """Return the exponential moving average beta * old + (1 - beta) * new."""
    return torch.lerp(old, new, 1 - beta)  # one pass over memory instead of three


def precondition(m: Tensor, v: Tensor, eps: Number = 0.0) -> Tensor:
    """Return m / (sqrt(v) + eps), and 0 where that would divide by zero."""
    root = v.sqrt() if is_exactly(eps, 0) else v.sqrt() + eps
    return m / F.threshold(root, 0.0, math.inf)  # several times as fast on a CPU as torch.where; a NaN stays a NaN


def square_less_noise(mean: Tensor, variance: Number) -> Tensor:
    """Return max(mean^2 - variance, 0), the square of a mean less the variance of the noise on it, 0 without noise."""
    return mean**2 if is_exactly(variance, 0) else (mean**2 - variance).clamp(min=0)


@overload
def next_weight(weight: Tensor, beta: Number) -> Tensor: ...
@overload
def next_weight(weight: None, beta: Number) -> None: ...
def next_weight(weight: Tensor | None, beta: Number) -> Tensor | None:
    """Return the weight of gradients in a moment after one more: the moment's own recursion with g = 1 (B21)."""
    return None if weight is None else beta * weight + (1 - beta)


def corrected(moment: Tensor, weight: Tensor | None) -> Tensor:
    """Return the moment divided by the weight of gradients in it; a moment that has seen none stays as it is (B21)."""
    return moment if weight is None else moment / torch.where(weight > 0, weight, 1.0)


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


def refuse_dead_moments(options: Any, *added: Number) -> None:
    """Refuse decay rates with which nothing is learned. `added` are the terms beside v in the divisor."""
    refuse_dead_momentum(options)
    if is_exactly(options.beta2, 1) and all(is_exactly(value, 0) for value in (options.v_init, *added)):
        raise BadInput(
            "beta2 = 1 keeps the second moment at v_init = 0, so nothing is learned: choose beta2 < 1 or v_init > 0"
        )


def refuse_dead_momentum(options: Any) -> None:
    """Refuse beta1 = 1."""
    if is_exactly(options.beta1, 1):
        raise BadInput("beta1 = 1 never lets a gradient into the momentum, so nothing is learned: choose beta1 < 1")


def refuse_zero_divisor(options: Any, when: str = "in round 1") -> None:
    """Refuse v_init = 0 if some round divides by it: nothing would move."""
    if is_exactly(options.v_init, 0) and is_exactly(options.eps, 0):
        raise BadInput(f"v_init = 0 leaves nothing to divide by {when}: give v_init or eps a positive value")
