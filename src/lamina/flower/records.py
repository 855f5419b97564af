"""What the server of a federation keeps beside the model.

``federation.jsonl`` in the run's folder says who took part in each round, who did not, and why; a `Memory` of the
earlier rounds is in every checkpoint. ``starts`` counts how often the server was started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lamina.base.atomic import write_file
from lamina.channel.privacy import Privacy
from lamina.storage.files import writing_to

# Every start of the server numbers its tasks from a block of its own. So a server that was killed after its last
# checkpoint never uses a number twice, and nodes can refuse a number that is not larger than all before it.
TASKS_PER_START = 2**32
SECRET_REASON = "its answer cannot be used (with differential privacy only the node's log says why)"


class Attendance:
    """One attempt at a round: who took part, who did not, and why.

    With differential privacy, the journal and the log do not say why an update cannot be used, because such reasons
    quote it. If the cohorts are secret, they do not say who took part either.
    """

    def __init__(
        self, round: int, attempt: int = 1, *, nodes: Mapping[int, int], privacy: Privacy | None = None
    ) -> None:
        self.round, self.attempt = round, attempt
        self.complete = False  # enough took part: the round counts
        self.took_part: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.diverged: dict[int, str] = {}  # by client: the layer in which its training went non-finite
        self.errors: dict[int, str] = {}  # by client: why its answer cannot be used; not of clients that are silent
        self._nodes = nodes  # by client
        self._notes: dict[str, bool] = {}  # by text: whether it tells of the cohort
        self._has_secret_reasons = privacy is not None
        self._has_secret_cohort = privacy is not None and privacy.secret_cohorts

    def accept(self, clients: Iterable[int]) -> None:
        """Record the clients whose updates are in the mean: the round counts."""
        self.complete, self.took_part = True, [self._entry(client) for client in clients]

    def miss(self, client: int, why: str) -> None:
        """Record a client that did not answer."""
        self.missing.append({**self._entry(client), "why": why})

    def fail(self, client: int, why: str) -> None:
        """Record a client that answered with an error."""
        self.errors[client] = why
        self.miss(client, why)

    def refuse(self, client: int, why: str) -> None:
        """Record a client whose answer is not used."""
        self.errors[client] = why
        self.refused.append({**self._entry(client), "why": why})

    def note(self, text: str, *, of_cohort: bool = True) -> None:
        """Record anything else, once; `of_cohort`: it tells who takes part in the round."""
        if text not in self._notes:
            self._notes[text] = of_cohort

    @property
    def notes(self) -> list[str]:
        """The notes that may be known."""
        return [text for text, of_cohort in self._notes.items() if not (of_cohort and self._has_secret_cohort)]

    def entry(self) -> dict[str, Any]:
        """Return the line of the journal: what may be known of the attempt."""
        entry: dict[str, Any] = {"round": self.round, "attempt": self.attempt, "complete": self.complete}
        if not self._has_secret_cohort:
            missing, refused = ([self._shown(one) for one in group] for group in (self.missing, self.refused))
            entry |= {"took_part": self.took_part, "missing": missing, "refused": refused}
        return entry | {"notes": self.notes}

    def lines(self) -> list[str]:
        """Return a line for every client that is not in the mean, and the notes: what may be known of them."""
        if self._has_secret_cohort:
            return self.notes
        missing, refused = ([self._shown(one) for one in group] for group in (self.missing, self.refused))
        return self._lines(missing, refused)

    def details(self) -> list[str]:
        """Return the lines with all that differential privacy keeps secret; none if there is no more than `lines`."""
        lines = self._lines(self.missing, self.refused)
        return lines if lines != self.lines() else []

    def _lines(self, missing: Iterable[Mapping[str, Any]], refused: Iterable[Mapping[str, Any]]) -> list[str]:
        absent = [f"{self.name(one['client'])}: {one['why']}" for one in missing]
        return [*absent, *(f"{self.name(one['client'])}: refused: {one['why']}" for one in refused), *self._notes]

    def _shown(self, one: dict[str, Any]) -> dict[str, Any]:
        """Return an absent client without the reason if this is about its update or its data."""
        is_secret = self._has_secret_reasons and one["client"] in self.errors
        return {**one, "why": SECRET_REASON} if is_secret else one

    def name(self, client: int) -> str:
        """Return what messages call a client and its node."""
        return f"client {client}" + (f" (node {self._nodes[client]})" if client in self._nodes else "")

    def _entry(self, client: int) -> dict[str, Any]:
        node = self._nodes.get(client)
        return {"client": client, "node": None if node is None else str(node)}  # too long a number for many readers


class Journal:
    """Writes the attendance of every attempt."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "federation.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """Return the attempts so far."""
        return [entry for _, entry in self._entries()]

    def cut(self, done: int) -> None:
        """Remove the rounds that a resumed run will repeat; failed attempts stay."""
        if self.path.exists():
            kept = [line for line, entry in self._entries() if not entry["complete"] or entry["round"] <= done]
            write_file(self.path, b"".join(kept))

    def _entries(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Return the sound lines with what they hold."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for line in lines:  # what follows the last line's end is torn, or empty
            try:
                entry = json.loads(line)
                _ = entry["complete"], entry["round"] + 0
            except (ValueError, KeyError, TypeError):
                continue
            yield line + b"\n", entry

    def write(self, attendance: Attendance) -> None:
        """Append a line."""
        line = json.dumps(attendance.entry()) + "\n"
        with writing_to(self.path.parent), self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


class Memory(BaseModel):
    """What the server remembers of earlier rounds, beside the model; by client where nothing else is said.

    What checkpoints of earlier versions have beside this is ignored.
    """

    run: str  # lamina's name of the run
    last_task: int = 0  # its number, see `TASKS_PER_START`
    base: dict[int, str] = {}  # the token of the exchange whose client state was accepted
    older: dict[int, str] = {}  # the same as of the checkpoint before the last
    examples: dict[int, int] = {}  # as of the last round it took part in
    accepted: dict[int, list[str]] = {}  # digests of its last updates


def count_start(folder: Path, last_task: int) -> int:
    """Count one more start of the server, and return the number before the one of its first task.

    `last_task` is the last number that the checkpoint knows of; it counts if ``starts`` was lost.
    """
    path = folder / "starts"
    starts = int(path.read_text(encoding="ascii")) if path.exists() else 0
    start = max(starts, last_task // TASKS_PER_START) + 1
    with writing_to(folder):
        write_file(path, f"{start}\n".encode())
    return start * TASKS_PER_START
