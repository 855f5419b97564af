"""Fed-AMS: local AMSGrad; all clients divide by the server's second moment v_hat, which is frozen within a round.

Chen, Li & Li 2020, "Toward communication efficient adaptive gradient method", as used in the Fed-LAMB paper:
Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1, without the
layer-wise step. "l.11" is a line of it. "A1" is an entry in the list of choices where the text is ambiguous:
docs/reference/algorithms.md; those of Fed-AMS are A1 to A6, A16 and A17. contract.py explains functions without a
docstring. A moment's `share` is the weight of gradients in it; bias correction divides by it (`primitives.next_share`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import (
    Algorithm,
    Analysis,
    ClientInfo,
    Number,
    ServerInfo,
    algorithm,
    hyper,
    per_client,
    zeros,
)
from lamina.algorithms.primitives import (
    add_decoupled,
    add_l2,
    corrected,
    descend,
    ema,
    first_of,
    is_exactly,
    larger,
    next_share,
    precondition,
    refuse_dead_moments,
    refuse_uncorrectable,
)  # fmt: skip
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers


class Server(NamedTuple):
    """The model, the global second moment and, with ``momentum="average"``, the mean momentum; all are broadcast."""

    x: Tensor
    v_hat: Tensor | None  # None if every client keeps its own (A17)
    m: Tensor | None
    v_share: Tensor | None  # of v_hat, with bias correction (A6)
    m_share: Tensor | None


class Client(NamedTuple):
    """What a client keeps between rounds; a field that the options do not use is None."""

    m: Tensor | None  # m_i of its last round (A5)
    m_share: Tensor | None = None
    v: Tensor | None = None  # v_i of its last round (A3, A16)
    v_share: Tensor | None = None
    v_version: Tensor | None = None  # the version of v_hat that v started from (A16)
    v_hat: Tensor | None = None  # v_hat_i, if it is not shared (A17)
    v_hat_share: Tensor | None = None


class Local(NamedTuple):
    """The local model and moments; a field that the options do not use is None."""

    y: Tensor
    m: Tensor
    m_share: Tensor | None
    v: Tensor
    v_share: Tensor | None
    v_hat: Tensor | None = None  # the local running maximum (A2), or the client's own v_hat_i (A17)
    v_hat_share: Tensor | None = None
    in_round_one: Tensor | None = None  # 1 in round 1, else 0: which v to divide by; `step` does not get the round
    ratio: Tensor | None = None  # layer-wise methods: the trust ratio of every layer in the last step


class Up(NamedTuple):
    """The displacement; v_K in rounds that synchronise; m_K with ``momentum="average"``."""

    delta: Tensor
    v: Tensor | None
    m: Tensor | None
    v_share: Tensor | None
    m_share: Tensor | None


@dataclass(frozen=True, eq=False)
class LocalMomentum(Algorithm):
    """The part that Fed-AMS and Mime share: a local momentum, divided by a second moment that may be synced lazily."""

    beta1: Number = hyper(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = hyper(0.999, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = hyper(1e-6, "epsilon, the second moment before round 1 (A4)", low=0.0)
    m_init: Number = hyper(0.0, "the momentum before a client's first step")
    eps: Number = hyper(0.0, "added to the root of v_hat (A4)", low=0.0)
    bias_correction: bool = hyper(False, "divide copies of the moments by the share of gradients in them (A6)")
    sync_every: int = hyper(1, "Z, synchronise the second moment every Z rounds (A16)", low=1)
    server_lr: Number = hyper(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    momentum: str = "carry"  # each method lists its choices

    def check(self) -> None:
        """Refuse moments that never change. Creating an algorithm calls the `check` of each of its classes."""
        refuse_dead_moments(self, self.eps)

    def refuse_zero_divisor(self, when: str = "in round 1") -> None:
        """Refuse v_init = 0 if some round divides by it: nothing would move."""
        if is_exactly(self.v_init, 0) and is_exactly(self.eps, 0):
            raise BadInput(f"v_init = 0 leaves nothing to divide by {when}: give v_init or eps a positive value")

    @property
    def cycle(self) -> int:
        return self.sync_every

    def is_sync(self, round: int) -> bool:
        """Return whether the second moment is synchronised at the end of this round (A16)."""
        return round % self.sync_every == 0

    def version(self, round: int) -> int:
        """Return how often the second moment was synchronised before this round."""
        return (round - 1) // self.sync_every

    def paper_models(self, round: int) -> int | None:
        models = super().paper_models(round)
        return models if models is None or self.is_sync(round) else models - 1  # without the second moment

    def new_share(self, x: Tensor) -> Tensor | None:
        """Return the share of a moment that has seen no gradient; None without bias correction (A6)."""
        return per_client(x) if self.bias_correction else None

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        if self.momentum != "carry":
            return Client(m=None)
        return Client(m=zeros(x) + self.m_init, m_share=self.new_share(x))  # l.2

    def first_momentum(self, down: Any, client: Client) -> tuple[Tensor, Tensor | None]:
        """Return the momentum before the first step and its share: the server's, the client's own or a new one (A5)."""
        if down.m is not None:
            return down.m, down.m_share
        if client.m is not None:
            return client.m, client.m_share
        return zeros(down.x) + self.m_init, self.new_share(down.x)

    def rescale(self, psi: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, Tensor | None]:
        """Return the direction of the step, here psi as it is. Layer-wise methods rescale it and return the ratios."""
        return psi, None

    def keep(self, local: Any) -> Client:
        """Return the client's momentum of this round, if it carries it to its next one."""
        return Client(local.m, local.m_share) if self.momentum == "carry" else Client(m=None)

    def send_momentum(self, local: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the momentum to upload and its share, if the server averages them."""
        return (local.m, local.m_share) if self.momentum == "average" else (None, None)

    def analysis(self, server: Any, previous: Any) -> Analysis:
        return Analysis(server.x, second_moment=server.v_hat)


@algorithm(
    "fedams",
    title="Fed-AMS",
    reference="Chen, Li & Li 2020",
    lr=1e-3,
    paper_cost=2,
    presets={"authors": {"m_init": 1e-8, "v_init": 1e-8, "eps": 1e-8, "first_round": "running", "v_seed": "client"}},
    grids={"lamb-paper": {"lr": [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1]}},
)
class FedAms(LocalMomentum):
    """Local AMSGrad with a shared second moment."""

    non_negative = ("v",)

    momentum: Literal["carry", "restart", "average"] = hyper(
        "carry", "m_0: the client's own of its last round, a fresh one, or the mean of all clients' (A5)"
    )
    second_moment: Literal["frozen", "running"] = hyper("frozen", "divide by v_hat, or by its running maximum (A2)")
    first_round: Literal["frozen", "running"] = hyper("frozen", "in round 1 divide by v_hat, or by the local v")
    v_seed: Literal["server", "client"] = hyper("server", "v_0: the server's v_hat, or the client's own last v (A3)")
    lazy: Literal["restart", "accumulate"] = hyper("restart", "between syncs: v_0 = v_hat, or the client's v_K (A16)")
    sync: bool = hyper(True, "share v_hat; if false, every client keeps its own v_hat_i (A17)")
    decay: Number = hyper(0.0, "lambda, weight decay", low=0.0)
    decay_form: Literal["l2", "decoupled"] = hyper("l2", "where the decay acts")

    def check(self) -> None:
        """Refuse options with which nothing would move or be corrected."""
        if self.second_moment == "frozen":
            if self.first_round == "frozen":
                self.refuse_zero_divisor()
            elif not self.sync:
                self.refuse_zero_divisor("in the first round of a client that joins after round 1")
            elif self.sync_every > 1:
                self.refuse_zero_divisor(f"from round 2 until v_hat is synchronised after round {self.sync_every}")
        refuse_uncorrectable(self)
        if not self.sync and self.sync_every > 1:
            raise BadInput(f"sync_every = {self.sync_every} acts only with sync = true: leave it out")

    def is_sync(self, round: int) -> bool:
        return self.sync and super().is_sync(round)

    @property
    def accumulates(self) -> bool:
        """Whether a client continues its own v between two synchronisations (A16)."""
        return self.v_seed == "server" and self.lazy == "accumulate" and self.sync_every > 1

    def init(self, x: Tensor, layers: Layers) -> Server:
        v_hat, share = zeros(x) + self.v_init, self.new_share(x)  # l.2
        m, m_share = (zeros(x) + self.m_init, share) if self.momentum == "average" else (None, None)
        return Server(x, v_hat, m, share, m_share) if self.sync else Server(x, None, m, None, m_share)

    def client_init(self, x: Tensor, layers: Layers) -> Client:
        client = super().client_init(x, layers)
        if self.v_seed == "client" or self.accumulates:
            client = client._replace(v=zeros(x) + self.v_init, v_share=self.new_share(x))
        if not self.sync:  # A17
            client = client._replace(v_hat=zeros(x) + self.v_init, v_hat_share=self.new_share(x))
        return client._replace(v_version=per_client(x, -1.0) if self.accumulates else None)

    def begin(self, down: Server, client: Client, info: ClientInfo) -> Local:
        v_hat = first_of(down.v_hat, client.v_hat)
        share = down.v_share if self.sync else client.v_hat_share  # A17
        v, v_share = (v_hat, share) if client.v is None else (client.v, client.v_share)  # A3
        if client.v_version is not None:  # A16: a client continues its v only while v_hat is the one it started from
            is_current = client.v_version == self.version(info.round)
            v = torch.where(is_current, v, v_hat)
            if v_share is not None and share is not None:
                v_share = torch.where(is_current, v_share, share)
        local = Local(down.x, *self.first_momentum(down, client), v, v_share)  # l.6
        if self.second_moment == "running" or not self.sync:  # A2, A17
            local = local._replace(v_hat=v_hat, v_hat_share=share)
        if self.first_round == "running":
            local = local._replace(in_round_one=per_client(down.x, float(info.round == 1)))
        return local

    def step(self, local: Local, down: Server, grad: Tensor, lr: Number, layers: Layers) -> Local:
        g = add_l2(grad, local.y, self)  # + lambda * y, if decay_form is "l2"
        v, v_share = ema(local.v, g * g, self.beta2), next_share(local.v_share, self.beta2)  # l.11, A1
        local = local._replace(
            m=ema(local.m, g, self.beta1),  # l.10
            m_share=next_share(local.m_share, self.beta1),
            v=v,
            v_share=v_share,
        )
        if self.second_moment == "running":  # A2
            local = local._replace(v_hat=larger(local.v_hat, v), v_hat_share=larger(local.v_hat_share, v_share))
        psi = precondition(corrected(local.m, local.m_share), self.divisor(local, down), self.eps)  # l.12
        direction, ratio = self.rescale(psi, local.y, layers)  # Fed-LAMB: eq. 3
        direction = add_decoupled(direction, local.y, self)  # + lambda * y, if decay_form is "decoupled"
        return local._replace(y=descend(local.y, direction, lr), ratio=ratio)  # l.13

    def divisor(self, local: Local, down: Server) -> Tensor:
        """Return the second moment to divide by: v_hat of the round, its running maximum, or v in round 1 (A2)."""
        v_hat = first_of(local.v_hat, down.v_hat)
        share = down.v_share if local.v_hat is None else local.v_hat_share
        if local.in_round_one is not None:
            v_hat = torch.where(local.in_round_one > 0, local.v, v_hat)
            if share is not None and local.v_share is not None:
                share = torch.where(local.in_round_one > 0, local.v_share, share)
        return corrected(v_hat, share)

    def finish(self, local: Local, down: Server, client: Client, info: ClientInfo) -> tuple[Up, Client]:
        v, v_share = (local.v, local.v_share) if local.v_hat is None else (local.v_hat, local.v_hat_share)  # l.16, A2
        m, m_share = self.send_momentum(local)
        up = Up(local.y - down.x, v, m, v_share, m_share)  # l.15
        kept = self.keep(local)
        if client.v is not None:  # A3, A16
            kept = kept._replace(v=local.v, v_share=local.v_share)
        if client.v_version is not None:
            kept = kept._replace(v_version=per_client(local.y, self.version(info.round)))
        if not self.sync:  # A17: l.20 for this client alone
            kept = kept._replace(v_hat=larger(local.v_hat, local.v))
            kept = kept._replace(v_hat_share=larger(local.v_hat_share, local.v_share))
        return up if self.is_sync(info.round) else up._replace(v=None, v_share=None), kept  # A16

    def update(self, server: Server, up: Up, info: ServerInfo) -> Server:
        x = server.x + self.server_lr * up.delta  # l.19
        v_hat, v_share = server.v_hat, server.v_share
        if up.v is not None and v_hat is not None:
            v_hat = torch.maximum(v_hat, up.v)  # l.20
            v_share = larger(v_share, up.v_share)
        return Server(x, v_hat, up.m, v_share, up.m_share)

    def down_versions(self, round: int) -> Mapping[str, int]:
        cached = ["v_hat", "v_share"] if self.bias_correction else ["v_hat"]
        return dict.fromkeys(cached, self.version(round)) if self.sync_every > 1 else {}
