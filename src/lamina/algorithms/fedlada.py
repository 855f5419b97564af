"""FedLADA: local AMSGrad, amended by the mean step of the previous round; the second moment is averaged.

Sun et al. 2023, "Efficient federated learning via local adaptive amended optimizer with linear speedup",
Algorithm 3 ("l." below), read as in B1 to B10: K steps, v seeded from the server, g_a of line 18 broadcast. The options
B19 to B22 are choices of public FedLADA codes, and one of ours: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import (
    Analysis,
    ClientInfo,
    Nothing,
    Number,
    ServerInfo,
    algorithm,
    hyper,
    per_client,
    zeros,
)
from lamina.algorithms.localadam import Local, LocalAms
from lamina.algorithms.primitives import add_decoupled, descend
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the second moment and the mean amended step of the previous round; all three are broadcast (B6)."""

    x: Tensor
    v: Tensor
    g_a: Tensor


class Up(NamedTuple):
    """The displacement, the running maximum of v and, with ``amendment="per_client"``, the client's mean step (B9)."""

    delta: Tensor
    v_hat: Tensor
    mean_step: Tensor | None


@algorithm(
    "fedlada",
    title="FedLADA",
    reference="Sun et al. 2023, Alg. 3",
    lr=1e-3,
    paper_cost=2,
    presets={
        "cifar10": {"alpha": 0.1},
        "cifar100": {"alpha": 0.05},
        "tinyimagenet": {"alpha": 0.05},
        "fedbrew": {"decay": 0.0, "amendment": "per_client"},  # the FedLADA of the framework fedbrew
        "fedadamw_vision": {  # the FedLADA baseline in FedAdamW's vision code: torch's Adam, its counter at 10^6
            "alpha": 0.1, "beta2": 0.999, "v_init": 0.0, "amsgrad": False, "eps": 1e-8,
            "moment_correction": "first_round", "decay": 1e-3,
        },
    },
    grids={"lada-alpha": {"alpha": [0.01, 0.05, 0.1, 0.2, 0.5, 1.0]}},  # the paper's Table 5
)  # fmt: skip
class FedLada(LocalAms):
    """Local AMSGrad mixed with the global direction."""

    alpha: Number = hyper(
        0.1, "alpha, weight of the local adaptive step; 1 is LocalAdam", low=0.0, high=1.0, open_low=True
    )
    amendment: Literal["mean_steps", "per_client"] = hyper(
        "mean_steps", "unequal K_i: divide by mean K, or by own K_i (B9)"
    )
    ga_correction: bool = hyper(False, "correct the start of g_a: alpha / (1 - (1 - alpha)^r) for alpha (B22)")

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v=zeros(x) + self.v_init, g_a=zeros(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        local = self.first_moments(down.x, down.v, info.round)  # l.5
        return local._replace(alpha=self.corrected_alpha(down.x, info.round))

    def corrected_alpha(self, x: Tensor, round: int) -> Tensor | None:
        """Return alpha_r = alpha / (1 - (1 - alpha)^r), one number per client; None without `ga_correction` (B22).

        The directions of all rounds then enter g_a with weights whose sum is 1, and alpha_1 = 1.
        """
        if not self.ga_correction:
            return None
        alpha = per_client(x, self.alpha)
        return alpha / -torch.expm1(round * torch.log1p(-alpha))  # exact for small alpha, too

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)  # l.8-11
        adaptive, ratio = self.rescale(psi, local.y, layers)
        alpha = self.alpha if local.alpha is None else local.alpha  # B22
        direction = alpha * adaptive + (1 - alpha) * down.g_a  # l.12
        return after._replace(y=descend(local.y, add_decoupled(direction, local.y, self), lr), ratio=ratio)

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the local direction unchanged, and no ratios; FedLADA-LAMB rescales it and returns its ratios."""
        return psi, None

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        delta = local.y - down.x
        mean_step = -delta / (info.lr * info.steps) if self.amendment == "per_client" else None  # B9
        return Up(delta, local.v_hat, mean_step), client  # l.14

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        x = server.x + self.server_lr * up.delta  # l.17
        mean_step = -up.delta / (info.lr * info.mean_steps) if up.mean_step is None else up.mean_step
        return Server(x, v=up.v_hat, g_a=mean_step)  # l.16; l.18, where eta_g cancels

    def analysis(self, server: Server, previous: Server) -> Analysis:
        z = (server.x - (1 - self.alpha) * previous.x) / self.alpha  # eq. 16
        return Analysis(z, amendment=server.g_a, second_moment=server.v)
