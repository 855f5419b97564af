"""Decide which answers of the nodes are used: each must be what a round expects, and fit the others of its round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lamina.algorithms.contract import ClientInfo, ServerInfo, trial_step
from lamina.engines.state import State
from lamina.flower import outliers, wire
from lamina.flower.checks import Evaluation, Expected, Update
from lamina.flower.records import Attendance, Memory
from lamina.flower.setup import Setup
from lamina.objective.objective import Objective
from lamina.training.evaluation import WEIGHT

DIGEST_CHARACTERS, MAX_DIGESTS = 16, 100  # of an accepted update, per client


class Judge:
    """Removes answers that stand out, and remembers from earlier rounds what that takes."""

    def __init__(self, setup: Setup, objective: Objective, state: State, memory: Memory) -> None:
        self.objective, self.memory = objective, memory
        self.algorithm, self.protocol, self.limits = setup.algorithm, setup.protocol, setup.limits
        rate, layers, zero = self.protocol.rate(1), objective.layers, torch.zeros_like(state.server.x)
        down = self.algorithm.broadcast(state.server, ServerInfo(1, rate, layers, mean_gradient=zero))
        upload = self._upload(down, ClientInfo(1, rate, layers, full_gradient=zero))
        self.limits.check_fields(upload._fields)
        self.no_totals = type(upload)(*[None] * len(upload))  # of a client that has not taken part

    def expect(self, state: State, down: Any, info: ClientInfo) -> Expected:
        """Return what a sound update looks like: the fields an engine would get from one local step.

        What the updates of this broadcast are compared by is kept for `remove_odd_updates` and `remember`.
        """
        algorithm, non_negative = self.algorithm, self.limits.non_negative
        upload = self._upload(down, info)
        self._broadcast = outliers.Broadcast(
            self.objective.layers,
            wire.floating(state.buffers),
            lambda steps: algorithm.inherited_moments(down, info._replace(steps=float(steps))),
            self.protocol.by_examples,
            lambda steps: algorithm.inherited_step(down, info._replace(steps=float(steps))),
            self.memory.largest_growth,
            implied=tuple(algorithm.implied_fields(upload, down, info._replace(steps=1.0))),
            drift=state.server.x - self.objective.start,
            totals={
                name: {client: getattr(total, name) for client, total in state.clients.items()}
                for name in algorithm.state_changes
            },
            growth_by_client=self.memory.growth_by_client,
        )
        return Expected(
            upload,
            wire.floating(state.buffers),
            lambda examples: int(self.protocol.steps(np.array([examples]))[0]),
            self.limits,
            algorithm.non_negative if non_negative is None else non_negative,
            lambda up, steps: algorithm.implied_fields(up, down, info._replace(steps=float(steps))),
            sum(float(value.norm()) for name, value in down._asdict().items() if name != "x" and value is not None),
        )

    def _upload(self, down: Any, info: ClientInfo) -> Any:
        """Return the Up of one local step."""
        client = self.algorithm.client_init(down.x, info.layers)
        start = self.algorithm.begin(down, client, info)
        local = trial_step(self.algorithm, start, down, torch.zeros_like(down.x), info)
        return self.algorithm.finish(local, down, client, info)[0]

    def remove_odd_gradients(self, gradients: dict[int, Update], record: Attendance) -> None:
        """Remove full gradients (Mime's first exchange) that stand out."""
        broadcast = outliers.Broadcast(self.objective.layers, {}, lambda steps: {}, self.protocol.by_examples)
        self._remove_odd(gradients, broadcast, record)

    def remove_odd_updates(self, updates: dict[int, Update], record: Attendance, last_loss: float | None) -> None:
        """Remove updates that were sent before or stand out, and replace training losses nobody can believe."""
        # An update without any movement is no sign of a replay.
        repeated = [
            client
            for client, update in updates.items()
            if bool(update.up.delta.any()) and _short_digest(update) in self.memory.accepted.get(client, [])
        ]
        _remove(updates, dict.fromkeys(repeated, "its update is one it has sent before"), record)
        self._remove_odd(updates, self._broadcast, record)
        typical, absurd = outliers.absurd_losses({client: update.loss for client, update in updates.items()}, last_loss)
        for client in absurd:
            loss = f"its training loss {updates[client].loss:.3g}"
            record.note(f"{record.name(client)}: {loss} is out of all proportion: not recorded")
            updates[client] = updates[client]._replace(loss=typical)

    def _remove_odd(self, updates: dict[int, Update], broadcast: outliers.Broadcast, record: Attendance) -> None:
        """Remove updates that stand out from the others, or are absurd beside those of earlier rounds."""
        sizes = outliers.sizes_of_updates(updates, broadcast)
        record.sizes |= sizes
        counts = {client: update.examples for client, update in updates.items()}
        odd = outliers.judge_updates(updates, broadcast, self.limits)
        odd |= outliers.judge_by_earlier_rounds(sizes, self.memory.recent, self.limits)
        odd |= outliers.judge_growth_of_data(counts, self.memory.examples, self.limits)
        _remove(updates, odd, record)

    def remove_odd_evaluations(self, evaluations: dict[int, Evaluation], record: Attendance) -> None:
        """Remove evaluations that claim far too many examples or labels, or an absurd loss or other mean."""
        counts = {client: one.examples for client, one in evaluations.items()}
        _remove(evaluations, outliers.judge_counts(counts, self.limits), record)
        for name in sorted({name for one in evaluations.values() for name in one.figures}):
            means = {client: one.figures[name] for client, one in evaluations.items() if name in one.figures}
            if name.endswith(WEIGHT):
                labels = {client: round(evaluations[client].examples * weight) for client, weight in means.items()}
                _remove(evaluations, outliers.judge_counts(labels, self.limits, "labels"), record)
                continue
            reason = f"its evaluation {name} {{:.3g}} is out of all proportion"
            absurd = outliers.absurd_losses(means, None)[1]
            _remove(evaluations, {client: reason.format(means[client]) for client in absurd}, record)

    def remember(self, updates: Mapping[int, Update], record: Attendance) -> None:
        """Remember the updates in the mean of a round."""
        memory, broadcast = self.memory, self._broadcast
        for client, update in updates.items():
            memory.examples[client] = update.examples
            memory.accepted[client] = [*memory.accepted.get(client, []), _short_digest(update)][-MAX_DIGESTS:]
        memory.growth_by_client |= outliers.add_growth(updates, broadcast)
        for what, value in outliers.median_growth(updates, broadcast).items():
            memory.largest_growth[what] = max(value, memory.largest_growth.get(what, 0.0))
        for what, median in outliers.medians(record.sizes, list(updates)).items():
            memory.recent[what] = [*memory.recent.get(what, []), median][-outliers.REMEMBERED :]


def _remove(answers: dict[int, Any], odd: Mapping[int, str], record: Attendance) -> None:
    for client, why in odd.items():
        record.refuse(client, why)
        del answers[client]


def _short_digest(update: Update) -> str:
    return wire.digest(update.up.delta)[:DIGEST_CHARACTERS]
