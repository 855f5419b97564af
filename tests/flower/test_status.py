"""How a run goes: its state, the exit code for health checks, and the numbers for Prometheus."""

import os
import re
import time

import pytest

import helpers
from flower_setup import NODE, Setup, client_of, is_train
from lamina.base.errors import Diverged
from lamina.flower import Stopped
from lamina.flower.status import Status


def status(setup, capsys, *options):
    capsys.readouterr()
    code = helpers.call("flower", "status", setup.out, *options)
    return code, capsys.readouterr().out


def samples(text):
    """The samples of Prometheus' text format, by name and labels; every family must be declared."""
    found, declared = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            declared.add(line.split()[2])
        elif not line.startswith("#"):
            name, labels, value = re.fullmatch(r'(\w+)\{((?:\w+="[^"]*",?)+)\} (\S+)', line).groups()
            assert name in declared
            found[name.removeprefix("lamina_federation_"), labels.partition(",")[2]] = float(value)
    return found


def test_a_run_with_a_lost_and_a_refused_reply_until_it_is_complete(tmp_path, capsys):
    """The first attempt misses the quorum, and client 1's second reply is refused."""
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more={"deadline": 0.3, "quorum": 3, "attempts": 3})
    seen = []

    def on_reply(grid, node, message, reply):
        if is_train(message, 1) and node == NODE:
            seen.append(Status.read(setup.out).state)
        if is_train(message, 1) and client_of(node) in (2, 3) and len(seen) == 1:
            return None
        if is_train(message, 2) and client_of(node) == 1:
            reply.content["figures"]["examples"] = 10**9
        return reply

    began = time.time()
    setup.run(setup.grid(on_reply=on_reply))
    assert seen == ["running", "without a quorum"]
    assert status(setup, capsys) == (0, "complete: 2 of 2 rounds finished\n")
    code, text = status(setup, capsys, "--metrics")
    assert code == 0
    found = samples(text)
    assert found["state", 'state="complete"'] == 1
    assert sum(value for (name, _), value in found.items() if name == "state") == 1
    assert (found["round", ""], found["rounds", ""], found["attempts_total", ""]) == (2, 2, 3)
    counts = {
        name: [found[f"{name}_total", f'client="{client}"'] for client in range(4)]
        for name in ("replies", "missing", "refusals")
    }
    assert counts == {"replies": [2, 1, 2, 2], "missing": [0, 0, 1, 1], "refusals": [0, 1, 0, 0]}
    for way in ("down", "up"):
        assert found["bytes_total", f'direction="{way}"'] == sum(row[f"wire_bytes_{way}"] for row in setup.rows)
    assert found["seconds_total", ""] == pytest.approx(sum(row["seconds"] for row in setup.rows))
    assert began - 1 <= found["last_attempt_timestamp_seconds", ""] <= time.time() + 1


def test_a_run_that_has_stopped_names_who_is_missing(tmp_path, capsys):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, more={"deadline": 0.1, "quorum": 1.0})
    grid = setup.grid()
    grid.offline.add(NODE + 2)
    with pytest.raises(Stopped):
        setup.run(grid)
    code, text = status(setup, capsys)
    assert code == 4
    assert text == f"stopped: 0 of 2 rounds finished\nclient 2 (node {NODE + 2}): it is not connected\n"
    assert samples(status(setup, capsys, "--metrics")[1])["state", 'state="stopped"'] == 1


def test_a_server_that_no_longer_renews_its_lease_does_not_count(tmp_path):
    """As after a crash in another container, whose processes cannot be seen."""
    setup = Setup(tmp_path, "fedavg", rounds=1)
    seen = []

    def on_reply(grid, node, message, reply):
        lease = setup.out / "lease"
        os.utime(lease, (time.time() - 200,) * 2)
        seen.append(Status.read(setup.out).state)
        lease.touch()
        seen.append(Status.read(setup.out).state)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    assert set(seen[::2]) == {"stopped"}
    assert set(seen[1::2]) == {"running"}


def test_a_run_that_has_diverged(tmp_path, capsys):
    setup = Setup(tmp_path, "fedavg", rounds=2, lr=1e30)
    with pytest.raises(Diverged):
        setup.run()
    code, text = status(setup, capsys)
    assert (code, text.partition(":")[0]) == (3, "diverged")


def test_where_there_is_no_run_the_code_is_that_of_bad_input(tmp_path, capsys):
    assert helpers.call("flower", "status", tmp_path) == 2
    assert "is not a run's folder" in capsys.readouterr().err
