"""`lamina flower up`, run as a user runs it: killed, interrupted, gone on with; and the app of `lamina flower new`."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from federation.harness import simulated
from flower_processes import wait_until
from lamina.experiment.config import load

TOML = """
[data]
name = "digits"

[model]
name = "mlp"
hidden = 16

[algorithm]
name = "scaffold"

[train]
rounds = 2
participation = 1.0
batch_size = 64
lr = 0.05

[run]
device = "cpu"
engine = "loop"
"""


@pytest.fixture
def lamina(tmp_path):
    """Starts `lamina flower`; whatever a test leaves of it is killed, and its guard ends the rest."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "lamina", "flower", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        heeds_ctrl_c = functools.partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        )  # tests may run in the background
        started.append(
            subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, preexec_fn=heeds_ctrl_c, **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    wait_until(lambda: not running(tmp_path))


def running(folder):
    """Processes that know of a folder: every process of a federation has it in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"FLWR_HOME={folder}".encode() in environment:
            found.append(int(entry.name))
    return found


def wait_while_running(process, true, place, seconds=400):
    """Wait until something is true; if the command ends before, or time is up, say what it and its processes wrote."""
    until = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            printed, said = process.communicate()
            logs = [f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(place.glob("*.log"))]
            pytest.fail("\n".join([f"exit code {process.returncode}", printed, said, *logs]))
        time.sleep(0.1)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.seconds(900)
def test_killed_interrupted_resumed_and_complete(lamina, tmp_path):
    (tmp_path / "small.toml").write_text(TOML)
    # a round that lacks a reply, lost or late, is tried again
    command = ("up", "small.toml", "--nodes", "2", "--quorum", "1.0", "--deadline", "120")
    out = tmp_path / "runs" / "small-scaffold-seed0-flower"
    logs = out.with_name(out.name + ".federation") / "logs"

    killed = lamina(*command)
    wait_while_running(killed, (logs / "node-1.log").exists, logs)
    os.kill(killed.pid, signal.SIGKILL)  # nothing in it can clean up: the guard does
    killed.communicate()
    wait_until(lambda: not running(tmp_path))

    interrupted = lamina(*command)
    wait_while_running(interrupted, lambda: lines(out / "metrics.jsonl"), logs)
    os.kill(interrupted.pid, signal.SIGINT)
    said = interrupted.communicate(timeout=180)[1]
    assert interrupted.returncode == 130, said
    assert "stopped after round 1; run the same command again to resume" in said
    assert not running(tmp_path)

    again = lamina(*command)
    printed, said = again.communicate()
    assert again.returncode == 0, said
    assert "resuming after round 1" in said
    assert "round 2/2: accuracy" in said
    assert f"lamina report {out.relative_to(tmp_path)}" in printed
    assert not running(tmp_path)
    assert (logs / "superlink.log").exists()
    simulation = simulated(load(tmp_path / "small.toml", ["data.clients=2"]))
    trained = load_file(out / "model.safetensors")
    for name, value in simulation.model.state_dict().items():
        assert trained[name].numpy() == pytest.approx(value.numpy(), rel=1e-5, abs=1e-7)

    complete = lamina(*command)
    printed, said = complete.communicate()
    assert complete.returncode == 0, said
    assert "is complete: 2 rounds" in printed


@pytest.mark.seconds(600)
def test_the_app_of_the_template_runs_as_it_is(lamina, tmp_path):
    made = lamina("new", "my-app", "--nodes", "2")
    assert made.communicate()[1] == ""
    file = tmp_path / "my-app" / "my_app_app" / "federation.py"
    text = file.read_text()
    assert "rounds=10," in text
    file.write_text(text.replace("rounds=10,", "rounds=2,"))
    ran = lamina("up", "my-app", "--nodes", "2")
    printed, said = ran.communicate()
    assert ran.returncode == 0, said
    assert "2 rounds, best accuracy" in printed
    rows = [json.loads(line) for line in (tmp_path / "runs" / "my-app" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["clients"], row["asked"]) for row in rows] == [(2, 2), (2, 2)]
    assert not running(tmp_path)
