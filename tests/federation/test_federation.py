"""A real federation does what the simulation does, and bears what a simulation never meets."""

import contextlib
import http.client
import http.server
import os
import signal
import ssl
import time

import pytest

from federation.harness import NODES, Job, experiment, left, running, serving, simulated, start_stranger
from helpers import mode
from lamina.flower.keys import make_node_key, make_server_keys
from lamina.flower.local.federation import LINK
from lamina.flower.local.processes import HOST, FederationFailed, free_port

ALGORITHMS = ("fedlamb", "scaffold")  # the server keeps moments, the clients keep state; tests/flower has the others
ROUNDS = 3  # in the last one, what clients and server kept has come back to them twice
ROGUE = 2  # the client whose node lies

# What the rogue's node sends instead of its update, by round; it runs lamina's own client app, and spoils the answer.
HOSTILE = """
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from lamina.flower import wire

honest, client = federation.client_app(), ClientApp()


@client.train()
def train(message, context):
    number = int(message.content["task"]["round"])
    reply = honest(message, context)
    if int(context.node_config["partition-id"]) == 2:
        up = dict(reply.content["up"].items())
        delta = torch.frombuffer(bytearray(up["delta"].data), dtype=torch.float32)
        if number == 1:
            up["delta"] = wire.encode(torch.full_like(delta, float("nan")))
        elif number == 2:
            up["delta"] = wire.encode(delta[:-1])
        elif number == 3:
            up["delta"] = wire.encode(1e6 * delta)
        elif number == 4:
            reply.content["figures"] = MetricRecord({**reply.content["figures"], "examples": 10**15})
        reply.content["up"] = ArrayRecord(up)
    return reply
"""


@pytest.fixture(scope="module")
def runs(federation, tmp_path_factory):
    """The runs that disturb nobody, side by side: most of a round is waiting."""
    whole = {"quorum": 1.0, "deadline": 150}  # a round that lacks a reply, lost or late, is tried again
    made = {
        name: Job(federation, experiment(name, ROUNDS), tmp_path_factory.mktemp(name), **whole) for name in ALGORITHMS
    }
    spec = experiment("fedavg", 4, weighting="examples")
    made["hostile"] = Job(federation, spec, tmp_path_factory.mktemp("hostile"), more=HOSTILE, quorum=2)
    return made


@pytest.mark.seconds(900)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_trajectory_is_the_simulation(runs, name):
    job = runs[name]
    job.wait()
    assert job.absent() == {number: set() for number in range(1, ROUNDS + 1)}
    simulation = simulated(job.spec)
    job.assert_same(simulation)
    # and the bytes are the ledger's
    for row, other in zip(job.rows(), simulation.history, strict=True):
        assert (row["bytes_down"], row["bytes_up"]) == (other["bytes_down"], other["bytes_up"])
        assert row["bytes_up"] <= row["wire_bytes_up"] <= row["bytes_up"] + 1000 * NODES


@pytest.mark.seconds(400)
def test_hostile_updates_of_an_authenticated_node_are_refused_and_named(runs, federation):
    job = runs["hostile"]
    job.wait()
    number = next(node for node, client in federation.node_ids.items() if client == ROGUE)
    attempts = job.attempts()
    assert [entry["round"] for entry in attempts] == [1, 2, 3, 4]
    for entry, why in zip(attempts, ("NaN", "shape", "norm", "examples"), strict=True):
        (refused,) = entry["refused"]
        assert (refused["client"], refused["node"]) == (ROGUE, str(number))
        assert why in refused["why"], refused
        assert [one["client"] for one in entry["took_part"]] == [0, 1]
    job.assert_same(simulated(job.spec, {number: {ROGUE} for number in range(1, 5)}))


@pytest.mark.seconds(300)
def test_strangers_are_not_let_in(federation, tmp_path):
    stranger, _ = make_node_key(tmp_path / "stranger")
    elsewhere = make_server_keys(tmp_path / "elsewhere")
    unregistered = start_stranger(federation, "unregistered", key=stranger)
    deceived = start_stranger(federation, "deceived", certificate=elsewhere.certificate)
    until = time.monotonic() + 60
    while unregistered.ended is None and time.monotonic() < until:
        time.sleep(0.2)
    assert unregistered.ended not in (None, 0)
    assert "activate" in unregistered.output()
    while "CERTIFICATE_VERIFY_FAILED" not in deceived.output() and time.monotonic() < until:
        time.sleep(0.2)
    assert "CERTIFICATE_VERIFY_FAILED" in deceived.output()
    for process in (unregistered, deceived):
        assert "SuperNode ID" not in process.output()
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.seconds(300)
def test_a_node_whose_key_is_revoked_is_out_at_once_and_for_good(federation, tmp_path):
    """`flwr supernode unregister`, as docs/how-to/deploy.md says."""
    key, _ = make_node_key(tmp_path / "revoked")
    number = federation.register(key)
    until = time.monotonic() + 200

    def wait_for(true):
        while not true() and time.monotonic() < until:
            time.sleep(0.2)
        assert true()

    node = start_stranger(federation, "revoked", key=key)
    wait_for(lambda: f"SuperNode ID: {number}" in node.output())
    federation.flwr("supernode", "unregister", str(number), LINK, "--format", "json")
    wait_for(lambda: node.ended is not None)
    again = start_stranger(federation, "revoked", key=key)
    wait_for(lambda: again.ended is not None)
    assert again.ended != 0
    assert "Failed to activate SuperNode" in again.output()
    with pytest.raises(FederationFailed, match="Public key already in use"):
        federation.register(key)


class OnlyFleet(http.server.BaseHTTPRequestHandler):
    """The reverse proxy of docs/how-to/deploy.md: passes on what nodes need, and nothing else."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith("/v1/fleet/"):
            self._answer(403, {}, b"")
            return
        upstream = http.client.HTTPSConnection(HOST, self.server.port, context=self.server.trust, timeout=60)
        with contextlib.closing(upstream):
            upstream.request("POST", self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())

    do_GET = do_POST  # noqa: N815 (as http.server calls it)

    def _answer(self, status, headers, body):
        self.server.seen.append((self.path, status))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.mark.seconds(300)
def test_a_proxy_closes_the_control_interface_and_lets_nodes_through(federation, tmp_path):
    """Whoever holds only ca.crt commands a SuperLink that is reached directly; through the proxy nobody does."""
    keys = federation.keys
    proxy = http.server.ThreadingHTTPServer((HOST, free_port()), OnlyFleet)
    proxy.port, proxy.seen = federation.port, []
    proxy.trust = ssl.create_default_context(cafile=str(keys.certificate))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys.server_certificate, keys.server_key)
    proxy.socket = tls.wrap_socket(proxy.socket, server_side=True)
    key, _ = make_node_key(tmp_path / "spare")
    number = federation.register(key)
    with serving(proxy):
        through = start_stranger(federation, "spare", key=key, port=proxy.server_address[1])
        until = time.monotonic() + 60
        while f"SuperNode ID: {number}" not in through.output() and time.monotonic() < until:
            time.sleep(0.2)
        assert f"SuperNode ID: {number}" in through.output()
        config = federation.folder / "command" / "config.toml"
        direct = config.read_text()
        config.write_text(direct.replace(str(federation.port), str(proxy.server_address[1])))
        try:
            with pytest.raises(FederationFailed):
                federation.flwr("ls", LINK, "--format", "json")
        finally:
            config.write_text(direct)
        os.killpg(through.pid, signal.SIGTERM)
    assert {path for path, status in proxy.seen if status == 403} >= {"/v1/control/list-runs"} or any(
        path.startswith("/v1/control/") for path, status in proxy.seen if status == 403
    )
    assert federation.flwr("ls", LINK, "--format", "json")["success"]  # which is why the port itself must be closed


def test_nothing_is_left_behind(federation):
    """Also what Flower starts in sessions of its own."""
    secrets = [federation.folder / "keys" / name for name in ("ca.key", "node-0")]
    assert [mode(path) for path in secrets] == [0o600, 0o600]
    processes = {pid: os.getpgid(pid) for pid in left(federation)}
    assert len(processes) >= 2 * (1 + NODES)  # SuperLink and SuperNodes, each with its helper
    groups = set(processes.values())
    assert set(running(groups)) >= processes.keys()
    federation.close()
    assert left(federation) == running(groups) == []
    assert not any(path.exists() for path in secrets)
