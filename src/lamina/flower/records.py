"""Who took part in a round, who did not and why: ``federation.jsonl`` in the run's folder, a line per attempt."""

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
        """Somebody did not answer."""
        self.missing.append(_entry(client, node) | {"why": why})

    def refuse(self, client: int | None, node: int | None, why: str) -> None:
        """Somebody's answer or claim is not used."""
        self.refused.append(_entry(client, node) | {"why": why})

    def accept(self, client: int, node: int) -> None:
        """Somebody's update is in the mean."""
        self.took_part.append(_entry(client, node))

    def note(self, text: str) -> None:
        """Anything else worth knowing, once."""
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """Whoever is not in the mean, in words."""
        every = [(entry, "") for entry in self.missing] + [(entry, "refused: ") for entry in self.refused]
        return [
            f"{name_of(entry['client'], entry['node'])}: {word}{entry['why']}" for entry, word in every
        ] + self.notes


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
        """Take out what a restarted run will do again; attempts that came to nothing stay."""
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
        """Add a line."""
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(vars(attendance)) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
