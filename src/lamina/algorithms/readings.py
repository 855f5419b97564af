"""Other readings of the Fed-LAMB paper's Algorithm 1, chosen by options; each changes one of its steps.

`fedams.py` and `mime.py` have the algorithm in its default reading, whose functions the classes below call by `super`.
"A2" is an entry in the list of choices where the text is ambiguous: docs/reference/algorithms.md. The options of the
authors' public research code, where it differs from their text, are the presets "authors".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.algorithms.algorithm1 import Algorithm1
from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo, per_client, zeros
from lamina.algorithms.declaration import option
from lamina.algorithms.primitives import ema, refuse_zero_divisor
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers

MIME_AUTHORS = {"m_init": 1e-8, "v_init": 1e-8, "eps": 1e-8}
FED_AUTHORS = {**MIME_AUTHORS, "first_round": "running", "v_seed": "client"}
# FedLALR (Sun, Shen et al. 2023): local AMSGrad from the means of all clients' m and v_hat.
FEDLALR = {"second_moment": "running", "momentum": "average", "v_init": 1e-16, "beta2": 0.995}


@dataclass(frozen=True, eq=False)
class MomentumReadings(Algorithm1):
    """Where a client's momentum comes from at the start of a round (l.6, A5)."""

    m_init: Number = option(0.0, "the momentum before a client's first step")
    momentum: str = "carry"  # each method lists its choices

    @property
    def is_shared(self) -> bool:
        """Whether the server broadcasts the momentum."""
        return self.momentum in ("average", "server")

    def new_momentum(self, x: Tensor) -> Tensor:
        """Return the momentum before the first step."""
        return zeros(x) + self.m_init

    def init(self, x: Tensor, layers: Layers) -> Any:
        server = super().init(x, layers)
        return server._replace(m=self.new_momentum(x)) if self.is_shared else server

    def client_init(self, x: Tensor, layers: Layers) -> Any:
        m = self.new_momentum(x) if self.momentum == "carry" else None
        return super().client_init(x, layers)._replace(m=m)

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Any:
        if self.momentum != "carry":
            client = client._replace(m=down.m if self.is_shared else self.new_momentum(down.x))
        return super().begin(down, client, info)

    def finish(self, local: Any, down: Any, client: Any, info: ClientInfo) -> tuple[Any, Any]:
        up, kept = super().finish(local, down, client, info)
        if self.momentum == "average":
            up = up._replace(m=local.m)
        return up, kept if self.momentum == "carry" else kept._replace(m=None)

    def update(self, server: Any, up: Any, info: ServerInfo) -> Any:
        after = super().update(server, up, info)  # type: ignore[safe-super]  # that of DefaultReading
        return after._replace(m=up.m)


@dataclass(frozen=True, eq=False)
class FedAmsReadings(MomentumReadings):
    """Which second moment a client of Fed-AMS starts from, divides by and sends."""

    momentum: Literal["carry", "restart", "average"] = option(
        "carry", "m_0: the client's own of its last round, a fresh one, or the mean of all clients' (A5)"
    )
    second_moment: Literal["frozen", "running"] = option("frozen", "divide by v_hat, or by its running maximum (A2)")
    first_round: Literal["frozen", "running"] = option("frozen", "in round 1 divide by v_hat, or by the local v")
    v_seed: Literal["server", "client"] = option("server", "v_0: the server's v_hat, or the client's own last v (A3)")
    sync: bool = option(True, "share v_hat; if false, every client keeps its own v_hat_i (A17)")

    def check(self) -> None:
        super().check()
        if not self.sync and self.sync_every > 1:
            raise BadInput(f"sync_every = {self.sync_every} acts only with sync = true: leave it out")
        if self.second_moment == "frozen":
            if self.first_round == "frozen":
                refuse_zero_divisor(self)
            elif not self.sync:
                refuse_zero_divisor(self, "in the first round of a client that joins after round 1")
            elif self.sync_every > 1:
                refuse_zero_divisor(self, f"from round 2 until v_hat is synchronised after round {self.sync_every}")

    def is_sync(self, round: int) -> bool:
        return self.sync and super().is_sync(round)

    def init(self, x: Tensor, layers: Layers) -> Any:
        server = super().init(x, layers)
        return server if self.sync else server._replace(v_hat=None)  # A17

    def client_init(self, x: Tensor, layers: Layers) -> Any:
        client, v = super().client_init(x, layers), zeros(x) + self.v_init
        client = client._replace(v=v) if self.v_seed == "client" else client  # A3
        return client if self.sync else client._replace(v_hat=v)  # A17

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Any:
        v_hat = down.v_hat if self.sync else client.v_hat  # A17
        local = super().begin(down, client, info)._replace(v=client.v if self.v_seed == "client" else v_hat)  # A3
        if self.second_moment == "running" or not self.sync:
            local = local._replace(v_hat=v_hat)
        if self.first_round == "running":  # `step` does not get the round
            local = local._replace(in_round_one=per_client(down.x, float(info.round == 1)))
        return local

    def divisor(self, local: Any, down: Any) -> Tensor:
        """Return the second moment to divide by, after the step's v was added."""
        v_hat: Tensor = local.v_hat
        if self.sync:
            v_hat = super().divisor(local, down)  # type: ignore[misc]  # that of DefaultReading
        if self.second_moment == "running":
            v_hat = torch.maximum(local.v_hat, local.v)  # A2
        if self.first_round == "running":
            v_hat = torch.where(local.in_round_one > 0, local.v, v_hat)
        return v_hat

    def step(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Any:
        after = super().step(local, down, grad, lr, layers)  # type: ignore[safe-super]
        if self.second_moment == "running":
            after = after._replace(v_hat=torch.maximum(local.v_hat, after.v))  # A2
        return after

    def finish(self, local: Any, down: Any, client: Any, info: ClientInfo) -> tuple[Any, Any]:
        up, kept = super().finish(local, down, client, info)
        if self.second_moment == "running" and up.v is not None:
            up = up._replace(v=local.v_hat)  # A2: what the steps divided by
        if self.v_seed == "client":
            kept = kept._replace(v=local.v)  # A3
        if not self.sync:
            kept = kept._replace(v_hat=torch.maximum(local.v_hat, local.v))  # A17: l.20 for this client alone
        return up, kept


@dataclass(frozen=True, eq=False)
class MimeReadings(MomentumReadings):
    """The original Mime (A14): momentum and second moment are the server's, and steps use a control variate."""

    momentum: Literal["carry", "restart", "average", "server"] = option(
        "carry", "m: the client's own over rounds, fresh, the mean of all (A5), or the server's, frozen (A14)"
    )
    control_variate: bool = option(False, "step along g(y) - g(x) + mean gradient, as the original Mime does (A14)")
    amsgrad: bool = option(True, "divide by the running maximum of v")

    def check(self) -> None:
        super().check()
        refuse_zero_divisor(self)
        if self.control_variate and self.sync_every > 1:
            raise BadInput("control_variate needs the full gradient in every round: set sync_every = 1")

    def needs(self, round: int) -> Needs:
        return super().needs(round)._replace(control_variate=self.control_variate)

    def broadcast(self, server: Any, info: ServerInfo) -> Any:
        mean_gradient = info.mean_gradient if self.control_variate else None
        return super().broadcast(server, info)._replace(m=server.m, mean_gradient=mean_gradient)

    def step(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Any:
        grad = grad if down.mean_gradient is None else grad + down.mean_gradient  # the engine's is g(y) - g(x)
        after = super().step(local, down, grad, lr, layers)  # type: ignore[safe-super]
        return after._replace(m=local.m) if self.momentum == "server" else after  # frozen within the round

    def update(self, server: Any, up: Any, info: ServerInfo) -> Any:
        after = super().update(server, up, info)
        if up.gradient is not None and not self.amsgrad:
            after = after._replace(v_hat=after.v)
        if self.momentum == "server":
            m = server.m if up.gradient is None else ema(server.m, up.gradient, self.beta1)
            after = after._replace(m=m)
        return after

    def down_versions(self, round: int) -> Mapping[str, int]:
        versions = super().down_versions(round)
        return dict.fromkeys(["v_hat", "m"], versions["v_hat"]) if versions and self.momentum == "server" else versions
