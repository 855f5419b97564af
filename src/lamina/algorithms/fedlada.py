"""FedLADA: local AMSGrad, amended by the mean step of the previous round; the second moment is averaged.

Sun et al. 2023, "Efficient federated learning via local adaptive amended optimizer with linear speedup",
https://arxiv.org/abs/2308.00522, Algorithm 3. "l.8" is a line of it; y is its x_{i,tau}, psi its m * theta; lines 1 to
4, 6, 7, 13 and 15 are the engine's. "B1" is an entry in the list of choices where the text is ambiguous, or where
public codes differ: docs/reference/algorithms.md. By default weight decay is on, as in the paper's experiments but not
in Algorithm 3 (B10: `decay=0` is Algorithm 3), clients take K steps (B2), v starts from the server's (B3), and g_a of
line 18 is broadcast, too (B6). contract.py explains functions without a docstring. localadam.py and fedlada_lamb.py
build on this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Analysis, ClientInfo, Nothing, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.primitives import (
    add_decoupled,
    add_l2,
    corrected,
    descend,
    ema,
    next_weight,
    precondition,
    refuse_dead_moments,
)  # fmt: skip
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the second moment and the mean amended step of the previous round; all three are broadcast (B6)."""

    x: Tensor
    v: Tensor
    g_a: Tensor


class Local(NamedTuple):
    """The local model and AMSGrad's moments; a field that the options do not use is None."""

    y: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor  # the running maximum of v; v itself without `amsgrad`
    m_weight: Tensor | None = None  # 1 - beta1^k: the weight of the gradients in m; the rest is its start (B21)
    v_weight: Tensor | None = None
    alpha: Tensor | None = None  # FedLADA: the weight of the local direction in this round (B22)
    ratio: Tensor | None = None  # layer-wise methods: the trust ratio of every layer in the last step


class Up(NamedTuple):
    """The displacement, the running maximum of v and, with ``amendment="per_client"``, the client's mean step (B9)."""

    delta: Tensor
    v_hat: Tensor
    mean_step: Tensor | None


@dataclass(frozen=True, eq=False)
class LocalAms(Algorithm):
    """Lines 5 and 8 to 11, which LocalAdam shares: AMSGrad from a zero momentum and the server's second moment."""

    non_negative = ("v_hat",)
    references: ClassVar = {"v_hat": "v"}

    beta1: Number = option(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = option(0.99, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = option(1e-16, "v^0 = epsilon_v^2, the second moment before round 1 (B4)", low=0.0)
    v_seed: Literal["server", "zero"] = option("server", "v_{i,0}: the server's v, or 0 (B3)")
    amsgrad: bool = option(True, "divide by the running maximum of v, or by v itself (B19)")
    eps: Number = option(0.0, "added to the root of v_hat (B20)", low=0.0)
    moment_correction: Literal["none", "m", "first_round"] = option(
        "none", "in step k divide m by 1 - beta_1^k in every round; or both moments by 1 - beta^k in round 1 (B21)"
    )
    server_lr: Number = option(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    decay: Number = option(1e-2, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = option("l2", "where the decay acts (B10)")

    def check(self) -> None:
        super().check()
        refuse_dead_moments(self, self.eps)

    def initial_moments(self, x: Tensor, v_server: Tensor, round: int) -> Local:
        """Return the local state before the first step (l.5)."""
        v = v_server if self.v_seed == "server" else zeros(x)  # B3
        local = Local(x, m=zeros(x), v=v, v_hat=v_server)
        if self.moment_correction == "m":
            return local._replace(m_weight=per_client(x))
        if self.moment_correction == "first_round":
            weight = per_client(x, float(round > 1))  # 1 stays 1: nothing is corrected after round 1
            return local._replace(m_weight=weight, v_weight=weight)
        return local

    def next_moments(self, local: Local, grad: Tensor) -> tuple[Local, Tensor]:
        """Return the local state with the moments after a gradient, and the adaptive direction m / sqrt(v_hat)."""
        g = add_l2(grad, local.y, self)  # adds lambda * y, if decay_form is "l2" (B10)
        m = ema(local.m, g, self.beta1)  # l.8
        v = ema(local.v, g * g, self.beta2)  # l.9
        v_hat = torch.maximum(local.v_hat, v) if self.amsgrad else v  # l.10; public codes drop the maximum (B19)
        # without `moment_correction` the weights are None, and nothing is corrected (B21)
        m_weight, v_weight = next_weight(local.m_weight, self.beta1), next_weight(local.v_weight, self.beta2)
        psi = precondition(corrected(m, m_weight), corrected(v_hat, v_weight), self.eps)  # l.11: m / sqrt(v_hat)
        return local._replace(m=m, v=v, v_hat=v_hat, m_weight=m_weight, v_weight=v_weight), psi


@algorithm(
    "fedlada",
    title="FedLADA",
    reference="Sun et al. 2023, Alg. 3",
    link="https://arxiv.org/abs/2308.00522",
    lr=1e-3,
    paper_cost=2,
    presets={
        "cifar10": {"alpha": 0.1},
        "cifar100": {"alpha": 0.05},
        "tinyimagenet": {"alpha": 0.05},
        "fedbrew": {"decay": 0.0, "amendment": "per_client"},  # the FedLADA of the framework fedbrew
        "fedadamw_vision": {  # the FedLADA baseline in FedAdamW's vision code: torch's Adam
            "alpha": 0.1, "beta2": 0.999, "v_init": 0.0, "amsgrad": False, "eps": 1e-8,
            "moment_correction": "first_round", "decay": 1e-3,
        },
    },
    grids={"lada-alpha": {"alpha": [0.01, 0.05, 0.1, 0.2, 0.5, 1.0]}},  # the paper's Table 5
)  # fmt: skip
class FedLada(LocalAms):
    """Local AMSGrad mixed with the global direction."""

    alpha: Number = option(
        0.1, "alpha, weight of the local adaptive step; 1 is LocalAdam", low=0.0, high=1.0, open_low=True
    )
    amendment: Literal["mean_steps", "per_client"] = option(
        "mean_steps", "unequal K_i: divide by mean K, or by own K_i (B9)"
    )
    ga_correction: bool = option(False, "correct the start of g_a: alpha / (1 - (1 - alpha)^r) for alpha (B22)")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v=zeros(x) + self.v_init, g_a=zeros(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        local = self.initial_moments(down.x, down.v, info.round)  # l.5
        return local._replace(alpha=self.corrected_alpha(down.x, info.round))

    def corrected_alpha(self, x: Tensor, round: int) -> Tensor | None:
        """Return alpha_r = alpha / (1 - (1 - alpha)^r), one number per client; None without `ga_correction` (B22)."""
        if not self.ga_correction:
            return None
        alpha = per_client(x, self.alpha)
        return alpha / -torch.expm1(round * torch.log1p(-alpha))  # also exact for small alpha

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)  # l.8-11, above
        adaptive, ratio = self.rescale(psi, local.y, layers)  # psi as it is; FedLADA-LAMB rescales it
        alpha = self.alpha if local.alpha is None else local.alpha  # B22
        direction = ema(down.g_a, adaptive, 1 - alpha)  # l.12: alpha * adaptive + (1 - alpha) * g_a
        return after._replace(y=descend(local.y, add_decoupled(direction, local.y, self), lr), ratio=ratio)  # l.12

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the local direction as it is, and no ratios."""
        return psi, None

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        delta = local.y - down.x
        mean_step = -delta / (info.lr * info.steps) if self.amendment == "per_client" else None  # B9
        return Up(delta, local.v_hat, mean_step), client  # l.14, with the opposite sign

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        # `up` is the mean over the round's clients: up.v_hat is that of l.16
        x = server.x + self.server_lr * up.delta  # l.17
        g_a = -up.delta / (info.lr * info.mean_steps) if up.mean_step is None else up.mean_step  # l.18: eta_g cancels
        return Server(x, v=up.v_hat, g_a=g_a)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        z = (server.x - (1 - self.alpha) * previous.x) / self.alpha  # the paper's eq. 16
        return Analysis(z, amendment=server.g_a, second_moment=server.v)
