"""FedAdamW: Local AdamW that starts from the clients' mean second moment and follows the global direction.

Liu et al. 2025, "FedAdamW: a communication-efficient optimizer with convergence and generalization guarantees for
federated large models". Its full text was not at hand: this follows third-party transcriptions and the authors' code.
"C1" is an entry in the list of choices: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Analysis, ClientInfo, Nothing, Number, ServerInfo, per_client, per_layer, zeros
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.localadamw import Local, LocalAdamW
from lamina.algorithms.primitives import add_decay, descend, is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Grouping, Layers


class Server(NamedTuple):
    """The model, the mean step of the previous round, the second moment and the number of local steps; all are sent."""

    x: Tensor
    g_a: Tensor  # a descent direction, as the steps
    v: Tensor | None  # one number per layer, or a vector
    steps: Tensor  # t: the sum of the mean K_i


class Up(NamedTuple):
    """The displacement and the second moment at the end: its mean over every layer, or the vector."""

    delta: Tensor
    v: Tensor | None


@algorithm(
    "fedadamw",
    title="FedAdamW",
    reference="Liu et al. 2025",
    link="https://arxiv.org/abs/2510.27486",
    lr=3e-4,
    presets={
        "vision": {"v_sync": "full", "m_correction": "global"},  # the authors' code for images (C1, C4)
        "language": {"alpha": 0.9, "local_weight": "complement", "m_correction": "global"},  # and for texts (C3)
    },
)
class FedAdamW(LocalAdamW):
    """AdamW with a shared second moment, amended by the mean step of the previous round."""

    non_negative = ("v",)
    references: ClassVar = {"v": "v"}

    alpha: Number = option(0.5, "alpha, weight of the global direction", low=0.0, high=1.0)
    v_sync: Literal["layer", "full", "none"] = option(
        "layer", "what clients send of the second moment: its mean over every layer, all of it, or nothing (C1)"
    )
    layers: Grouping = option("tensor", 'what a layer is, with v_sync "layer" (C1)')
    local_weight: Literal["one", "complement"] = option("one", "weight of the local step: 1, or 1 - alpha (C3)")
    m_correction: Literal["round", "global"] = option(
        "round", "steps by which the momentum, which starts from zero, is corrected: the round's, or all (C4)"
    )

    def check(self) -> None:
        """Refuse a step without the client's own direction."""
        super().check()
        if self.local_weight == "complement" and is_exactly(self.alpha, 1):
            raise BadInput(
                'alpha = 1 leaves out the clients\' own steps with local_weight = "complement": choose alpha < 1'
            )

    @property
    def grouping(self) -> Grouping:
        return self.layers

    def init(self, x: Tensor, layers: Layers) -> Server:
        v = {"layer": per_layer(x, layers, by=self.layers), "full": zeros(x), "none": None}[self.v_sync]
        return Server(x, g_a=zeros(x), v=v, steps=per_client(x))

    def begin(self, down: Server, client: Nothing, info: ClientInfo) -> Local:
        local = super().begin(down, client, info)
        if self.m_correction == "global":
            local = local._replace(m_weight=1 - self.beta1**down.steps)
        if down.v is None:
            return local
        v = info.layers.spread(down.v, self.layers) if self.v_sync == "layer" else down.v
        return local._replace(v=v, v_weight=1 - self.beta2**down.steps)

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, psi = self.next_moments(local, grad)
        local_part = psi if self.local_weight == "one" else (1 - self.alpha) * psi
        direction = add_decay(local_part + self.alpha * down.g_a, local.y, self.decay)  # + lambda y (C2)
        return after._replace(y=descend(local.y, direction, lr))

    def finish(self, local: Local, down: Server, client: Nothing, info: ClientInfo) -> tuple[Up, Nothing]:
        if self.v_sync == "none":
            return Up(local.y - down.x, None), client
        v = info.layers.means(local.v, self.layers) if self.v_sync == "layer" else local.v
        return Up(local.y - down.x, v), client

    def update(self, server: Server, up: Any, info: ServerInfo) -> Server:
        g_a = -up.delta / (info.lr * info.mean_steps)  # by the mean K_i (C6)
        return Server(server.x + self.server_lr * up.delta, g_a, up.v, server.steps + info.mean_steps)

    def analysis(self, server: Server, previous: Server) -> Analysis:
        return Analysis(server.x, amendment=server.g_a)
