"""Leases: one process writes to a folder at a time, wherever it runs; a lease whose owner has died is taken over.

A lease is a small file in the folder that it protects. A thread of its owner renews a counter in it every few seconds.
Another process takes the lease over at once if the owner ran on this machine and has ended, else when the counter has
not changed for `LEASE_S` seconds of its own clock: clocks of two machines are never compared. Nothing here needs
`flock`, which some network file systems lack: creating a file exclusively and renaming one are enough.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lamina.base.atomic import PARTIAL
from lamina.base.errors import BadInput
from lamina.storage.files import writing_to

LEASE_S = 60.0  # without a renewal, after which others take a lease over
RENEWAL_S = 5.0  # between two renewals
POLL_S = 0.2  # between two looks at a lease of another process
NAME = "lease"

log = logging.getLogger(__name__)


class Leased(BadInput):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class Owner:
    """The process that wrote a lease."""

    id: str = ""  # of the lease
    process: int = 0  # its number; 0 if the lease cannot be read
    host: str = "unknown"
    machine: str = ""  # its boot and process namespace, in which the number is unique; empty where there is no /proc
    started: str = ""  # when, in the clock of its machine: tells it from a later process of the same number
    settings: Mapping[str, Any] | None = None  # of the work that it shares with others

    @classmethod
    def of(cls, content: bytes) -> Owner:
        """Return the owner that a lease's content names."""
        try:
            facts = json.loads(content)
            names = ("id", "process", "host", "machine", "started", "settings")
            return cls(**{name: facts[name] for name in names})
        except (ValueError, TypeError, KeyError):  # it is being written, or damaged
            return cls()

    def __str__(self) -> str:
        return f"process {self.process or 'unknown'} on {self.host}"

    @property
    def state(self) -> str:
        """Return "running", "stopped" (by a signal) or "ended", if that can be seen from here; else "unknown"."""
        if not self.machine or self.machine != this_machine():
            return "unknown"
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return "ended"
        except OSError:  # it is another user's
            pass
        letter, started = process_state(self.process)
        if not letter:
            return "unknown"
        is_same = started == self.started and letter not in "ZX"  # Z: killed, and not yet noticed by its parent
        return "ended" if not is_same else "stopped" if letter == "T" else "running"


@functools.cache
def this_machine() -> str:
    """Return the boot of this machine and this process's namespace; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (it is not a path)
    except OSError:
        return ""


def process_state(process: int) -> tuple[str, str]:
    """Return the letter of a process's state and its start time, as /proc has them; empty if they cannot be read."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


class Lease:
    """The right to write to a folder, renewed by a thread until it is released; made by `take` and `claim`."""

    def __init__(self, path: Path, *, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self._is_new_folder = path, not path.parent.exists()
        self._process, self._count = os.getpid(), 0
        self._facts = {
            "process": self._process,
            "host": socket.gethostname(),
            "machine": this_machine(),
            "started": process_state(self._process)[1],
            "settings": settings,
        }
        self._start = f'{{"id": "{secrets.token_hex(8)}", '.encode()

    @property
    def _content(self) -> bytes:
        """Return the content, which is equally long after every renewal."""
        return self._start + f'"renewals": "{self._count:012d}", {json.dumps(self._facts)[1:]}\n'.encode()

    def create(self) -> bool:
        """Create the file and start to renew it; return whether there was none."""
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
                break
            except FileExistsError:
                return False
            except FileNotFoundError:  # another process has just removed the empty folder
                continue
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self._content)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        _renewed.add(self)
        return True

    def renew(self) -> None:
        """Count a renewal, unless the file is no longer ours."""
        # In place and by the file that was opened: if it is taken over meanwhile, this changes the old one.
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            if file.read(len(self._start)) == self._start:
                self._count += 1
                file.seek(0)
                file.write(self._content)

    @property
    def is_ours(self) -> bool:
        """Return whether the file holds this lease; a forked process does not own its parent's."""
        return os.getpid() == self._process and (_read(self.path) or b"").startswith(self._start)

    def refuse_lost(self) -> None:
        """Raise an error if the lease was taken over, or the folder was removed, emptied or replaced."""
        if self.is_ours:
            return
        time.sleep(POLL_S)  # another process may be looking at it, see `_remove`
        if self.is_ours:
            return
        content, folder = _read(self.path), self.path.parent
        if content is None:
            raise lost(folder)
        raise BadInput(
            f"the run in '{folder}' was taken over by {Owner.of(content)}, after this process had not renewed its "
            f"lease for {LEASE_S:g} s: nothing more is written by this one; wait for the other, or end it and run the "
            "command again"
        )

    def release(self) -> None:
        """Let other processes write to the folder; remove it if it is new and empty."""
        _renewed.discard(self)
        if self.is_ours:
            self.path.unlink(missing_ok=True)
            if self._is_new_folder:
                with contextlib.suppress(OSError):  # it is not empty
                    self.path.parent.rmdir()


class Renewal:
    """A thread that renews the leases of this process while there are any."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._lock:
            self._leases.add(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lamina-leases", daemon=True)
                self._thread.start()

    def discard(self, lease: Lease) -> None:
        """No longer renew a lease."""
        with self._lock:
            self._leases.discard(lease)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(RENEWAL_S)
            with self._lock:
                leases = list(self._leases)
                if not leases:
                    self._thread = None
                    return
            for lease in leases:
                lease.renew()


_renewed = Renewal()
_seen: dict[Path, tuple[bytes, float]] = {}  # the leases of others: their content, and when it was first seen


def _after_fork() -> None:
    """Forget the parent's leases: it has the thread that renews them."""
    global _renewed
    _renewed = Renewal()


os.register_at_fork(after_in_child=_after_fork)


def claim(folder: Path, name: str = NAME, *, settings: Mapping[str, Any] | None = None) -> Lease | None:
    """Return a new lease of a folder, or None if another process may hold one; what is abandoned is taken over."""
    lease = Lease(folder / name, settings=settings)
    with writing_to(folder):
        while not lease.create():
            content = _read(lease.path)
            if content is not None and not (_is_abandoned(lease.path, content) and _remove(lease.path, content)):
                return None
    return lease


def take(folder: Path) -> Lease:
    """Return a new lease of a folder; raise `Leased` if another process is certain to hold one."""
    while (lease := claim(folder)) is None:
        owner = _certain_owner(folder / NAME)
        if owner is not None:
            what = f"{owner} is writing to the folder '{folder}'"
            raise Leased(f"{what}: wait until it ends, or choose another with --out (out=…)")
    return lease


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait for a folder that several processes share, and hold it until the block ends."""
    while (lease := claim(folder)) is None:
        time.sleep(POLL_S / 10)
    try:
        yield
    finally:
        lease.release()


def join(folder: Path, settings: Mapping[str, Any]) -> Lease:
    """Return a lease that shows others that this process works in a folder, and with which settings."""
    lease = claim(folder, f"{NAME}-{secrets.token_hex(4)}", settings=settings)
    assert lease is not None  # its name is new
    return lease


def others(folder: Path, own: Lease | None = None) -> list[Owner]:
    """Return the other processes that are certain to have joined a folder; remove what killed ones have left."""
    paths = [path for path in folder.glob(f"{NAME}-????????") if own is None or path != own.path]
    return [owner for path in paths if (owner := _certain_owner(path)) is not None]


def count_joined(folder: Path) -> int:
    """Return how many processes seem to have joined a folder."""
    return sum(1 for _ in folder.glob(f"{NAME}-????????"))


def is_held(folder: Path) -> bool:
    """Return whether a process seems to write to a folder, or to have joined it."""
    contents = {path: _read(path) for path in (folder / NAME, *folder.glob(f"{NAME}-????????"))}
    return any(content is not None and not _is_abandoned(path, content) for path, content in contents.items())


def is_lease(name: str) -> bool:
    """Return whether a file's name is that of a lease; "lock" is of earlier versions."""
    return name == "lock" or name.partition("-")[0].partition(".")[0] == NAME


def _certain_owner(path: Path) -> Owner | None:
    """Return the owner of a lease once it is seen to be alive; None if there is none. Remove an abandoned lease."""
    first = _read(path)
    has_waited = False
    while (content := _read(path)) is not None:
        owner = Owner.of(content)
        if owner.state == "running" or content != first:
            return owner
        if _is_abandoned(path, content) and _remove(path, content):
            return None
        if not has_waited:
            log.warning("waiting up to %g s to see whether %s still uses '%s'", LEASE_S, owner, path.parent)
            has_waited = True
        time.sleep(POLL_S)
    return None


def _is_abandoned(path: Path, content: bytes) -> bool:
    """Return whether the owner of a lease has ended, or has not renewed it for too long."""
    state = Owner.of(content).state
    if state in ("running", "ended"):  # a process that is seen to run may be slow to renew
        return state == "ended"
    before, since = _seen.get(path, (None, 0.0))
    if before != content:
        _seen[path] = content, time.monotonic()
        return False
    return time.monotonic() - since >= LEASE_S


def _remove(path: Path, content: bytes) -> bool:
    """Remove an abandoned lease; return False if it has been renewed, or another process takes it over."""
    # One process at a time may remove this very lease: one that comes late must not remove that of the new owner.
    removal = claim(path.parent, f"{path.name}.{Owner.of(content).id}")
    if removal is None:
        return False
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        if _read(path) != content:
            return False
        path.rename(aside)
        if _read(aside) != content:  # in this moment its owner woke up, and renewed or released it
            aside.replace(path)
            return False
        aside.unlink()
        _seen.pop(path, None)
        return True
    except FileNotFoundError:  # released by its owner
        return True
    finally:
        removal.release()


def _read(path: Path) -> bytes | None:
    """Return the content of a lease; None if there is no file, nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return b""


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def lost(folder: Path) -> BadInput:
    """Return the error for a folder that no longer holds what was written to it."""
    return BadInput(
        f"the folder '{folder}' was removed, emptied or replaced, or continued by another process, while this run was "
        "writing to it: nothing more is written there; run the command again"
    )
