"""The ledger of releases: which rounds were published with a run's noise, on disk before anything leaves the process.

The same noise on two different means would reveal their difference. The ledger lies beside the secret that the noise is
drawn from, not in the run folder, because the noise of a run started again in another folder is the same. It is a file
of JSON lines, one for each release: its round, a tag that stands for the mean (a keyed digest, which tells nothing
without the secret), and the salt of its noise.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lamina.base.atomic import sync_folder
from lamina.base.errors import BadInput
from lamina.storage.files import writing_to

log = logging.getLogger(__name__)


class Releases:
    """The ledger of one run's noise.

    Args:
        path: of the file, which is made with the first release.
        can_repeat: whether a round may be released with another mean. Its noise is then drawn anew with a random salt,
            and the release counts in ε. Otherwise it is refused, and the noise has no salts.
    """

    def __init__(self, path: Path, *, can_repeat: bool = False) -> None:
        self.path, self.can_repeat = path, can_repeat
        self._rounds: dict[int, dict[str, str]] = {}  # as read so far: the salt by tag, in the order of the releases
        self._end = 0  # of what was read, in bytes

    def enter(self, number: int, tag: str) -> tuple[int, str]:
        """Return how often a round was released before with other means, and the salt of the noise of this release.

        The same tag again is no new release: it gets the same answer.
        """
        with self._locked():
            releases = self._rounds.get(number, {})
            if tag not in releases:
                self._refuse(number, releases)
                self._append(number, tag, secrets.token_hex(16) if self.can_repeat else "")
                if releases:
                    log.warning("round %d is released again with other updates, which counts in ε", number)
            releases = self._rounds[number]
            return list(releases).index(tag), releases[tag]

    def first_salt(self, number: int) -> str:
        """Return the salt of a round's first release; none if it is not released yet."""
        return next(iter(self._rounds.get(number, {}).values()), "")

    def counts(self) -> dict[int, int]:
        """Return how often each round was released."""
        if self.path.exists():
            with self._locked():
                pass
        return {number: len(releases) for number, releases in self._rounds.items()}

    def _refuse(self, number: int, releases: dict[str, str]) -> None:
        if number > 1 and number - 1 not in self._rounds:
            raise BadInput(
                f"privacy: the ledger of releases '{self.path}' lacks round {number - 1}, which this run has finished: "
                "restore the file, which belongs with the secret, or start a new run with another train.seed"
            )
        if releases and not self.can_repeat:
            raise BadInput(
                f"privacy: round {number} was released before with the same noise on another mean (other initial "
                "weights, code, precision, engine, device, number of threads or runs beside it), and the difference "
                "would reveal uploads: compute as before, or choose another train.seed or privacy.secret, for a new "
                "run with a budget of its own"
            )

    def _append(self, number: int, tag: str, salt: str) -> None:
        self._file.seek(self._end)
        self._file.truncate()  # a line that a killed process left half-written
        line = json.dumps({"round": number, "mean": tag, "salt": salt}).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._read()

    def _read(self) -> None:
        """Read the lines that were added, also by other processes."""
        if self._file.seek(0, os.SEEK_END) < self._end:
            self._rounds, self._end = {}, 0
        self._file.seek(self._end)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
                self._rounds.setdefault(int(entry["round"]), {})[str(entry["mean"])] = str(entry["salt"])
            except (ValueError, KeyError, TypeError):
                raise BadInput(
                    f"privacy: the ledger of releases '{self.path}' is damaged at byte {self._end}: restore it from a "
                    "copy, or start a new run with another train.seed"
                ) from None
            self._end += len(line)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Open the file, keep other processes out of it, and read what is new."""
        import fcntl  # which Windows lacks, and only private runs need

        with writing_to(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_new = not self.path.exists()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(handle, "r+b") as self._file:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if is_new:
                    sync_folder(self.path.parent)
                    sync_folder(self.path.parent.parent)
                self._read()
                yield
