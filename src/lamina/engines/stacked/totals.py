"""The sums of what the rows of a chunk have trained, for each member of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.engines.devices import arithmetic
from lamina.engines.stacked.forward import Forward
from lamina.engines.stacked.rows import (
    RoundInProgress,
    Row,
    Trained,
    column,
    map_record,
    members_and_weights,
    row_buffers,
    row_of,
    send,
    to_layout,
)
from lamina.objective.objective import Buffers, Objective


@dataclass
class Totals:
    """Weights the rows of a chunk, and adds them up for each member."""

    objective: Objective
    forward: Forward
    _sent: tuple[Any, Tensor] | None = field(default=None, init=False, repr=False)  # cache of `row_weights`

    def relative_weights(self, now: RoundInProgress, chunk: list[Row]) -> Tensor | None:
        """Return every row's weight times the size of its cohort; None if no member weights clients by examples."""
        members = [now.members[row.member] for row in chunk]
        if not any(member.protocol.by_examples for member in members):
            return None
        weights = [
            row.weight * len(member.plan.cohort) if member.protocol.by_examples else 1.0
            for row, member in zip(chunk, members, strict=True)
        ]
        return column(weights, self.objective.start)

    def row_weights(self, now: RoundInProgress, chunk: list[Row]) -> tuple[list[int], Tensor]:
        """Return the members that have not diverged, and every row's weight in each one's mean [members, rows]."""
        owner, weight = members_and_weights(chunk)
        members = [e for e in dict.fromkeys(owner.tolist()) if e not in now.failed]
        weights = np.where(owner == np.reshape(members, (-1, 1)), weight, 0.0)
        # Most rounds have the same weights, so those of the last call stay on the device.
        if self._sent is None or not np.array_equal(self._sent[0], weights):
            self._sent = weights, send(weights, self.objective.device).to(self.objective.dtype)
        return members, self._sent[1]

    def add(
        self, now: RoundInProgress, chunk: list[Row], trained: Trained, row_weights: tuple[list[int], Tensor]
    ) -> dict[int, tuple[Any, Buffers]]:
        """Return every member's sum of uploads and of buffers with these rows added."""
        (members, weights), up, buffers = row_weights, trained.up, trained.buffers
        if not members:
            return {}
        if len(chunk) == 1:  # one large model: every pass over it counts
            upload = self._in_usual_order(row_of(up, 0))
            return {members[0]: now.sums[members[0]].plus(upload, row_buffers(buffers, 0), chunk[0].weight)}
        all_count = {row.member for row in chunk} == set(members)

        def means(values: Tensor) -> Tensor:
            """[rows, ...] -> [members, ...]; a row that diverged does not count, not even times zero."""
            if not all_count:
                counts = (weights != 0).any(0)
                values = torch.where(counts.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
            weighted: Tensor = torch.tensordot(weights, values, dims=1)
            return weighted

        with arithmetic("fp32"):  # whatever the model's arithmetic is, the mean is exact
            mean_up = self._in_usual_order(map_record(means, up))
            mean_buffers = {name: means(b) for name, b in buffers.items() if b.is_floating_point()}
        return {e: now.sums[e].plus(row_of(mean_up, i), row_buffers(mean_buffers, i)) for i, e in enumerate(members)}

    def _in_usual_order(self, record: Any) -> Any:
        return map_record(lambda values: to_layout(values, self.forward.layout, back=True), record)
