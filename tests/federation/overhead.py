"""Measure what a federation costs beside training: seconds per round, and bytes at four places.

``PYTHONPATH=tests python tests/federation/overhead.py`` prints the tables of docs/results.md (ten minutes or so):
bytes as the ledger of a simulation predicts them, as lamina counts what it hands to Flower, as the SuperLink counts its
nodes' messages, and as they pass a TCP connection, with TLS, HTTP, heartbeats and polling. The first round is left out
of the times.
"""

import contextlib
import itertools
import os
import platform
import shutil
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

import lamina
from federation.harness import NODES, Say
from lamina import Simulation
from lamina.experiment.runs.environment import processor
from lamina.experiment.runs.records import read_record
from lamina.flower.local.federation import LocalFederation
from lamina.flower.local.processes import HOST, free_port

APP = """
import torch
from lamina import data, models
from lamina.flower import Federation

name, options, algorithm, extra, rounds = {settings!r}
digits = name == "mlp"
shape = (1, 8, 8) if digits else (3, 32, 32)


def make_model():
    return models.create(name, input_shape=shape, classes=10, seed=0, **options)


def of_client(client):
    if digits:
        train = data.load("digits").train
        return train.subset(range(client, len(train), {nodes}))
    made = torch.Generator().manual_seed(client)
    return torch.randn(16, *shape, generator=made), torch.randint(0, 10, (16,), generator=made)


def mine(context):
    return of_client(int(context.node_config["partition-id"]))


from lamina import algorithms

federation = Federation(
    algorithms.create(algorithm, **extra), make_model, mine, clients={nodes}, rounds=rounds, batch_size=16,
    local_steps=4, out={out!r}, nodes={ids!r}, signing_key={key!r},
)
server = federation.server_app()
client = federation.client_app()
"""
CASES = (
    ("mlp", {"hidden": 64}, "fedavg", {}, 5),
    ("mlp", {"hidden": 64}, "fedlamb", {}, 5),
    ("mlp", {"hidden": 64}, "fedlamb", {"sync_every": 3}, 6),
    ("resnet18", {}, "fedlamb", {}, 3),
)


class Meter:
    """Passes TCP connections on to a port, and counts their bytes."""

    def __init__(self, target):
        self.target, self.up, self.down = target, 0, 0
        self.port = free_port()
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection((HOST, self.target))
            threading.Thread(target=self._pass, args=(here, there, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, "down"), daemon=True).start()

    def _pass(self, source, sink, way):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(piece))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Metered(LocalFederation):
    """A federation whose nodes reach the SuperLink through a meter."""

    meter = None

    def start_node(self, client):
        self.meter = self.meter or Meter(self.port)
        direct, self.port = self.port, self.meter.port
        try:
            return super().start_node(client)
        finally:
            self.port = direct


def measure(federation, folder, case):
    name, _, algorithm, extra, rounds = case
    out = folder / "run"
    package = folder / "app" / "lamina_up"
    package.mkdir(parents=True)
    template = Path(lamina.__file__).parent / "flower" / "template" / "up"
    shutil.copy(template / "pyproject.toml.in", package.parent / "pyproject.toml")
    text = APP.format(
        settings=case, nodes=NODES, out=str(out), ids=federation.node_ids, key=str(federation.keys.signing_key)
    )
    (package / "__init__.py").write_text(text)
    before = federation.meter.up, federation.meter.down
    run = federation.submit(package.parent)
    status = federation.wait(run)
    assert status["status"] == "finished:completed", status
    traffic = status["network-traffic"]
    tcp_up, tcp_down = federation.meter.up - before[0], federation.meter.down - before[1]
    history = read_record(out).history

    scope = {}
    exec(text.partition("federation = ")[0], scope)
    parts = [scope["of_client"](client) for client in range(NODES)]
    tensors = [(p.x, p.y) if hasattr(p, "x") else p for p in parts]
    x, y = (torch.cat(both) for both in zip(*tensors, strict=True))
    edges = [0, *torch.tensor([len(t[0]) for t in tensors]).cumsum(0).tolist()]
    clients = [range(a, b) for a, b in itertools.pairwise(edges)]
    torch.set_num_threads(1)
    simulation = Simulation(
        scope["make_model"](),
        (x, y),
        scope["algorithms"].create(algorithm, **extra),
        clients=clients,
        batch_size=16,
        local_steps=4,
        engine="loop",
        device="cpu",
    )
    simulation.run(rounds)
    for way in ("down", "up"):
        assert history.total(f"bytes_{way}") == simulation.history.total(f"bytes_{way}")
    seconds = [row["seconds"] for row in history][1:]
    return {
        "case": f"{name}, {algorithm}" + "".join(f", {key} {value}" for key, value in extra.items()),
        "d": sum(p.numel() for p in simulation.model.parameters()),
        "rounds": rounds,
        "seconds": f"{statistics.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})",
        "training": statistics.median([row["seconds"] for row in simulation.history][1:]),
        "ledger": [simulation.history.total(f"bytes_{way}") for way in ("down", "up")],
        "lamina": [history.total(f"wire_bytes_{way}") for way in ("down", "up")],
        "flower": [int(traffic["outbound-bytes"]), int(traffic["inbound-bytes"])],
        "tcp": [tcp_down, tcp_up],
    }


def main():
    place = Path(tempfile.mkdtemp(prefix="lamina-overhead-"))
    federation = Metered(place / "federation", NODES, say=Say())
    try:
        with federation:
            up, down, began = federation.meter.up, federation.meter.down, time.monotonic()
            time.sleep(20)
            each = NODES * (time.monotonic() - began)
            up, down = (federation.meter.up - up) / each, (federation.meter.down - down) / each
            print(f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()}")
            print(f"idle: {up:.0f} B/s up, {down:.0f} B/s down a node")
            for number, case in enumerate(CASES):
                found = measure(federation, place / str(number), case)
                print(f"load {os.getloadavg()[0]:.1f}", found, flush=True)
                for way, side in enumerate(("down", "up")):
                    counts = [
                        found[key][way] / found["rounds"] / NODES for key in ("ledger", "lamina", "flower", "tcp")
                    ]
                    shares = [f"{count:,.0f} (+{100 * (count / counts[0] - 1):.2g} %)" for count in counts[1:]]
                    row = [
                        found["case"],
                        side,
                        f"{counts[0]:,.0f}",
                        *shares,
                        found["seconds"],
                        f"{found['training']:.2f}",
                    ]
                    print("| " + " | ".join(row) + " |", flush=True)
    finally:
        federation.close()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
