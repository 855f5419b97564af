"""What the tests of real federations share: experiments, their simulations, and runs to compare with them."""

import contextlib
import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lamina.experiment import build as building
from lamina.experiment.config import parse
from lamina.flower.keys import private_folder
from lamina.flower.local import guard
from lamina.flower.local.jobs import write_app
from lamina.flower.local.processes import HOST, free_port
from lamina.rounds.plan import Plan

NODES = 3


class Say:
    """Prints what the federation says, with the time."""

    def __init__(self):
        self.began = time.monotonic()

    def __call__(self, line):
        print(f"[{time.monotonic() - self.began:6.1f} s] {line}", flush=True)


def experiment(algorithm, rounds, options=None, **train):
    return parse(
        {
            "data": {"name": "digits", "clients": NODES, "partition": {"name": "classes", "k": 5}},
            "model": {"name": "mlp", "hidden": 32},
            "algorithm": {"name": algorithm, **(options or {})},
            "train": {"rounds": rounds, "participation": 1.0, "batch_size": 64, "lr": 0.03, **train},
            "run": {"device": "cpu", "engine": "loop"},
        }
    )


@dataclasses.dataclass(frozen=True)
class Without(Plan):
    """A plan whose cohorts lack some clients in some rounds."""

    absent: dict = dataclasses.field(default_factory=dict)

    def cohort(self, round):
        kept = [client for client in super().cohort(round) if client not in self.absent.get(round, ())]
        return np.array(kept, dtype=np.int64)


def simulated(spec, absent=None):
    """The simulation of the same experiment, in which some clients do not take part in some rounds."""
    simulation = building.build(spec)
    fields = {field.name: getattr(simulation.plan, field.name) for field in dataclasses.fields(simulation.plan)}
    simulation.plan = Without(**fields, absent=absent or {})
    simulation.run(spec.train.rounds)
    return simulation


class Job:
    """A run of an experiment on the federation."""

    def __init__(self, federation, spec, folder, *, more="", nodes=None, **options):
        self.federation, self.spec, self.out = federation, spec, folder / "run"
        given = {"out": str(self.out), "nodes": nodes or federation.node_ids, "poll": 0.2}
        write_app(folder / "app", spec, {**given, "signing_key": str(federation.keys.signing_key), **options})
        with (folder / "app" / "lamina_up" / "__init__.py").open("a") as file:
            file.write(more)
        self._app = folder / "app"
        self.submit()

    def submit(self):
        self.run = self.federation.submit(self._app)

    def wait(self, tick=lambda: None, every=0.5):
        status = self.federation.wait(self.run, tick=tick, every=every)
        log = self.federation.folder / "logs" / f"run-{self.run}.log"
        assert status["status"] == "finished:completed", f"{status}\n{log.read_text()[-4000:]}"
        return status

    def rows(self):
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return []

    def attempts(self):
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.out / "federation.jsonl").read_text().splitlines()]
        return []

    def absent(self):
        """Who was not in the mean of each round."""
        return {
            entry["round"]: set(range(NODES)) - {one["client"] for one in entry["took_part"]}
            for entry in self.attempts()
            if entry["complete"]
        }

    def assert_same(self, simulation):
        """The same weights and metrics as the simulation's, to float32 rounding."""
        trained, expected = load_file(self.out / "model.safetensors"), simulation.model.state_dict()
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(trained[name].numpy(), value.numpy(), rtol=1e-5, atol=1e-7, err_msg=name)
        rows = self.rows()
        assert len(rows) == len(simulation.history)
        for row, other in zip(rows, simulation.history, strict=True):
            for name in ("round", "lr", "clients", "steps", "train_loss", "loss", "accuracy", "update_norm"):
                assert row[name] == pytest.approx(other[name], rel=1e-5), (row["round"], name)


def start_stranger(federation, name, *, key=None, certificate=None, port=None):
    """Start a SuperNode that belongs to no client: to see whether its key and certificate are let in."""
    private_folder(federation.folder / name)
    command = ["flower-supernode", "--root-certificates", str(certificate or federation.keys.certificate)]
    command += ["--auth-supernode-private-key", str(key or federation.node_key(0))]
    command += ["--superlink", f"{HOST}:{port or federation.port}", "--host", HOST, "--port", str(free_port())]
    return federation.processes.launch(name, command, name)


def left(federation):
    """The federation's processes that run now; after `close`, none (known on Linux only)."""
    return guard.marked(federation.processes.mark)


def programs(federation, name):
    """The federation's processes that run a program of Flower's: pid -> process group."""
    found = {}
    for pid in left(federation):
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = os.getpgid(pid)
    return found


def running(groups):
    """The processes that run in the groups: without those that have ended and wait for init to collect them."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended in the meantime
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(group) in groups:
                pids.append(int(stat.parent.name))
    return pids


@contextlib.contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
