"""Attendance of rounds: ``federation.jsonl`` in the run's folder says who took part, who did not, and why."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.storage.files import cannot_write, write_file


@dataclass
class Attendance:
    """One attempt at a round. Node ids are text: they are too long for many readers of JSON."""

    round: int
    attempt: int = 1
    complete: bool = False  # enough took part: the round counts
    took_part: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def miss(self, client: int | None, node: int | None, why: str) -> None:
        """Record a client or node that did not answer."""
        self.missing.append(_entry(client, node) | {"why": why})

    def refuse(self, client: int | None, node: int | None, why: str) -> None:
        """Record a client or node whose answer or claim is not used."""
        self.refused.append(_entry(client, node) | {"why": why})

    def accept(self, client: int, node: int) -> None:
        """Record a client whose update is in the mean."""
        self.took_part.append(_entry(client, node))

    def note(self, text: str) -> None:
        """Record anything else, once."""
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """Return a line for every client that is not in the mean, and the notes."""
        missing = [f"{name_of(one['client'], one['node'])}: {one['why']}" for one in self.missing]
        refused = [f"{name_of(one['client'], one['node'])}: refused: {one['why']}" for one in self.refused]
        return [*missing, *refused, *self.notes]


def _entry(client: int | None, node: int | None) -> dict[str, Any]:
    return {"client": client, "node": None if node is None else str(node)}


def name_of(client: int | None, node: int | str | None) -> str:
    """Return a client and its node in words."""
    if client is None:
        return f"node {node}"
    return f"client {client}" + (f" (node {node})" if node is not None else "")


class Journal:
    """Writes the attendance of every attempt."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "federation.jsonl"

    def cut(self, done: int) -> None:
        """Remove the rounds that a resumed run will repeat; failed attempts stay."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().split(b"\n")[:-1]:  # what follows the last line's end is torn, or empty
            try:
                entry = json.loads(line)
                if not entry["complete"] or entry["round"] <= done:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_file(self.path, b"".join(kept))

    def write(self, attendance: Attendance) -> None:
        """Append a line."""
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(vars(attendance)) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
