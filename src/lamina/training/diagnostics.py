"""Diagnostics: the quantities of the papers' convergence theory, measured in the rounds that are evaluated.

They follow from the server's states before and after a round, the broadcast and the data. Nothing is kept between
rounds and nothing is changed, so a run with diagnostics has the same trajectory, and a resumed run the same values.
`Algorithm.analysis` returns z, g_a and the second moment of a method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo
from lamina.base import rng
from lamina.base.errors import BadInput, short_repr, unknown
from lamina.data.dataset import Dataset
from lamina.engines.loop import FIXED_CHUNK, FULL_GRADIENT_CHUNK, Loop
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.rows import on_device
from lamina.engines.state import RoundReport, State, client_weights
from lamina.objective.batch import take
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.plan import Plan, RoundPlan
from lamina.training.metrics import DIAGNOSTICS


def check_names(names: Any) -> tuple[str, ...]:
    """Return the diagnostics to measure, after refusing unknown ones."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise BadInput(f"diagnostics = {short_repr(names)}: give a list of names, such as ['gradient', 'drift']")
    for name in names:
        if name not in DIAGNOSTICS:
            raise unknown("diagnostic", name, DIAGNOSTICS)
    return tuple(names)


@dataclass(frozen=True)
class Diagnostics:
    """The diagnostics of one simulation."""

    names: tuple[str, ...]
    algorithm: Algorithm
    objective: Objective
    data: Dataset  # the training data
    plan: Plan

    def measure(self, before: State, after: State, plan: RoundPlan, report: RoundReport) -> dict[str, float]:
        """Return the columns of a finished round. A quantity that the method does not have is left out."""
        theory = self.algorithm.analysis(after.server, before.server)
        row: dict[str, Tensor] = {}
        if "gradient" in self.names:
            gradient = self.full_gradient(theory.point, after.buffers)
            row["gradient_squared_norm"] = square(gradient)
            if theory.second_moment is not None:  # the norm of the gradient / v^(1/4)
                v = theory.second_moment.double()
                row["scaled_gradient_squared_norm"] = torch.where(v > 0, gradient**2 / v.sqrt(), 0.0).sum()
        if "pseudo_gradient" in self.names:
            pseudo = report.displacement.double() / -(plan.lr * report.mean_steps)
            gradient = self.full_gradient(before.server.x, before.buffers)
            row["pseudo_gradient_gap"] = torch.linalg.vector_norm(pseudo - gradient)
            row["pseudo_gradient_cosine"] = cosine(pseudo, gradient)
        if "drift" in self.names:
            row["drift"] = self._drift(before, plan, report.down)
            if theory.point is not after.server.x:
                row["extrapolation"] = square(theory.point - after.server.x)
        # The point, which needs an older state, is not used.
        earlier = self.algorithm.analysis(before.server, before.server)
        if "amendment" in self.names and theory.amendment is not None and earlier.amendment is not None:
            row["amendment_cosine"] = cosine(theory.amendment.double(), earlier.amendment.double())
        if "second_moment" in self.names and theory.second_moment is not None and earlier.second_moment is not None:
            v = theory.second_moment.double()
            row["second_moment_mean"], row["second_moment_variance"] = v.mean(), v.var(correction=0)
            row["second_moment_growth"] = (v - earlier.second_moment).sum()
        numbers = torch.stack([*row.values()]).tolist() if row else []
        return {name: value for name, value in zip(row, numbers, strict=True) if not math.isnan(value)}

    def full_gradient(self, x: Tensor, buffers: Buffers) -> Tensor:
        """Return the gradient of F at x in float64, by one pass over the clients' training data.

        F is the mean of the clients' mean losses, weighted as the run weights them, in evaluation mode (no dropout,
        fixed BatchNorm statistics), without augmentation and weight decay. Clients whose samples change in every round
        have one loss, the mean over all samples.
        """
        parts = self.plan.clients.parts
        samples = parts.samples if len(parts) else np.arange(len(self.data))
        if len(parts) and not self.plan.protocol.by_examples:
            weights = np.repeat(1 / (len(parts) * parts.sizes), parts.sizes)
        else:
            weights = np.full(len(samples), 1 / len(samples))
        chunk = FIXED_CHUNK if self.objective.evaluates_by_batch else FULL_GRADIENT_CHUNK
        total = torch.zeros_like(x, dtype=torch.float64)
        clients = parts.bounds if len(parts) and self.objective.mixes_samples else (0, len(samples))
        batches = (
            slice(start, min(start + chunk, end))
            for first, end in itertools.pairwise(clients)
            for start in range(first, end, chunk)
        )
        for batch in batches:
            index, weight = torch.from_numpy(samples[batch]).to(x.device), torch.from_numpy(weights[batch]).to(x)
            inputs = self.data.inputs(index, self.objective.dtype)
            with rng.forked(x.device, seed=0):  # for a module that draws random numbers even when it is evaluated
                gradient, _ = self.objective.gradient(
                    x, buffers, inputs, take(self.data.y, index), train=False, weights=weight
                )
            total += gradient
        return total

    def _drift(self, before: State, plan: RoundPlan, down: Any) -> Tensor:
        """Return the mean over clients and local steps of ||y_{i,k} - x||^2, by training the round's clients again."""
        loop, layers = Loop(self.algorithm, self.objective, self.data, self.plan.protocol), self.objective.layers
        total, ranks = torch.zeros((), dtype=torch.float64, device=down.x.device), Ranks.current()
        weights = client_weights(plan, self.plan.protocol.by_examples)
        for c, client_id in enumerate(plan.cohort.tolist()):
            if not ranks.owns(client_id):
                continue
            squares: list[Tensor] = []

            def watch(_k: int, _loss: Tensor, _grad: Tensor, _old: Any, new: Any, into: list[Tensor] = squares) -> None:
                into.append(square(new.y - down.x))

            has_state = client_id in before.clients
            client = before.clients[client_id] if has_state else self.algorithm.client_init(down.x, layers)
            info = ClientInfo(plan.number, plan.lr, layers, float(plan.steps[c]))
            buffers = {name: buffer.clone() for name, buffer in before.buffers.items()}
            loop.train_client(down, on_device(client, down.x.device), buffers, info, plan, c, watch)
            total += weights[c] * torch.stack(squares).mean()
        return ranks.add(total)


def square(vector: Tensor) -> Tensor:
    """Return the squared norm in float64."""
    return vector.double().square().sum()


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors; NaN if one of them is zero."""
    lengths: Tensor = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return torch.dot(one, other) / lengths
