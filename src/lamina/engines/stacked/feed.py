"""Send the batches of a round to the device, ahead of time if a GPU is still busy with the round before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lamina.base import rng
from lamina.data.parts import Indices
from lamina.engines.stacked.rows import Member, RoundInProgress, Row, pad_plans, plan_rows, send
from lamina.engines.stacked.steps import Batches
from lamina.objective.objective import Objective
from lamina.rounds.plan import RoundPlan, dropout_streams, sample_counters
from lamina.rounds.settings import TrainSettings


class SentBatches(NamedTuple):
    """Batches on the device."""

    batches: Batches
    filled: Indices  # how many samples each has [rows, K], on the host


class NextRound(NamedTuple):
    """A round that was planned ahead."""

    plans: Sequence[RoundPlan]  # every member's
    rows: list[Row]
    sent: SentBatches


@dataclass
class BatchFeed:
    """Prepares the rows of a round and sends their batches to the device, ahead of time while the GPU is busy."""

    objective: Objective
    protocol: TrainSettings
    device: torch.device  # where batches are sent to
    _ahead: NextRound | None = field(default=None, repr=False)

    def look_ahead(self, now: RoundInProgress, chunk: list[Row]) -> None:
        """Plan the next round and, if a round is a single chunk, send its batches."""
        plans = None if now.ahead is None else now.ahead()
        if plans is not None and len(chunk) == len(now.rows):
            rows = plan_rows(plans, [member.protocol for member in now.members])
            if rows:  # another rank may have all clients of that round
                sent = self._send([plans[row.member] for row in rows], [row.c for row in rows])
                self._ahead = NextRound(plans, rows, sent)

    @property
    def upcoming(self) -> NextRound | None:
        """The next round, if it is planned and its batches are sent."""
        return self._ahead

    def rows(self, members: Sequence[Member]) -> list[Row]:
        """Return the rows of a round."""
        ahead = self._ahead
        if ahead is not None and len(ahead.plans) == len(members):
            pairs = zip(ahead.plans, members, strict=True)
            if all(plan.index is member.plan.index for plan, member in pairs):
                return ahead.rows
        return plan_rows([member.plan for member in members], [member.protocol for member in members])

    def batches(self, now: RoundInProgress, chunk: list[Row]) -> SentBatches:
        """Return the batches of some rows."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and now.rows is ahead.rows and len(chunk) == len(now.rows):
            return ahead.sent
        return self._send(now.plans(chunk), [row.c for row in chunk])

    def _send(self, plans: list[RoundPlan], places: list[int]) -> SentBatches:
        device = self.device
        index, filled = pad_plans(plans, places)
        streams = np.array([plan.streams[c] for plan, c in zip(plans, places, strict=True)])
        keys = masks = None
        if self.protocol.augmentation is not None:
            counters = sample_counters(index.shape[1], index.shape[2])
            keys = send(rng.bits(streams[:, None, None], counters), device)
        if self.objective.draws_masks:
            masks = send(dropout_streams(streams, index.shape[1]), device)
        counts = send(filled, device) if (filled < index.shape[2]).any() else None
        return SentBatches(Batches(send(index, device), counts, keys, masks), filled)
