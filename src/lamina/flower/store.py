"""A node's files between two messages: the client's state, and Down fields that seldom change.

Under the node's state folder every run has one of its own, and in it every client:

- ``state-<round>-<token>.safetensors``: the client's state after that exchange. The server names the exchange it last
  accepted (the base), so a reply that was lost never lets the state run ahead;
- ``last-task``: the largest number of a task that was begun; a task whose number is not larger is a replay;
- ``held-<field>-<digest>.safetensors``: a cached Down field, which the server need not send again.

All of them carry a checksum. A damaged file counts as lost: the node says so, and the server starts the
client again or sends the field again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.storage.checkpoint import UNREADABLE, pack, unpack
from lamina.storage.files import writing_to

log = logging.getLogger(__name__)


class Store:
    """One client of one run on this node's disk; `Task` validates the names that files are made of."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        self.folder = root / run / f"client-{client:d}"

    def refuse_replay(self, number: int) -> None:
        """Refuse a task that is not newer than every one before it, and remember this one."""
        path = self.folder / "last-task"
        try:
            last = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            last = 0
        if number <= last:
            raise BadInput(
                "refused a task that is older than one this node has already had: it is a replay, or the server "
                "resumes an old copy of its run folder (then start it again, until its tasks are newer)"
            )
        self._write(path.name, str(number).encode())

    def load_state(self, token: str, like: Any) -> Any | None:
        """Return the client's state after an exchange; None if it is missing or unusable."""
        wanted = {name: (value.shape, value.dtype) for name, value in like._asdict().items() if value is not None}
        for path in self.folder.glob(f"state-*-{token}.safetensors"):
            tensors = _read(path)
            if tensors is not None and {n: (t.shape, t.dtype) for n, t in tensors.items()} == wanted:
                return like._replace(**{n: t.to(getattr(like, n).device) for n, t in tensors.items()})
        return None

    def save_state(self, round: int, token: str, record: Any) -> None:
        """Keep the client's state after an exchange, beside those of earlier ones."""
        tensors = {name: value for name, value in record._asdict().items() if value is not None}
        if tensors:
            self._write(f"state-{round:06}-{token}.safetensors", pack(tensors))

    def forget_all_but(self, tokens: Iterable[str]) -> None:
        """Delete the states after all other exchanges: the server will not ask for them again."""
        kept = set(tokens)
        for path in self.folder.glob("state-*-*.safetensors"):
            if path.stem.rpartition("-")[2] not in kept:
                path.unlink(missing_ok=True)

    def load_held(self, field: str, tag: str) -> Tensor | None:
        """Return the field that was kept with this tag, such as its digest; None if it is missing or damaged."""
        tensors = _read(self.folder / f"held-{field}-{tag}.safetensors")
        return None if tensors is None else tensors.get("value")

    def save_held(self, field: str, tag: str, value: Tensor) -> None:
        """Keep a field in place of its older versions."""
        name = f"held-{field}-{tag}.safetensors"
        self._write(name, pack({"value": value}))
        for path in self.folder.glob(f"held-{field}-*"):
            if path.name != name:
                path.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        with writing_to(self.folder):
            self.folder.parent.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)  # what a client remembers tells something about its data
            write_file(self.folder / name, data)


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        return {name: value.clone() for name, value in unpack(path.read_bytes()).items()}
    except OSError:
        return None
    except UNREADABLE as error:
        log.warning("'%s' is damaged (%s) and not used", path, error)
        return None
