"""The timeline: the seconds of a run's rounds on a clock, from its plan and from the bytes that its records count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.algorithms.contract import Algorithm
from lamina.data.parts import Indices
from lamina.rounds.clock import Clock, Task
from lamina.rounds.plan import count_exchanges, count_gradients
from lamina.rounds.settings import TrainSettings


class Timeline:
    """Adds up the seconds of rounds, which begin one after the other.

    Every row is one broadcast: its clients start together, from the same model. Rounds that overlap would give every
    row a start of its own; nothing else here would change.
    """

    def __init__(self, clock: Clock, protocol: TrainSettings, algorithm: Algorithm, clients: int) -> None:
        self.clock, self.protocol, self.algorithm, self.clients = clock, protocol, algorithm, clients
        self.round = 0  # the last one that was added
        self.seconds = 0.0  # since the start of the run
        self._held: dict[int, Mapping[str, int]] = {}  # by client: the versions of the fields that it keeps
        self._whole = 0.0  # bytes of a download with all fields

    def add(self, row: Mapping[str, Any], cohort: Indices, sizes: NDArray[Any] | None, steps: NDArray[Any]) -> float:
        """Add the next round and return the seconds since the start of the run.

        Args:
            row: the round's record, with the bytes that its clients received and sent.
            cohort: their numbers [C].
            sizes: the number of samples of each, n_i; None if it is not known.
            steps: the number of local steps of each, K_i.
        """
        needs = self.algorithm.needs(int(row["round"]))
        gradients = count_gradients(self.protocol, needs, sizes, steps)
        up = np.full(len(cohort), row["bytes_up"] / len(cohort))  # each sends the same fields
        task = Task(gradients, self.downloads(row, cohort), up, count_exchanges(needs))
        self.seconds += float(self.clock.ready(task, cohort, self.clients, self.protocol.seed).max())
        return self.seconds

    def resume(self, rows: Sequence[Mapping[str, Any]], cohorts: Iterable[Indices], finished: int) -> None:
        """Continue after the finished rounds of a run, given by their records and cohorts."""
        self._held, self._whole = {}, 0.0
        for row, cohort in zip(rows, cohorts, strict=True):
            self.downloads(row, cohort)
        self.round, self.seconds = finished, rows[-1].get("clock_seconds", 0.0) if rows else 0.0

    def downloads(self, row: Mapping[str, Any], cohort: Indices) -> NDArray[np.float64]:
        """Return the bytes that every active client received [C].

        The record has their sum. Clients that keep a field receive it only when it has changed, so in some rounds one
        part of the cohort receives everything and the other part does not.
        """
        self.round = int(row["round"])
        versions = self.algorithm.down_versions(self.round)
        clients = cohort.tolist()
        whole = np.array([any(self._held.get(c, {}).get(n) != v for n, v in versions.items()) for c in clients])
        if versions:
            self._held |= dict.fromkeys(clients, versions)
        total, count = float(row["bytes_down"]), len(clients)
        if whole.all():
            self._whole = total / count
        if whole.all() or not whole.any() or not self._whole:
            return np.full(count, total / count)
        rest = (total - whole.sum() * self._whole) / (count - whole.sum())
        return np.where(whole, self._whole, rest)
