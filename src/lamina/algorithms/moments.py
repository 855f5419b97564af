"""Local AMSGrad as Fed-AMS, Fed-LAMB, Mime and Mime-LAMB share it: options, starting points, what a client keeps.

The four methods differ in where the global second moment comes from and in the step. Here is what they have in
common word for word, with the readings of the text that the register names (A2 to A6, A16). Line numbers are
those of Karimi, Li & Li, "Layer-wise and dimension-wise locally adaptive federated learning", Algorithm 1.

Bias correction (A6) divides a copy of a moment by its *share*: how much of the moment is made of gradients, the rest
being its start. One that started afresh and saw t gradients has the share 1 - beta^t. A moment that was averaged over
clients, handed down, maximised or restarted has no such t; but its share went through the same operations. So the share
is kept beside the moment as one number, and whatever is done to the moment is done to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Info, Number, hyper, zeros
from lamina.algorithms.primitives import (
    ema,
    precondition,
    refuse_still_momentum,
    refuse_uncorrectable,
    refuse_zero_moment,
)
from lamina.errors import BadInput


@dataclass(frozen=True, eq=False)
class MomentOptions:
    """Options of all four methods."""

    beta1: Number = hyper(0.9, "beta_1, decay rate of the momentum", low=0.0, high=1.0)
    beta2: Number = hyper(0.999, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    v_init: Number = hyper(1e-6, "epsilon, the second moment before round 1 (A4)", low=0.0)
    m_init: Number = hyper(0.0, "the momentum before a client's first step")
    eps: Number = hyper(0.0, "added to the root of v_hat (A4)", low=0.0)
    bias_correction: bool = hyper(False, "divide copies of the moments by the share of gradients in them (A6)")
    sync_every: int = hyper(1, "Z, synchronise the second moment every Z rounds (A16)", low=1)
    server_lr: Number = hyper(1.0, "eta_g, the server's step size", low=0.0, open_low=True)
    momentum: str = "carry"  # each method says which readings it has

    def check(self) -> None:
        """Refuse moments that never change."""
        refuse_still_momentum(self.beta1)
        refuse_zero_moment(self.beta2, self.v_init, self.eps)


@dataclass(frozen=True, eq=False)
class AmsOptions(MomentOptions):
    """Options of Fed-AMS and Fed-LAMB, whose clients estimate the second moment themselves."""

    momentum: Literal["carry", "restart", "average"] = hyper(
        "carry", "m_0: the client's own of its last round, a fresh one, or the mean of all clients' (A5)"
    )
    second_moment: Literal["frozen", "running"] = hyper(
        "frozen", "divide by the round's v_hat, or by its local running maximum (A2)"
    )
    first_round: Literal["frozen", "running"] = hyper("frozen", "in round 1 divide by v_hat, or by the running v")
    v_seed: Literal["server", "client"] = hyper("server", "v_0: the server's v_hat, or the client's own last v (A3)")
    lazy: Literal["restart", "accumulate"] = hyper(
        "restart", "between syncs v_0 is v_hat, or the client's own v_K (A16)"
    )

    def check(self) -> None:
        """Refuse a start that cannot move."""
        if self.second_moment == "frozen":
            if self.first_round == "frozen":
                refuse_zero_divisor(self)
            elif self.sync_every > 1:
                refuse_zero_divisor(self, f"from round 2 until v_hat is synchronised after round {self.sync_every}")
        if self.bias_correction:
            refuse_uncorrectable(self.beta2)


class Client(NamedTuple):
    """What a client keeps between rounds; a part its options do not use is None."""

    m: Tensor | None  # m_i of its last round (A5)
    v: Tensor | None = None  # v_i of its last round (A3, A16)
    v_version: Tensor | None = None  # which v_hat that v started from (A16)
    m_share: Tensor | None = None  # of gradients in that m (A6)
    v_share: Tensor | None = None  # of gradients in that v (A6)


class Local(NamedTuple):
    """The local model and moments; a part the options do not use is None."""

    y: Tensor
    m: Tensor
    v: Tensor | None = None
    v_hat: Tensor | None = None  # local running maximum (A2)
    m_share: Tensor | None = None  # of gradients in m (A6)
    v_share: Tensor | None = None  # of gradients in v (A6)
    v_hat_share: Tensor | None = None  # of gradients in the local v_hat (A6)
    round_one: Tensor | None = None  # 1 in round 1, else 0: tells which v to divide by
    ratio: Tensor | None = None  # the layer-wise methods' trust ratio of the last step, if it is recorded


def refuse_zero_divisor(h: MomentOptions, when: str = "in round 1") -> None:
    """Refuse v_init = 0 where some round divides by it: nothing would move."""
    if not isinstance(h.v_init, Tensor) and not isinstance(h.eps, Tensor) and h.v_init == 0 and h.eps == 0:
        raise BadInput(f"v_init = 0 leaves nothing to divide by {when}: give v_init or eps a positive value")


def is_sync(h: MomentOptions, round: int) -> bool:
    """Whether the second moment is synchronised at the end of this round: every Z-th (A16)."""
    return round % h.sync_every == 0


def version(h: MomentOptions, round: int) -> int:
    """How often v_hat has been synchronised before this round."""
    return (round - 1) // h.sync_every


def versions(h: MomentOptions, round: int, *fields: str) -> Mapping[str, int]:
    """The Down fields that change only at a synchronisation, with their version."""
    return dict.fromkeys(fields, version(h, round)) if h.sync_every > 1 else {}


def keeps_v(h: AmsOptions) -> bool:
    """Whether a client must remember its own v (A3, A16)."""
    return h.v_seed == "client" or accumulates(h)


def accumulates(h: AmsOptions) -> bool:
    """Whether a client's own v goes on between two synchronisations (A16)."""
    return h.v_seed == "server" and h.lazy == "accumulate" and h.sync_every > 1


def per_client(x: Tensor, value: float) -> Tensor:
    """[..., 1]: one number per client."""
    return torch.zeros_like(x[..., :1]) + value


def no_share(h: MomentOptions, x: Tensor) -> Tensor | None:
    """Return the share of gradients in a moment that has seen none; None without bias correction (A6)."""
    return per_client(x, 0.0) if h.bias_correction else None


def client_init(h: MomentOptions, x: Tensor) -> Client:
    """The state of a client that has not taken part yet (l.2)."""
    keep_m, keep_v = h.momentum == "carry", isinstance(h, AmsOptions) and keeps_v(h)
    return Client(
        m=zeros(x) + h.m_init if keep_m else None,
        v=zeros(x) + h.v_init if keep_v else None,
        v_version=per_client(x, -1.0) if isinstance(h, AmsOptions) and accumulates(h) else None,
        m_share=no_share(h, x) if keep_m else None,
        v_share=no_share(h, x) if keep_v else None,
    )


def begin(h: MomentOptions, x: Tensor, client: Client, server_m: Tensor | None, server_share: Tensor | None) -> Local:
    """The local model and momentum before the first step (l.6)."""
    if server_m is not None:  # A5
        return Local(y=x, m=server_m, m_share=server_share)
    if client.m is not None:
        return Local(y=x, m=client.m, m_share=client.m_share)
    return Local(y=x, m=zeros(x) + h.m_init, m_share=no_share(h, x))


def begin_v(h: AmsOptions, local: Local, v_hat: Tensor, share: Tensor | None, client: Client, info: Info) -> Local:
    """Add the local second moment (l.6) and what the options need to choose the divisor."""
    v, v_share = (v_hat, share) if client.v is None else (client.v, client.v_share)  # A3
    if client.v_version is not None:  # A16: the client's own v goes on only while v_hat is the one it started from
        own = client.v_version == version(h, info.round)
        v = torch.where(own, v, v_hat)
        v_share = None if v_share is None or share is None else torch.where(own, v_share, share)
    running = h.second_moment == "running"
    return local._replace(
        v=v,
        v_hat=v_hat if running else None,
        v_share=v_share,
        v_hat_share=share if running else None,
        round_one=per_client(v_hat, float(info.round == 1)) if h.first_round == "running" else None,
    )


def advance(h: MomentOptions, local: Local, g: Tensor) -> Local:
    """The moments after one more gradient."""
    v = None if local.v is None else ema(local.v, g * g, h.beta2)  # l.11, A1
    v_share = _advance_share(local.v_share, h.beta2)
    return local._replace(
        m=ema(local.m, g, h.beta1),  # l.10
        v=v,
        v_hat=larger(local.v_hat, v),  # A2
        m_share=_advance_share(local.m_share, h.beta1),  # A6
        v_share=v_share,
        v_hat_share=larger(local.v_hat_share, v_share),
    )


def _advance_share(share: Tensor | None, beta: Number) -> Tensor | None:
    """Return the share after one more gradient: the moment's own recursion with g = 1."""
    return None if share is None else beta * share + (1 - beta)


def larger(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the elementwise maximum of two tensors that are both there, or both not."""
    return None if one is None or other is None else torch.maximum(one, other)


def psi(h: MomentOptions, local: Local, v_hat: Tensor, v_hat_share: Tensor | None = None) -> Tensor:
    """The ratio m_k / sqrt(v_hat) (l.12), under the options for v_hat and bias correction."""
    m, divisor, share = local.m, v_hat, v_hat_share
    if local.v_hat is not None:  # A2
        divisor, share = local.v_hat, local.v_hat_share
    if local.round_one is not None and local.v is not None:
        first = local.round_one > 0
        divisor = torch.where(first, local.v, divisor)
        if local.v_share is not None and share is not None:
            share = torch.where(first, local.v_share, share)
    if local.m_share is not None:  # A6: copies are corrected, the recursions stay as they are
        m = m / local.m_share
    if share is not None:
        divisor = divisor / torch.where(share > 0, share, 1.0)  # v_init has seen no gradient: nothing to correct
    return precondition(m, divisor, h.eps)


def inherited(h: AmsOptions, v_hat: Tensor, info: Info) -> Mapping[str, Tensor]:
    """The part of an uploaded second moment that comes from the broadcast v_hat (see `Algorithm.inherited_moments`)."""
    if not is_sync(h, info.round):
        return {}
    if h.v_seed == "client":
        return {"v": zeros(v_hat)}
    if h.second_moment == "running" or accumulates(h):  # a maximum with v_hat; or v_hat of an earlier round
        return {"v": v_hat}
    return {"v": h.beta2**info.steps * v_hat}


def to_send(h: AmsOptions, local: Local, info: Info) -> tuple[Tensor | None, Tensor | None]:
    """Return what is uploaded of the second moment, and the share of gradients in it (A6).

    That is v_K, or the running maximum if the steps used that (A2), in rounds that synchronise (A16).
    """
    if not is_sync(h, info.round):
        return None, None
    return (local.v, local.v_share) if local.v_hat is None else (local.v_hat, local.v_hat_share)


def keep(h: MomentOptions, local: Local, info: Info) -> Client:
    """What the client remembers of the round."""
    keep_m, keep_v = h.momentum == "carry", isinstance(h, AmsOptions) and keeps_v(h)
    return Client(
        m=local.m if keep_m else None,
        v=local.v if keep_v else None,
        v_version=per_client(local.y, version(h, info.round)) if isinstance(h, AmsOptions) and accumulates(h) else None,
        m_share=local.m_share if keep_m else None,
        v_share=local.v_share if keep_v else None,
    )
