"""A SuperLink and SuperNodes on the loopback interface, with keys of their own; nothing here uses the network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from lamina.errors import BadInput
from lamina.flower import keys
from lamina.flower.local import processes
from lamina.flower.local.processes import HOST, FederationFailed, Process, Processes
from lamina.flower.signing import NODE_OPTION, is_pair
from lamina.storage.locks import Lock
from lamina.text import plural

LINK = "federation"  # what the flwr command calls our SuperLink
START_S, COMMAND_S = 90.0, 120.0  # for a process to come up, for a flwr command
RETRY_S = 5.0  # between two tries to start a SuperNode again
REFUSED_S = 75.0  # that a SuperLink may refuse the key of a SuperNode that died: seen for 55
NODE_ID = re.compile(r"SuperNode ID: (\d+)")
Settings = Mapping[str, str | int | float | bool]


class RunStatus(NamedTuple):
    """How the SuperLink says a run is doing."""

    status: str  # pending, starting, running, finished:completed, finished:failed, finished:stopped
    details: str


class LocalFederation:
    """A SuperLink and `nodes` SuperNodes, all files in one private folder: keys, logs, database, state of the nodes.

    A context: entering starts everything and waits until every node has joined, leaving ends everything. Keys and the
    nodes' state are used again when the folder is; the SuperLink's database is not, so every start registers the nodes.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        secure: bool = True,
        port: int | None = None,
        say: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if nodes < 1:
            raise BadInput(f"a federation of {plural(nodes, 'node')}: give 1 or more")
        self.folder, self.count, self.secure = folder.absolute(), nodes, secure
        self.port = port or processes.free_port()
        self.authority = keys.Authority(self.folder / "keys")
        self.signing_key, self._verifying_key = keys.signing_key_files(self.folder / "keys")
        self.processes = Processes(self.folder, threads=max(1, (os.cpu_count() or 1) // nodes))
        self.node_ids: dict[int, int] = {}  # Flower's number of a node -> number of its client
        self.nodes: dict[int, Process] = {}  # by client
        self.superlink: Process | None = None
        self._say, self._warn = say, warn or say  # what is done now; what happened to a node
        self._lock: Lock | None = None
        self._died: dict[int, tuple[float, float]] = {}  # client -> when its node died, when to try again

    def __enter__(self) -> LocalFederation:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @processes.private_files()
    def start(self) -> None:
        """Make the keys that are missing; start the SuperLink and the nodes; wait until all have joined."""
        try:
            processes.free_port(self.port)
        except OSError as error:
            wrong = f"port {self.port} is in use: choose another with --port, or none for a free one"
            raise BadInput(wrong) from error
        self._lock = Lock(keys.private_folder(self.folder))
        self.folder.chmod(0o700)  # also one from before
        for name in ("keys", "superlink", "command", "logs", "app", *map(node_name, range(self.count))):
            keys.private_folder(self.folder / name).chmod(0o700)
        self._make_keys()
        self.processes.start_guard()
        self._say("starting the SuperLink")
        self.start_superlink()
        ids: dict[int, int] = {}
        if self.secure:
            self._say(f"registering {plural(self.count, 'node')}")
            with ThreadPoolExecutor(2) as pool:
                ids = dict(enumerate(pool.map(self.register, map(self.node_key, range(self.count)))))
        self._say(f"starting {self.count} SuperNodes")
        for client in range(self.count):
            self.start_node(client)
        joined = {client: self._wait_for_node(client) for client in range(self.count)}
        if self.secure and joined != ids:
            raise FederationFailed(f"the SuperLink registered nodes {ids}, but {joined} have joined")
        self.node_ids = {node: client for client, node in joined.items()}

    def close(self) -> None:
        """End every process of the federation. May be called again."""
        self.processes.close()
        self.nodes.clear()
        self.superlink = None
        if self._lock is not None:
            self._lock.release()

    # --- keys --------------------------------------------------------------------------------------------------------

    def node_key(self, client: int) -> Path:
        """Return the path of the private key of a client's node."""
        return self.folder / "keys" / node_name(client)

    def _make_keys(self) -> None:
        """Make the keys that are missing, and replace those that cannot be used any more."""
        folder = self.folder / "keys"
        if not is_pair(self.signing_key, self._verifying_key):
            _delete(self.signing_key, self._verifying_key)
            keys.make_signing_key(folder)
        if not self.secure:
            return
        if not keys.usable(self.authority):
            _delete(*self.authority.files)
            keys.make_authority(folder)
        for key in map(self.node_key, range(self.count)):
            pair = key, key.with_name(key.name + ".pub")
            if not all(file.exists() for file in pair):
                _delete(*pair)
                keys.make_node_key(key)

    # --- the SuperLink -----------------------------------------------------------------------------------------------

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        home = self.folder / "superlink"
        _delete(*home.glob("state.db*"))  # registrations of the last start, whose nodes would be refused for a minute
        safety, trust = ["--insecure"], "insecure = true"
        if self.secure:
            ca, _, certificate, key = map(str, self.authority.files)
            safety = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
            safety.append("--enable-supernode-auth")
            trust = f"root-certificates = {json.dumps(ca)}"
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port), *safety]
        command += ["--database", str(home / "state.db")]
        self.superlink = self.processes.launch("superlink", command, "superlink")
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{HOST}:{self.port}"\n{trust}\n'
        (self.folder / "command" / "config.toml").write_text(text, encoding="utf-8")
        self.superlink.wait_for(self._is_healthy, "the SuperLink", START_S)

    def _is_healthy(self) -> bool:
        url = f"http{'s' * self.secure}://{HOST}:{self.port}/health"
        trusted = ssl.create_default_context(cafile=str(self.authority.certificate)) if self.secure else True
        try:
            return httpx.get(url, verify=trusted, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    # --- nodes -------------------------------------------------------------------------------------------------------

    def register(self, key: Path) -> int:
        """Give the SuperLink a node's public key; return Flower's number of the node."""
        answer = self.flwr("supernode", "register", f"{key}.pub", LINK, "--format", "json")
        return int(answer["node-id"])

    def start_node(self, client: int) -> Process:
        """Start a client's SuperNode."""
        settings: Settings = {
            "partition-id": client,
            "num-partitions": self.count,
            "state-dir": str(self.folder / node_name(client) / "state"),
            NODE_OPTION: str(self._verifying_key),
        }
        self.nodes[client] = self.start_supernode(node_name(client), settings)
        return self.nodes[client]

    def start_supernode(
        self,
        name: str,
        settings: Settings,
        *,
        key: Path | None = None,
        certificate: Path | None = None,
        port: int | None = None,
    ) -> Process:
        """Start a SuperNode with these settings, and its own key, certificate and port of the SuperLink if given."""
        safety = ["--insecure"]
        if self.secure:
            safety = ["--root-certificates", str(certificate or self.authority.certificate)]
            safety += ["--auth-supernode-private-key", str(key or self.folder / "keys" / name)]
        command = ["flower-supernode", *safety, "--superlink", f"{HOST}:{port or self.port}"]
        command += ["--host", HOST, "--port", str(processes.free_port())]
        if settings:
            command += ["--node-config", _as_options(settings)]
        return self.processes.launch(name, command, name)

    def _wait_for_node(self, client: int) -> int:
        """Wait until a node has joined, and return its number."""
        process = self.nodes[client]
        return int(process.wait_for(lambda: NODE_ID.search(process.output()), f"node {client}", START_S)[1])

    def tend(self) -> None:
        """Restart nodes that have ended, and raise an error if the SuperLink has; call this now and then."""
        if self.superlink is not None and self.superlink.ended is not None:
            raise self.superlink.failed(f"the SuperLink ended with code {self.superlink.ended}")
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
            elif now - since > REFUSED_S + START_S:
                raise process.failed(f"node {client} ended with code {process.ended}, and does not come back")
            if now >= again:
                self.processes.retire(process)
                self.start_node(client)
                again = now + RETRY_S
            self._died[client] = (since, again)

    # --- runs --------------------------------------------------------------------------------------------------------

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Give the SuperLink a command, as a user would; return its JSON answer."""
        name = " ".join(["flwr", *arguments[:1]])
        try:
            done = subprocess.run(
                [processes.executable("flwr"), *arguments],
                env=self.processes.environment("command"),
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_S,
                start_new_session=True,
                umask=processes.PRIVATE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FederationFailed(f"{name} did not end within {COMMAND_S:.0f} s") from error
        text = processes.COLOURS.sub("", done.stdout.decode(errors="replace"))
        answer = json_in(text)
        if done.returncode or not answer.get("success"):
            output = text + "\n" + done.stderr.decode(errors="replace")
            why = str(answer.get("error-message") or processes.telling_line(output))
            raise FederationFailed(f"{name} failed: {' '.join(why.split())}")
        return answer

    def submit(self, app: Path, run_config: Settings | None = None) -> int:
        """Start a run of a Flower app on the federation; return the run's number."""
        options = ["--run-config", _as_options(run_config)] if run_config else []
        return int(self.flwr("run", str(app), LINK, *options, "--format", "json")["run-id"])

    def follow(self, run: int) -> Process:
        """Start a process that writes a run's log into a file, and ends when the run does."""
        return self.processes.launch(f"run-{run}", ["flwr", "log", str(run), LINK, "--stream"], "command")

    def status(self, run: int) -> RunStatus:
        """Return how a run is doing."""
        entry = self.flwr("ls", LINK, "--run-id", str(run), "--format", "json")["runs"][0]
        return RunStatus(entry["status"], str(entry.get("status-details", "")))

    def stop_run(self, run: int) -> None:
        """Ask a run to stop."""
        self.flwr("stop", str(run), LINK, "--format", "json")

    def wait(self, run: int, *, tick: Callable[[], None] = lambda: None, every: float = 0.5) -> RunStatus:
        """Wait until a run has ended, calling `tick` now and then, and restarting nodes that die."""
        follower = self.follow(run)
        asked = 0.0
        while True:
            tick()
            self.tend()
            # The follower ends with the run, but also if it loses its connection, so the SuperLink is asked.
            if follower.ended is not None and time.monotonic() - asked > RETRY_S:
                asked = time.monotonic()
                status = self.status(run)
                self.processes.retire(follower)
                if status.status.startswith("finished"):
                    tick()
                    return status
                follower = self.follow(run)
            time.sleep(every)


def node_name(client: int) -> str:
    """Return what the node of a client is called in file names."""
    return f"node-{client}"


def _delete(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _as_options(settings: Settings) -> str:
    """Return settings as the flwr commands read them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def json_in(text: str) -> dict[str, Any]:
    """Return the JSON table in a command's output, which may have other lines before it."""
    with contextlib.suppress(ValueError):
        value, _ = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))
        return value if isinstance(value, dict) else {}
    return {}
