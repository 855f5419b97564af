"""Nodes and a server app of a real federation that are killed or stopped: the run goes on without them, or resumes."""

import contextlib
import os
import signal
import time

import pytest

from federation.harness import Job, experiment, programs, simulated
from lamina.flower.local.federation import LINK
from lamina.flower.local.processes import FederationFailed
from lamina.storage.checkpoint import Checkpoints


@pytest.mark.seconds(900)
def test_a_killed_node_and_a_killed_server_app_resume(federation, tmp_path):
    """SCAFFOLD, whose clients remember: the result is that of a simulation in which the dead node was only absent."""
    job = Job(federation, experiment("scaffold", 7), tmp_path, quorum=2, deadline=120)
    victim = 1
    number = next(node for node, client in federation.node_ids.items() if client == victim)
    first = federation.nodes[victim]
    checkpoints = Checkpoints(job.out / "checkpoints")
    done = {}

    def kill_the_node():
        """In the middle of a round: its client app has been started, and has not answered."""
        if "node" not in done and job.rows() and first.pid in programs(federation, "flwr-clientapp").values():
            os.killpg(first.pid, signal.SIGKILL)
            done["node"], done["process"] = len(job.rows()) + 1, federation.nodes.pop(victim)
        if "node" in done and done["process"].ended is not None:  # its key is refused for a minute: it ends at once
            done["process"] = federation.start_node(victim)
            del federation.nodes[victim]
        back = [entry for entry in job.attempts() if victim in {one["client"] for one in entry["took_part"]}]
        if "node" in done and done["node"] < back[-1]["round"] <= max(checkpoints.rounds()):
            raise KeyboardInterrupt  # out of the wait

    with pytest.raises(KeyboardInterrupt):
        federation.wait(job.run, tick=kill_the_node, every=0.1)
    (missed,) = [entry for entry in job.attempts() if entry["round"] == done["node"]]
    assert [(one["client"], one["node"]) for one in missed["missing"]] == [(victim, str(number))]
    assert missed["missing"][0]["why"]

    ((server, _),) = programs(federation, "flwr-serverapp").items()
    os.kill(server, signal.SIGKILL)
    kept, before = max(checkpoints.rounds()), job.rows()
    assert done["node"] < kept < 7
    with contextlib.suppress(FederationFailed):
        federation.stop_run(job.run)
    job.submit()
    job.wait()
    assert job.rows()[:kept] == before[:kept]  # nothing was trained again
    attempts = job.attempts()
    assert not any("lost its client state" in note for entry in attempts for note in entry["notes"])
    absent = job.absent()
    assert victim in absent[done["node"]]
    assert absent[7] == set()
    job.assert_same(simulated(job.spec, absent))


@pytest.mark.seconds(600)
def test_a_silent_node_does_not_stop_a_round_of_two_exchanges(federation, tmp_path):
    """The original Mime: the second exchange begins when the first one is over, and has its own deadline."""
    spec = experiment("mime", 2, {"control_variate": True})
    started = time.monotonic()
    federation.flwr("ls", LINK, "--format", "json")
    deadline = max(40, round(8 * (time.monotonic() - started)))  # a busy machine needs a longer one
    job = Job(federation, spec, tmp_path, quorum=2, deadline=deadline, attempts=1)
    victim = 2
    stopped = []

    def stop_the_node():
        if not stopped and job.rows():
            stopped.append(federation.nodes[victim].pid)
            os.killpg(stopped[0], signal.SIGSTOP)

    try:
        job.wait(stop_the_node)
    finally:
        for group in stopped:
            os.killpg(group, signal.SIGCONT)
    assert stopped
    second = job.attempts()[1]
    assert [one["client"] for one in second["took_part"]] == [0, 1]
    ((client, why),) = [(one["client"], one["why"]) for one in second["missing"]]
    assert client == victim
    # Flower misses its heartbeat 30 to 60 seconds after it was stopped, which may be before the deadline
    assert why.startswith((f"no reply within {deadline} s", "it went offline"))
    job.assert_same(simulated(spec, {2: {victim}}))
