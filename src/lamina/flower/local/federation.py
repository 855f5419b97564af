"""A SuperLink and SuperNodes on the loopback interface, with keys of their own; nothing here uses the network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from lamina.base.text import plural
from lamina.flower import keys
from lamina.flower.local import processes
from lamina.flower.local.processes import HOST, FederationFailed, Process, Processes
from lamina.flower.signing import NODE_OPTION
from lamina.storage.leases import Lease, take

LINK = "federation"  # what the flwr command calls our SuperLink
START_S, COMMAND_S = 90.0, 120.0  # for a process to come up, for a flwr command
ASK_AGAIN_S = 5.0  # between two questions for a run's status
NODE_ID = re.compile(r"SuperNode ID: (\d+)")
RunConfig = Mapping[str, str | int | float | bool]


class LocalFederation:
    """A SuperLink and `nodes` SuperNodes, all files in one private folder: keys, logs, database, state of the nodes.

    A context: entering starts everything and waits until every node has joined, leaving ends everything. Only the
    nodes' state is used again when the folder is: every start makes new keys and a new database.
    """

    def __init__(self, folder: Path, nodes: int, *, say: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.count, self.port = folder.absolute(), nodes, processes.free_port()
        self.keys = keys.ServerKeys(self.folder / "keys")
        self.processes = Processes(self.folder, threads=max(1, (os.cpu_count() or 1) // nodes))
        self.node_ids: dict[int, int] = {}  # Flower's number of a node -> number of its client
        self.nodes: dict[int, Process] = {}  # by client
        self.superlink: Process | None = None
        self._say = say
        self._lease: Lease | None = None

    def __enter__(self) -> LocalFederation:
        self._umask_before = os.umask(0o077)  # only their owner may read databases, logs and records of all processes
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        os.umask(self._umask_before)

    def start(self) -> None:
        """Make the keys; start the SuperLink and the nodes; wait until all have joined."""
        self._lease = take(keys.private_folder(self.folder))
        self.folder.chmod(0o700)  # also one from before
        self._delete_temporary()  # the SuperLink would refuse the nodes of the last start for a minute
        for name in ("keys", "superlink", "command", "logs", "app", *map(node_name, range(self.count))):
            keys.private_folder(self.folder / name).chmod(0o700)
        keys.make_server_keys(self.folder / "keys")
        for client in range(self.count):
            keys.make_node_key(self.node_key(client))
        self.processes.start_guard()
        self._say("starting the SuperLink")
        self.start_superlink()
        self._say(f"registering {plural(self.count, 'node')}")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.register, map(self.node_key, range(self.count))))
        self._say(f"starting {self.count} SuperNodes")
        for client in range(self.count):
            self.start_node(client)
        self.node_ids = {self._wait_for_node(client): client for client in range(self.count)}

    def close(self) -> None:
        """End every process of the federation; the logs and the nodes' state stay. May be called again."""
        self.processes.close()
        if self._lease is not None:
            self._delete_temporary()
            self._lease.release()
            self._lease = None

    def _delete_temporary(self) -> None:
        for name in ("app", "command", "keys", "superlink"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def node_key(self, client: int) -> Path:
        """Return the path of the private key of a client's node."""
        return self.folder / "keys" / node_name(client)

    # --- the SuperLink -----------------------------------------------------------------------------------------------

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port), "--enable-supernode-auth"]
        command += ["--ssl-ca-certfile", str(self.keys.certificate), "--ssl-keyfile", str(self.keys.server_key)]
        command += ["--ssl-certfile", str(self.keys.server_certificate)]
        command += ["--database", str(self.folder / "superlink" / "state.db")]
        self.superlink = self.processes.launch("superlink", command, "superlink")
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{HOST}:{self.port}"\n'
        text += f"root-certificates = {json.dumps(str(self.keys.certificate))}\n"
        (self.folder / "command" / "config.toml").write_text(text, encoding="utf-8")
        self.superlink.wait_for(self._is_healthy, "the SuperLink", START_S)

    def _is_healthy(self) -> bool:
        url = f"https://{HOST}:{self.port}/health"
        trusted = ssl.create_default_context(cafile=str(self.keys.certificate))
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
        name = node_name(client)
        settings: RunConfig = {
            "partition-id": client,
            "num-partitions": self.count,
            "state-dir": str(self.folder / name / "state"),
            NODE_OPTION: str(self.keys.verifying_key),
        }
        command = ["flower-supernode", "--root-certificates", str(self.keys.certificate)]
        command += ["--auth-supernode-private-key", str(self.node_key(client)), "--superlink", f"{HOST}:{self.port}"]
        command += ["--host", HOST, "--port", str(processes.free_port()), "--node-config", _as_options(settings)]
        self.nodes[client] = self.processes.launch(name, command, name)
        return self.nodes[client]

    def _wait_for_node(self, client: int) -> int:
        """Wait until a node has joined, and return its number."""
        process = self.nodes[client]
        return int(process.wait_for(lambda: NODE_ID.search(process.output()), f"node {client}", START_S)[1])

    def check(self) -> None:
        """Raise an error if the SuperLink or a node has ended; call this now and then."""
        named = {"the SuperLink": self.superlink} | {f"node {client}": one for client, one in self.nodes.items()}
        for name, process in named.items():
            if process is not None and process.ended is not None:
                raise process.failed(f"{name} {process.how_it_ended}")

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

    def submit(self, app: Path, run_config: RunConfig | None = None) -> int:
        """Start a run of a Flower app on the federation; return the run's number."""
        options = ["--run-config", _as_options(run_config)] if run_config else []
        return int(self.flwr("run", str(app), LINK, *options, "--format", "json")["run-id"])

    def follow(self, run: int) -> Process:
        """Start a process that writes a run's log into a file, and ends when the run does."""
        return self.processes.launch(f"run-{run}", ["flwr", "log", str(run), LINK, "--stream"], "command")

    def status(self, run: int) -> dict[str, Any]:
        """Return what the SuperLink says of a run, such as "status": "finished:completed"."""
        entry: dict[str, Any] = self.flwr("ls", LINK, "--run-id", str(run), "--format", "json")["runs"][0]
        return entry

    def stop_run(self, run: int) -> None:
        """Ask a run to stop."""
        self.flwr("stop", str(run), LINK, "--format", "json")

    def wait(self, run: int, *, tick: Callable[[], None] = lambda: None, every: float = 0.5) -> dict[str, Any]:
        """Wait until a run has ended, calling `tick` now and then; return its status."""
        follower = self.follow(run)
        asked = 0.0
        while True:
            tick()
            self.check()
            # The follower ends with the run, but also if it loses its connection, so the SuperLink is asked.
            if follower.ended is not None and time.monotonic() - asked > ASK_AGAIN_S:
                asked = time.monotonic()
                status = self.status(run)
                if status["status"].startswith("finished"):
                    tick()
                    return status
                follower = self.follow(run)
            time.sleep(every)


def node_name(client: int) -> str:
    """Return what the node of a client is called in file names."""
    return f"node-{client}"


def _as_options(settings: RunConfig) -> str:
    """Return settings as the flwr commands read them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def json_in(text: str) -> dict[str, Any]:
    """Return the JSON table in a command's output, which may have other lines before it."""
    with contextlib.suppress(ValueError):
        value, _ = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))
        return value if isinstance(value, dict) else {}
    return {}
