"""`Setup`: what both the server and the nodes of a federation know about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import nn

from lamina.algorithms.contract import Algorithm
from lamina.devices import choose_device
from lamina.errors import BadInput, is_number, is_whole, unknown
from lamina.flower.checks import Limits
from lamina.objective import Objective
from lamina.plan import Plan
from lamina.protocol import Protocol

PLACES = ("central", "nodes", "both")


@dataclass(kw_only=True, eq=False)
class Setup:
    """The settings of a federation, validated; `lamina.flower.Federation` documents each of them."""

    algorithm: Algorithm
    plan: Plan
    make_model: Callable[[], nn.Module]
    data: Callable[[Context], Any]
    test: Callable[[], Any] | None
    node_test: Callable[[Context], Any] | None
    device: str | torch.device
    rounds: int
    evaluate_every: int
    evaluate_on: str
    quorum: float | int
    deadline: float
    attempts: int
    poll: float
    limits: Limits
    state_dir: str | Path | None

    def __post_init__(self) -> None:
        makers = {"model": self.make_model, "data": self.data, "test": self.test, "node_test": self.node_test}
        for name, maker in makers.items():
            if isinstance(maker, nn.Module) or (maker is not None and not callable(maker)):
                raise BadInput(f"{name} is a {type(maker).__name__}: give a function that makes it, such as lambda: …")
        if self.evaluate_on not in PLACES:
            raise unknown("evaluate_on", self.evaluate_on, PLACES)
        for name in ("rounds", "attempts", "evaluate_every"):
            if not is_whole(value := getattr(self, name)) or value < 1:
                raise BadInput(f"{name} = {value!r} is not a whole number >= 1")
        for name in ("deadline", "poll", "quorum"):
            if not (is_number(value := getattr(self, name)) and math.isfinite(value) and value > 0):
                raise BadInput(f"{name} = {value!r} is not a number > 0")
        clients = self.plan.clients.count
        if not is_whole(self.quorum) and self.quorum > 1:
            raise BadInput(f"quorum = {self.quorum!r} is neither a fraction up to 1 nor a whole number of clients")
        if is_whole(self.quorum) and self.quorum > clients:
            raise BadInput(f"quorum = {self.quorum} of {clients} clients can never answer: give at most {clients}")

    @property
    def protocol(self) -> Protocol:
        """The settings of training."""
        return self.plan.protocol

    def needed(self, cohort: int) -> int:
        """Return how many clients of a cohort of this size must answer."""
        wanted = int(self.quorum) if is_whole(self.quorum) else math.ceil(self.quorum * cohort)
        return max(1, min(cohort, wanted))

    def objective(self) -> Objective:
        """Build the model on the device of this process."""
        return Objective(self.make_model().to(choose_device(self.device)), self.protocol.loss)
