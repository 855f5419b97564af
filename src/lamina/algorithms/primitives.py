"""The few formulas that several algorithms share word for word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lamina.algorithms.contract import Info, Number, hyper
from lamina.errors import BadInput
from lamina.layers import Grouping, Layers


class HasDecay(Protocol):
    """The weight-decay options every algorithm has: lambda and where it acts (its form is always explicit)."""

    @property
    def decay(self) -> Number: ...
    @property
    def decay_form(self) -> Any: ...


def ema(old: Tensor, new: Tensor, beta: Number) -> Tensor:
    """Exponential moving average with decay rate beta: beta * old + (1 - beta) * new."""
    return beta * old + (1 - beta) * new


def precondition(m: Tensor, v: Tensor, eps: Number = 0.0) -> Tensor:
    """m / (sqrt(v) + eps), and 0 where that would divide by zero."""
    root = v.sqrt() + eps
    return torch.where(root == 0, 0.0, m / root)  # a NaN stays a NaN


def amsgrad(
    m: Tensor, v: Tensor, v_hat: Tensor, g: Tensor, beta1: Number, beta2: Number
) -> tuple[Tensor, Tensor, Tensor]:
    """One AMSGrad update of the moments (m, v, v_hat), without bias correction."""
    m = ema(m, g, beta1)
    v = ema(v, g * g, beta2)
    return m, v, torch.maximum(v_hat, v)


def refuse_still_momentum(beta1: Number) -> None:
    """Refuse beta1 = 1: the momentum would keep its first value, and nothing would be learned."""
    if not isinstance(beta1, Tensor) and beta1 == 1:
        raise BadInput("beta1 = 1 never lets a gradient into the momentum, so nothing is learned: choose beta1 < 1")


def refuse_uncorrectable(beta2: Number) -> None:
    """Refuse beta2 = 1 with bias correction, which would divide by 1 - beta2^t = 0."""
    if not isinstance(beta2, Tensor) and beta2 == 1:
        raise BadInput("bias_correction divides by 1 - beta2^t, which is 0 for beta2 = 1: choose beta2 < 1")


def refuse_zero_moment(beta2: Number, v_init: Number, *added: Number) -> None:
    """Refuse a second moment that is 0 for good, if nothing is added to its root: no step would be taken."""
    if any(isinstance(value, Tensor) for value in (beta2, v_init, *added)):
        return
    if beta2 == 1 and v_init == 0 and not any(added):
        raise BadInput(
            "beta2 = 1 keeps the second moment at v_init = 0, so nothing is learned: choose beta2 < 1 or v_init > 0"
        )


@dataclass(frozen=True, eq=False)
class AdamOptions:
    """The options of Adam on the server."""

    beta1: Number = hyper(0.9, "beta_1, decay rate of the server's momentum", low=0.0, high=1.0)
    beta2: Number = hyper(0.99, "beta_2, decay rate of the server's second moment", low=0.0, high=1.0)
    tau: Number = hyper(1e-3, "tau, added to the root of v", low=0.0)
    v_init: Number = hyper(1e-6, "v_0, the second moment before round 1", low=0.0)
    root_eps: Number = hyper(0.0, "added to v under the root", low=0.0)
    amsgrad: bool = hyper(False, "divide by the running maximum of v")
    bias_correction: bool = hyper(False, "divide copies of m and v by 1 - beta^r")
    server_lr: Number = hyper(0.01, "eta_g, the server's step size", low=0.0, open_low=True)

    def check(self) -> None:
        """Refuse decay rates that leave the model where it is."""
        refuse_still_momentum(self.beta1)
        if self.bias_correction:
            refuse_uncorrectable(self.beta2)
        refuse_zero_moment(self.beta2, self.v_init, self.tau, self.root_eps)


def server_adam(
    m: Tensor, v: Tensor, v_hat: Tensor | None, delta: Tensor, h: AdamOptions, round: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One step of Adam on the mean displacement: the direction to add to x, and the new m, v and v_hat."""
    m = ema(m, delta, h.beta1)
    v = ema(v, delta**2, h.beta2)
    v_hat = None if v_hat is None else torch.maximum(v_hat, v)
    m_used, v_used = m, v if v_hat is None else v_hat
    if h.bias_correction:
        m_used, v_used = m / (1 - h.beta1**round), v_used / (1 - h.beta2**round)
    return precondition(m_used, v_used + h.root_eps, h.tau), m, v, v_hat


def add_l2(grad: Tensor, y: Tensor, h: HasDecay) -> Tensor:
    """Weight decay as an L2 term of the objective: g + lambda * y, before the moments."""
    return grad + h.decay * y if h.decay_form == "l2" and _is_on(h.decay) else grad


def descend(y: Tensor, direction: Tensor, lr: Number, h: HasDecay) -> Tensor:
    """y - lr * direction, with decoupled weight decay (- lr * lambda * y) if that form is chosen."""
    if h.decay_form == "decoupled" and _is_on(h.decay):
        direction = direction + h.decay * y
    if isinstance(lr, Tensor):
        return y - lr * direction
    out = direction if direction is _used_up else None
    return torch.sub(y, direction, alpha=lr, out=out)  # one pass over memory instead of two


_used_up: Tensor | None = None


@contextmanager
def using_up(grad: Tensor) -> Iterator[None]:
    """For engines on a CPU: nobody needs this gradient after the step, so `descend` may put its result in its place.

    New memory must be fetched before it is written: plain SGD on many clients takes a fifth longer with it.
    """
    global _used_up
    _used_up = grad
    try:
        yield
    finally:
        _used_up = None


def clip_by_norm(u: Tensor, limit: Number) -> Tensor:
    """Scale u down to Euclidean norm `limit` if it is longer."""
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return torch.where(norm > limit, u * (limit / norm), u)


@dataclass(frozen=True, eq=False)
class LayerwiseOptions:
    """The options of the layer-wise step (register A10 to A12)."""

    trust_ratio: bool = hyper(True, "normalise the step layer by layer")
    phi_min: Number = hyper(1e-2, "floor of phi (A10)", low=0.0)
    phi_max: Number = hyper(float("inf"), "ceiling of phi (A10)", low=0.0, open_low=True)
    zero_norm: Literal["floor", "lamb", "literal"] = hyper(
        "floor", "a layer of norm 0: floor phi at phi_min; or no floor, and ratio 1 or no step (A10)"
    )
    layers: Grouping = hyper("tensor", "what a layer is (A11)")
    decay: Number = hyper(0.0, "lambda, weight decay; the paper tunes it over 0, 0.01, 0.1", low=0.0)
    decay_form: Literal["ratio", "l2", "decoupled"] = hyper(
        "ratio", "where the decay acts; ratio: inside the normalised step"
    )
    decay_on: Literal["all", "matrices"] = hyper("all", "tensors that decay under form 'ratio' (A12)")

    def check(self) -> None:
        """Refuse a floor of phi above its ceiling."""
        if (
            not isinstance(self.phi_min, Tensor)
            and not isinstance(self.phi_max, Tensor)
            and self.phi_min > self.phi_max
        ):
            raise BadInput(f"phi_min = {self.phi_min:g} is above phi_max = {self.phi_max:g}")
        if self.decay_on != "all" and self.decay_form != "ratio":
            raise BadInput(f"decay_on = '{self.decay_on}' acts only with decay_form = 'ratio'")


def trust_ratio(y: Tensor, u: Tensor, h: LayerwiseOptions, layers: Layers) -> Tensor:
    """phi(||y||) / ||u|| for every layer: [..., number of layers].

    phi is the identity, cut at `phi_max`. A zero-initialised tensor has ||y|| = 0 and would never
    move under the paper's text (``zero_norm="literal"``); the LAMB codes then take the ratio 1
    (``"lamb"``); the default floors phi at `phi_min`, as Assumption 4.4 asks (A10). ||u|| = 0: no step.
    """
    y_norm, u_norm = layers.norms(y, h.layers), layers.norms(u, h.layers)
    phi = y_norm.clamp(max=h.phi_max) if isinstance(h.phi_max, float | int) else torch.minimum(y_norm, h.phi_max)
    if h.zero_norm == "floor":
        phi = phi.clamp(min=h.phi_min) if isinstance(h.phi_min, float | int) else torch.maximum(phi, h.phi_min)
    ratio = torch.where(u_norm > 0, phi / u_norm, 0.0)
    if h.zero_norm == "lamb":
        ratio = torch.where((y_norm > 0) & (u_norm > 0), ratio, 1.0)
    return ratio


def add_ratio_decay(psi: Tensor, y: Tensor, h: LayerwiseOptions, layers: Layers) -> Tensor:
    """psi + lambda * y, the update that is then normalised (form "ratio"), on all tensors or on matrices only (A12)."""
    if h.decay_form != "ratio" or not _is_on(h.decay):
        return psi
    decay = h.decay if h.decay_on == "all" else h.decay * layers.matrix_mask(y)
    return psi + decay * y


def layerwise(y: Tensor, u: Tensor, h: LayerwiseOptions, layers: Layers) -> tuple[Tensor, Tensor | None]:
    """Return the update with every layer rescaled to length phi(||y||), and the ratio of each element's layer.

    With the trust ratio off the update is as it is, without a ratio.
    """
    if not h.trust_ratio:
        return u, None
    ratio = layers.spread(trust_ratio(y, u, h, layers), h.layers)
    return ratio * u, ratio


def begin_ratio(x: Tensor, h: LayerwiseOptions, info: Info) -> Tensor | None:
    """Return what a `Local` keeps its trust ratios in before the first step; None if nobody asks for them."""
    return torch.zeros_like(x) if info.record_trust_ratios and h.trust_ratio else None


def keep_ratio(old: Tensor | None, ratio: Tensor | None) -> Tensor | None:
    """Return the ratio of the step just taken, if ratios are recorded."""
    return None if old is None else ratio


def _is_on(value: Number) -> bool:
    """Whether a hyper-parameter does anything: a plain 0 is skipped, so that it costs nothing."""
    return isinstance(value, Tensor) or value != 0
