"""FedLADA: local AMSGrad, amended by the mean step of the previous round; the second moment is averaged.

Sun et al. 2023, "Efficient federated learning via local adaptive amended optimizer with linear speedup",
Algorithm 3 ("l." below), read as in B1 to B10: K steps, v seeded from the server, g_a of line 18 broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, ClientInfo, Nothing, Number, ServerInfo, algorithm, hyper, zeros
from lamina.algorithms.localadam import Local, LocalAms
from lamina.algorithms.primitives import add_decoupled, add_l2, amsgrad, descend, precondition
from lamina.layers import Layers


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
    presets={"cifar10": {"alpha": 0.1}, "cifar100": {"alpha": 0.05}, "tinyimagenet": {"alpha": 0.05}},
)
class FedLada(LocalAms):
    """Local AMSGrad mixed with the global direction."""

    alpha: Number = hyper(
        0.1, "alpha, weight of the local adaptive step; 1 is LocalAdam", low=0.0, high=1.0, open_low=True
    )
    amendment: Literal["mean_steps", "per_client"] = hyper(
        "mean_steps", "unequal K_i: divide by mean K, or by own K_i (B9)"
    )

    def init(self, x: Tensor, layers: Layers) -> Server:
        return Server(x, v=zeros(x) + self.v_init, g_a=zeros(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        return self.first_moments(down.x, down.v)  # l.5

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_l2(grad, local.y, self)
        m, v, v_hat = amsgrad(local.m, local.v, local.v_hat, g, self.beta1, self.beta2)  # l.8-10
        own, ratio = self.rescale(precondition(m, v_hat), local.y, layers)  # l.11
        direction = self.alpha * own + (1 - self.alpha) * down.g_a  # l.12
        return Local(descend(local.y, add_decoupled(direction, local.y, self), lr), m, v, v_hat, ratio)

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the local direction, here as it is. FedLADA-LAMB rescales it and returns the ratios, too."""
        return psi, None

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        delta = local.y - down.x
        mean_step = -delta / (info.lr * info.steps) if self.amendment == "per_client" else None  # B9
        return Up(delta, local.v_hat, mean_step), client  # l.14

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        x = server.x + self.server_lr * up.delta  # l.17
        mean_step = -up.delta / (info.lr * info.mean_steps) if up.mean_step is None else up.mean_step
        return Server(x, v=up.v_hat, g_a=mean_step)  # l.16; l.18, where eta_g cancels

    def inherited_moments(self, down: Server, info: ClientInfo) -> Mapping[str, Tensor]:
        return {"v_hat": down.v}  # the running maximum starts from it

    def implied_fields(self, up: Up, down: Server, info: ClientInfo) -> Mapping[str, Tensor]:
        return {} if up.mean_step is None else {"mean_step": -up.delta / (info.lr * info.steps)}  # B9

    def inherited_step(self, down: Server, info: ClientInfo) -> Tensor | None:
        return -info.lr * info.steps * (1 - self.alpha) * down.g_a

    def analysis(self, server: Server, previous: Server) -> Analysis:
        z = (server.x - (1 - self.alpha) * previous.x) / self.alpha  # eq. 16
        return Analysis(z, amendment=server.g_a, second_moment=server.v)
