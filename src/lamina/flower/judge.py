"""Decide which sound answers of the nodes are used.

`lamina.flower.checks` looks at every answer by itself, before. Here the answers of one round are compared with each
other, by one rule that knows nothing of the algorithm: a size may be at most `Limits.times_median` times the round's
median. It stops broken nodes and absurd values. It does not stop a hostile node, which a robust mean does: see
docs/explanation/hostile-nodes.md. With differential privacy nothing is compared: whether an update is used would depend
on those of the others, and clipping bounds every update anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import ClientInfo, trial_step, with_displacement
from lamina.channel.channel import Link
from lamina.flower import wire
from lamina.flower.checks import Expected, NodeMetrics, Update, norm
from lamina.flower.records import Attendance, Memory
from lamina.flower.setup import Setup
from lamina.objective.objective import Buffers
from lamina.rounds.plan import client_streams, cohort_stream
from lamina.training.evaluation import WEIGHT

FEWEST_FOR_A_MEDIAN = 3  # answers
LEAST_MEDIAN = 1.0  # of losses and metrics: a client that fits badly is not absurd because the others fit perfectly
DIGEST_CHARACTERS, MAX_DIGESTS = 16, 100  # of an accepted update, per client

Sizes = dict[str, dict[int, float]]  # by what is measured and client


class Judge:
    """Removes answers that were sent before or stand out in their round."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self.memory, self.algorithm, self.protocol, self.limits = memory, setup.algorithm, setup.protocol, setup.limits
        self._times = None if self.protocol.privacy is not None else self.limits.times_median

    def expect(self, buffers: Buffers, down: Any, info: ClientInfo) -> Expected:
        """Return what a sound update looks like: the fields an engine would get from one local step.

        `down` is the broadcast as clients see it.
        """
        client = self.algorithm.client_init(down.x, info.layers)
        start = self.algorithm.begin(down, client, info)
        local = trial_step(self.algorithm, start, down, torch.zeros_like(down.x), info)
        up, channel = self.algorithm.finish(local, down, client, info)[0], self.protocol.channel

        def link(client: int) -> Link:
            seed, device = self.protocol.seed, down.x.device
            stream = client_streams(seed, info.round, np.array([client]))[0]
            return Link.of(info.layers, stream, cohort_stream(seed, info.round), device)

        parts = channel.parts_like(self.algorithm, up, link(0))
        others = {name: value for name, value in up._asdict().items() if value is not None and name not in parts}

        def read(tensors: Mapping[str, Tensor], client: int) -> Any:
            as_sent = up._replace(**{name: tensors[name] for name in others})
            numbers = {
                name: [each.to(down.x.dtype) for each in several]
                for name, several in wire.read_parts(tensors, parts).items()
            }
            return with_displacement(self.algorithm, channel.read(self.algorithm, as_sent, numbers, down, link(client)))

        return Expected(
            others | wire.part_tensors(parts),
            read,
            wire.floating(buffers),
            lambda examples: int(self.protocol.steps(np.array([examples]))[0]),
            self.limits,
            self.algorithm.non_negative,
        )

    def remove_odd_gradients(self, gradients: dict[int, Update], record: Attendance) -> None:
        """Remove full gradients (Mime's first exchange) that stand out."""
        _remove(gradients, stand_out(sizes_of(gradients), self._times), record)

    def remove_odd_updates(self, updates: dict[int, Update], record: Attendance) -> None:
        """Remove updates that were sent before or stand out, and replace training losses nobody can believe."""
        # A client that does not move sends zeros again and again: that is not a replay.
        repeated = [
            client
            for client, update in updates.items()
            if bool(update.up.delta.any()) and _short_digest(update) in self.memory.accepted.get(client, [])
        ]
        _remove(updates, dict.fromkeys(repeated, "its update is one it has sent before"), record)
        _remove(updates, stand_out(sizes_of(updates), self._times), record)
        losses = {client: update.loss for client, update in updates.items()}
        absurd = stand_out({"its training loss": losses}, self._times, LEAST_MEDIAN)
        for client, why in absurd.items():
            record.note(f"{record.name(client)}: {why}: not recorded")
            updates[client] = updates[client]._replace(loss=statistics.median(losses.values()))

    def remove_odd_evaluations(self, evaluations: dict[int, NodeMetrics], record: Attendance) -> None:
        """Remove evaluations that claim far too many examples or labels, or an absurd loss or other mean."""
        sizes: Sizes = {}
        for client, one in evaluations.items():
            sizes.setdefault("its number of examples", {})[client] = one.examples
            for name, value in one.figures.items():
                if name.endswith(WEIGHT):  # how many labels an example has
                    labels = f"its number of labels of '{name.removesuffix(WEIGHT)}'"
                    sizes.setdefault(labels, {})[client] = value * one.examples
                else:
                    sizes.setdefault(f"its evaluation {name}", {})[client] = value
        _remove(evaluations, stand_out(sizes, self._times, LEAST_MEDIAN), record)

    def remember(self, updates: Mapping[int, Update]) -> None:
        """Remember the updates in the mean of a round, and how many examples they are from."""
        for client, update in updates.items():
            self.memory.examples[client] = update.examples
            digests = [*self.memory.accepted.get(client, []), _short_digest(update)]
            self.memory.accepted[client] = digests[-MAX_DIGESTS:]


def sizes_of(updates: Mapping[int, Update]) -> Sizes:
    """Return the norm of every field and buffer of some updates, and their numbers of examples."""
    sizes: Sizes = {}
    for client, update in updates.items():
        vectors = {f"the norm of '{name}'": value for name, value in update.up._asdict().items() if value is not None}
        vectors |= {f"the norm of the buffer '{name}'": value for name, value in update.buffers.items()}
        for what, vector in vectors.items():
            sizes.setdefault(what, {})[client] = norm(vector)
        sizes.setdefault("its number of examples", {})[client] = update.examples
    return sizes


def stand_out(sizes: Sizes, times: float | None, least: float = 0.0) -> dict[int, str]:
    """Return the clients with a size of more than `times` the round's median, each with the reason.

    Fewer than three clients have no median, and a median of zero says nothing about sizes. `least` is the smallest
    median that counts.

    >>> stand_out({"the norm of 'delta'": {0: 1.0, 1: 900.0, 2: 1.5, 3: 0.5}}, times=100)
    {1: "the norm of 'delta' is 900, more than 100 times the round's median, 1.25 (limits: times_median)"}
    """
    odd: dict[int, str] = {}
    for what, values in sizes.items():
        if times is None or len(values) < FEWEST_FOR_A_MEDIAN:
            continue
        median = statistics.median(map(abs, values.values()))
        for client, value in values.items():
            if abs(value) > times * max(median, least) > 0:
                compared = f"more than {times:g} times the round's median, {median:.4g} (limits: times_median)"
                odd.setdefault(client, f"{what} is {value:.6g}, {compared}")
    return odd


def _remove(answers: dict[int, Any], odd: Mapping[int, str], record: Attendance) -> None:
    for client, why in odd.items():
        record.refuse(client, why)
        del answers[client]


def _short_digest(update: Update) -> str:
    return wire.digest(update.up.delta)[:DIGEST_CHARACTERS]
