"""A federation on this machine: a SuperLink and SuperNodes as processes, started, watched and ended together.

Every process has its own session, its own ``FLWR_HOME`` and a log file; all listen on the loopback interface only. They
are ended when the federation is closed, whatever ended it, and by a guard process if this one is killed. Nothing here
uses the network.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lamina.errors import BadInput, LaminaError
from lamina.flower import guard
from lamina.flower.keys import Authority, make_authority, make_node_key, private_folder, usable
from lamina.flower.signing import NODE_OPTION, is_pair, key_files, make_signing_key
from lamina.storage.files import cannot_write
from lamina.storage.locks import Lock
from lamina.text import plural

LINK = "federation"  # what the flwr command calls our SuperLink
HOST = "127.0.0.1"
START, COMMAND, GRACE = 90.0, 120.0, 8.0  # seconds: to come up, for a flwr command, to end when asked
RETRY = 5.0  # seconds between two tries to start a SuperNode again
REFUSED = 75.0  # seconds that a SuperLink may refuse the key of a SuperNode that died: seen for 55
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PRIVATE = 0o077  # the umask of all processes: databases, logs and records are their owner's alone
NODE_ID = re.compile(r"SuperNode ID: (\d+)")


class FederationFailed(LaminaError):
    """A process of the federation, or a command to it, failed; the text says which, why, and where its log is."""


class Process:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._from = log.stat().st_size if log.exists() else 0  # a log goes on when its process is started again
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                umask=PRIVATE,
            )
        self.pid = self._child.pid  # also its group's number
        self._over = False  # it and its group have been ended: the number may be somebody else's by now

    @property
    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._child.poll()

    def output(self) -> str:
        """What it has said since it was started, without colours."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return COLOURS.sub("", file.read().decode(errors="replace"))

    def why(self) -> str:
        """The line of its output that says most about why it ended."""
        return telling_line(self.output())

    def signal(self, number: int) -> None:
        """Send a signal to it and to its group."""
        if self._over:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def stop(self, grace: float = GRACE) -> None:
        """Ask it to end, wait, and kill what is left of its group."""
        if self.ended is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(grace)
        self.kill()

    def kill(self) -> None:
        """End it and its group at once."""
        self.signal(signal.SIGKILL)
        self._child.wait()
        self._over = True


def telling_line(text: str) -> str:
    r"""The line of a log that explains its end: the last error, or else the last line.

    >>> telling_line("INFO: starting\nValueError: no such port\n")
    'ValueError: no such port'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("Error", "ERROR", "error", "Failed", "failed", "exception", "Exit code")
    return next((line for line in reversed(lines) if any(mark in line for mark in marks)), lines[-1] if lines else "")


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make all files that this process writes meanwhile readable by their owner alone."""
    before = os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


@dataclass(frozen=True)
class RunStatus:
    """How the SuperLink says a run is doing."""

    status: str  # pending, starting, running, finished:completed, finished:failed, finished:stopped
    details: str
    bytes_in: int  # from the nodes and the server app to the SuperLink, as it counts them
    bytes_out: int

    @property
    def finished(self) -> bool:
        """Whether it has ended, however it did."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it ended well."""
        return self.status == "finished:completed"


class LocalFederation:
    """A SuperLink and `nodes` SuperNodes, all files in one private folder: keys, logs, database, state of the nodes.

    A context: entering starts everything and waits until every node has joined, leaving ends everything. Keys and the
    nodes' state are used again when the folder is; the SuperLink's database is not, so every start registers anew.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        secure: bool = True,
        port: int | None = None,
        node_config: Mapping[str, str | int | float | bool] | None = None,
        say: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if nodes < 1:
            raise BadInput(f"a federation of {plural(nodes, 'node')}: give 1 or more")
        self.folder, self.count, self.secure = folder.absolute(), nodes, secure
        self.port = port or free_port()
        self.node_ids: dict[int, int] = {}  # Flower's number of a node -> number of its client
        self.nodes: dict[int, Process] = {}  # by client
        self.superlink: Process | None = None
        self.mark = secrets.token_hex(8)
        self._node_config = dict(node_config or {})
        self._say, self._warn = say, warn or say  # what is done now; what happened to a node
        self._processes: list[Process] = []
        self._guard: subprocess.Popen[str] | None = None
        self._lock: Lock | None = None
        self._died: dict[int, tuple[float, float]] = {}  # client -> when its node died, when to try again

    # --- the whole ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalFederation:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @private_files()
    def start(self) -> None:
        """Make the keys that are missing; start the SuperLink and the nodes; wait until all have joined."""
        if not is_free(self.port):
            raise BadInput(f"port {self.port} is in use: choose another with --port, or none for a free one")
        self._lock = Lock(private_folder(self.folder))
        self.folder.chmod(0o700)  # also one from before
        for name in ("keys", "superlink", "command", "logs", "app", *map(node_name, range(self.count))):
            private_folder(self.folder / name).chmod(0o700)
        if not is_pair(*key_files(self.folder / "keys")):
            for file in key_files(self.folder / "keys"):
                file.unlink(missing_ok=True)
            make_signing_key(self.folder / "keys")
        if self.secure:
            self._make_keys()
        self._start_guard()
        self._say("starting the SuperLink")
        self._start_superlink()
        ids: dict[int, int] = {}
        if self.secure:
            self._say(f"registering {plural(self.count, 'node')}")
            with ThreadPoolExecutor(2) as pool:
                ids = dict(enumerate(pool.map(self.register, map(self.node_key, range(self.count)))))
        self._say(f"starting {self.count} SuperNodes")
        for client in range(self.count):
            self.start_node(client)
        joined = {client: self.wait_for_node(client) for client in range(self.count)}
        if self.secure and joined != ids:
            raise FederationFailed(f"the SuperLink registered nodes {ids}, but {joined} have joined")
        self.node_ids = {node: client for client, node in joined.items()}

    def close(self) -> None:
        """End every process of the federation. May be called again."""
        for process in self._processes:
            if process is not self.superlink and process.ended is None:
                process.signal(signal.SIGTERM)
        for process in self._processes:
            if process is not self.superlink:
                process.stop()
        if self.superlink is not None:
            self.superlink.stop()
        self._processes.clear()
        self.nodes.clear()
        self.superlink = None
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()  # it ends what has escaped, and itself
            self._guard.wait()
            self._guard = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def _launch(self, name: str, command: Sequence[str], home: str) -> Process:
        path = executable(command[0])
        log = self.folder / "logs" / f"{name}.log"
        try:
            process = Process(name, [path, *command[1:]], log, self.environment(home))
        except OSError as error:
            raise cannot_write(log.parent, error) from error
        self._processes.append(process)
        self._tell_guard(f"+{process.pid}")
        return process

    def _retire(self, process: Process) -> None:
        """End what is left of a process that has ended, and forget it: its number may be used again."""
        process.kill()
        if process in self._processes:
            self._processes.remove(process)
            self._tell_guard(f"-{process.pid}")

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed: nothing but our own end would have needed it
                self._guard.stdin.write(line + "\n")

    def environment(self, home: str) -> dict[str, str]:
        """The environment of a process of the federation; `home` is the folder that is its FLWR_HOME."""
        here = str(Path.cwd())
        paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        quiet = {
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else Flower asks the network for packages
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_PROXY": f"{HOST},localhost",
            "no_proxy": f"{HOST},localhost",
        }
        return {
            **os.environ,
            **quiet,
            "FLWR_HOME": str(self.folder / home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(paths),  # models and algorithms of the user's own
            "PYTHONUNBUFFERED": "1",
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),  # many processes, few cores
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.count))),
            guard.VARIABLE: self.mark,
        }

    # --- keys --------------------------------------------------------------------------------------------------------

    @property
    def authority(self) -> Authority:
        """The keys of the server's side."""
        return Authority(self.folder / "keys")

    def node_key(self, client: int) -> Path:
        """The private key of a client's node."""
        return self.folder / "keys" / node_name(client)

    @property
    def signing_key(self) -> Path:
        """The server's private key that signs tasks."""
        return key_files(self.folder / "keys")[0]

    def _make_keys(self) -> None:
        """Make the keys that are not there; an authority that cannot be used any more is made anew."""
        if not usable(self.authority):
            for file in self.authority.files:
                file.unlink(missing_ok=True)
            make_authority(self.folder / "keys")
        for key in map(self.node_key, range(self.count)):
            if not (key.exists() and key.with_name(key.name + ".pub").exists()):
                for file in (key, key.with_name(key.name + ".pub")):
                    file.unlink(missing_ok=True)
                make_node_key(key)

    # --- the SuperLink -----------------------------------------------------------------------------------------------

    def _start_superlink(self) -> None:
        home = self.folder / "superlink"
        for old in home.glob("state.db*"):
            old.unlink()  # registrations of the last start, whose nodes would be refused for a minute
        safety = ["--insecure"]
        if self.secure:
            ca, _, certificate, key = map(str, self.authority.files)
            safety = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
            safety.append("--enable-supernode-auth")
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port), *safety]
        self.superlink = self._launch("superlink", [*command, "--database", str(home / "state.db")], "superlink")
        certificate_line = f"root-certificates = {json.dumps(str(self.authority.certificate))}"
        trust = certificate_line if self.secure else "insecure = true"
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{HOST}:{self.port}"\n{trust}\n'
        (self.folder / "command" / "config.toml").write_text(text, encoding="utf-8")
        deadline = time.monotonic() + START
        while not self._healthy():
            if self.superlink.ended is not None:
                raise self.failed(self.superlink, f"the SuperLink ended with code {self.superlink.ended}")
            if time.monotonic() > deadline:
                raise self.failed(self.superlink, f"the SuperLink does not answer on {HOST}:{self.port}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        connection: http.client.HTTPConnection
        if self.secure:
            trusted = ssl.create_default_context(cafile=str(self.authority.certificate))
            connection = http.client.HTTPSConnection(HOST, self.port, timeout=5, context=trusted)
        else:
            connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def failed(self, process: Process, what: str) -> FederationFailed:
        """The error for a process: what happened, what its log says of it, where the log is."""
        said = process.why()
        return FederationFailed(f"{what}{': ' + said if said else ''} (log: {process.log})")

    # --- nodes -------------------------------------------------------------------------------------------------------

    def register(self, key: Path) -> int:
        """Tell the SuperLink a node's public key; returns Flower's number of the node."""
        answer = self.flwr("supernode", "register", f"{key}.pub", LINK, "--format", "json")
        return int(answer["node-id"])

    def start_node(self, client: int) -> Process:
        """Start a client's SuperNode."""
        settings: dict[str, str | int | float | bool] = {
            "partition-id": client,
            "num-partitions": self.count,
            "state-dir": str(self.folder / node_name(client) / "state"),
            NODE_OPTION: str(key_files(self.folder / "keys")[1]),
            **self._node_config,
        }
        self.nodes[client] = self._start_supernode(node_name(client), settings)
        return self.nodes[client]

    def start_stranger(
        self, name: str, *, key: Path | None = None, certificate: Path | None = None, port: int | None = None
    ) -> Process:
        """Start a SuperNode that belongs to no client: to see whether its key and certificate are let in."""
        private_folder(self.folder / name)
        return self._start_supernode(name, {}, key=key or self.node_key(0), certificate=certificate, port=port)

    def _start_supernode(
        self,
        name: str,
        settings: Mapping[str, str | int | float | bool],
        *,
        key: Path | None = None,
        certificate: Path | None = None,
        port: int | None = None,
    ) -> Process:
        safety = ["--insecure"]
        if self.secure:
            safety = ["--root-certificates", str(certificate or self.authority.certificate)]
            safety += ["--auth-supernode-private-key", str(key or self.folder / "keys" / name)]
        command = ["flower-supernode", *safety, "--superlink", f"{HOST}:{port or self.port}"]
        command += ["--host", HOST, "--port", str(free_port())]
        if settings:
            config = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
            command += ["--node-config", config]
        return self._launch(name, command, name)

    def wait_for_node(self, client: int, patience: float = START) -> int:
        """Wait until a node has joined, starting it again while the SuperLink holds it for still alive; its number."""
        deadline = time.monotonic() + patience
        while True:
            process = self.nodes[client]
            if found := NODE_ID.search(process.output()):
                return int(found[1])
            if process.ended is not None and time.monotonic() + RETRY > deadline:
                raise self.failed(process, f"node {client} could not join (code {process.ended})")
            if process.ended is not None and not self._may_be_refused(process):
                raise self.failed(process, f"node {client} ended with code {process.ended}")
            if time.monotonic() > deadline:
                raise self.failed(process, f"node {client} has not joined after {patience:.0f} s")
            if process.ended is not None:
                self._retire(process)
                time.sleep(RETRY)
                self.start_node(client)
            time.sleep(0.1)

    def _may_be_refused(self, process: Process) -> bool:
        """Whether a node ended because the SuperLink has not noticed yet that its predecessor is gone."""
        return client_of(process.name) in self._died and "activate" in process.output()

    def tend(self) -> None:
        """Start nodes again that have ended, and notice a SuperLink that has; call this now and then."""
        if self.superlink is not None and self.superlink.ended is not None:
            raise self.failed(self.superlink, f"the SuperLink ended with code {self.superlink.ended}")
        now = time.monotonic()
        for client, process in list(self.nodes.items()):
            if process.ended is None:
                if client in self._died and NODE_ID.search(process.output()):
                    self._warn(f"node {client} is back")
                    del self._died[client]
                continue
            since, again = self._died.get(client, (now, now))
            if client not in self._died:
                self._warn(f"node {client} ended with code {process.ended}: starting it again")
            elif now - since > REFUSED + START:
                raise self.failed(process, f"node {client} ended with code {process.ended}, and does not come back")
            if now >= again:
                self._retire(process)
                self.start_node(client)
                again = now + RETRY
            self._died[client] = (since, again)

    # --- runs --------------------------------------------------------------------------------------------------------

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """A command to the SuperLink, as a user would give it; its JSON answer."""
        command = [executable("flwr"), *arguments]
        name = " ".join(["flwr", *arguments[:1]])
        try:
            done = subprocess.run(
                command,
                env=self.environment("command"),
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND,
                start_new_session=True,
                umask=PRIVATE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FederationFailed(f"{name} did not end within {COMMAND:.0f} s") from error
        text = COLOURS.sub("", done.stdout.decode(errors="replace"))
        answer = _json_in(text)
        if done.returncode or not answer.get("success"):
            said = str(answer.get("error-message") or telling_line(text + "\n" + done.stderr.decode(errors="replace")))
            raise FederationFailed(f"{name} failed: {' '.join(said.split())}")
        return answer

    def submit(self, app: Path, run_config: Mapping[str, str | int | float | bool] | None = None) -> int:
        """Start a run of a Flower app on the federation; returns the run's number."""
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in (run_config or {}).items())
        answer = self.flwr("run", str(app), LINK, *(["--run-config", settings] if settings else []), "--format", "json")
        return int(answer["run-id"])

    def follow(self, run: int) -> Process:
        """A process that writes a run's log into a file, and ends when the run does."""
        return self._launch(f"run-{run}", ["flwr", "log", str(run), LINK, "--stream"], "command")

    def status(self, run: int) -> RunStatus:
        """How a run is doing."""
        found = self.flwr("ls", LINK, "--run-id", str(run), "--format", "json")["runs"][0]
        traffic = found["network-traffic"]
        details = str(found.get("status-details", ""))
        return RunStatus(found["status"], details, int(traffic["inbound-bytes"]), int(traffic["outbound-bytes"]))

    def stop_run(self, run: int) -> None:
        """Ask a run to stop."""
        self.flwr("stop", str(run), LINK, "--format", "json")

    def wait(
        self, run: int, *, timeout: float | None = None, tick: Callable[[], None] = lambda: None, every: float = 0.5
    ) -> RunStatus:
        """Wait until a run has ended, calling `tick` now and then, and starting nodes again that die."""
        deadline = None if timeout is None else time.monotonic() + timeout
        follower = self.follow(run)
        asked = 0.0
        while True:
            tick()
            self.tend()
            # the follower ends with the run; it may also have lost its connection, so the SuperLink is asked
            if follower.ended is not None and time.monotonic() - asked > RETRY:
                asked = time.monotonic()
                status = self.status(run)
                if status.finished:
                    tick()
                    self._retire(follower)
                    return status
                self._retire(follower)
                follower = self.follow(run)
            if deadline is not None and time.monotonic() > deadline:
                raise FederationFailed(f"run {run} has not ended after {timeout:.0f} s (log: {follower.log})")
            time.sleep(every)

    def left(self) -> list[int]:
        """The federation's processes that run now; after `close`, none (known on Linux only)."""
        return guard.marked(self.mark)


def node_name(client: int) -> str:
    """What the node of a client is called in file names."""
    return f"node-{client}"


def client_of(name: str) -> int:
    """The client whose node has this name."""
    return int(name.removeprefix("node-"))


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nobody listens on a port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def executable(name: str) -> str:
    """A program of Flower's: the one installed beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FederationFailed(f"the program {name} is not installed: pip install -e '.[flower]'")
    return found


def _json_in(text: str) -> dict[str, Any]:
    """The JSON table in a command's output, which may have other lines before it."""
    start = text.find("{")
    with contextlib.suppress(ValueError):
        value, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else "")
        if isinstance(value, dict):
            return value
    return {}
