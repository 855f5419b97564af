"""Start processes, watch them, and have a guard end them together, whatever ends this one."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lamina.base.errors import LaminaError
from lamina.flower.local import guard
from lamina.storage.files import writing_to

T = TypeVar("T")
HOST = "127.0.0.1"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else Flower asks the network for packages
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "NO_PROXY": f"{HOST},localhost",
    "no_proxy": f"{HOST},localhost",
    "PYTHONUNBUFFERED": "1",
}


class FederationFailed(LaminaError):
    """A process of the federation, or a command to it, failed; the text says which, why, and where its log is."""


class Process:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._start = log.stat().st_size if log.exists() else 0  # a restarted process appends to its log
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._child.pid  # also the id of its group

    @property
    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._child.poll()

    def output(self) -> str:
        """Return what it has written since it was started, without colours."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            return COLOURS.sub("", file.read().decode(errors="replace"))

    @property
    def how_it_ended(self) -> str:
        """How it ended: with an exit code or by a signal."""
        code = self.ended or 0
        return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"

    def failed(self, what: str) -> FederationFailed:
        """Return an error: what happened, what the log says about it, and where the log is."""
        why = telling_line(self.output()) if (self.ended or 0) >= 0 else ""  # a killed process could not say why
        return FederationFailed(f"{what}{': ' + why if why else ''} (log: {self.log})")

    def wait_for(self, ready: Callable[[], T | None], what: str, seconds: float) -> T:
        """Return what `ready` returns as soon as it is true; raise an error if the process ends or time is up."""
        deadline = time.monotonic() + seconds
        while not (result := ready()):
            if self.ended is not None:
                raise self.failed(f"{what} {self.how_it_ended}")
            if time.monotonic() > deadline:
                raise self.failed(f"{what} is not ready after {seconds:.0f} s")
            time.sleep(0.1)
        return result


class Processes:
    """Processes whose logs and homes are in one folder; a guard process ends them, also if this process is killed."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.mark = secrets.token_hex(8)  # in the environment of every process
        self._guard: subprocess.Popen[bytes] | None = None

    def start_guard(self) -> None:
        """Start the guard."""
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def launch(self, name: str, command: Sequence[str], home: str) -> Process:
        """Start a program of Flower's; `home` is its own folder, and ``logs/<name>.log`` its log."""
        program = executable(command[0])
        log = self.folder / "logs" / f"{name}.log"
        with writing_to(log.parent):
            return Process([program, *command[1:]], log, self.environment(home))

    def close(self) -> None:
        """Have the guard end every process, those included that Flower has started. May be called again."""
        if self._guard is not None:
            self._guard.communicate()  # closes its input
            self._guard = None

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment of a process; `home` is the folder that is its FLWR_HOME."""
        paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **os.environ,
            **QUIET,
            "FLWR_HOME": str(self.folder / home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(paths),  # for the user's own models and algorithms
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),  # many processes, few cores
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads)),
            guard.VARIABLE: self.mark,
        }


def telling_line(text: str) -> str:
    r"""Return the line of a log that explains its end: the last error, or else the last line.

    >>> telling_line("INFO: starting\nValueError: no such port\n")
    'ValueError: no such port'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("Error", "ERROR", "error", "Failed", "failed", "exception", "Exit code")
    return next((line for line in reversed(lines) if any(mark in line for mark in marks)), lines[-1] if lines else "")


def executable(name: str) -> str:
    """Return a program of Flower's: the one installed beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FederationFailed(f"the program {name} is not installed: pip install -e '.[flower]'")
    return path


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
