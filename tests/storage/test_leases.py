"""Leases: one writer per folder, who notices that another took over, and turns of several processes."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time

import pytest

from helpers import HELD_UP, processes
from lamina.base.errors import BadInput
from lamina.storage import leases
from lamina.storage.leases import Leased, Owner, claim, is_held, join, others, take, turn
from leases_of_others import abandon, give, rewrite

HERE = f"process {os.getpid()} on {socket.gethostname()}"


def hold(folder, connection):
    """Hold a lease, and answer whether it is still ours when asked."""
    leases.RENEWAL_S = 0.05
    lease = take(folder)
    connection.send("taken")
    while connection.recv() == "check":
        try:
            lease.refuse_lost()
            connection.send("")
        except BadInput as error:
            connection.send(str(error))
    lease.release()


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lease of the folder "run", and the connection to it."""
    here, there = multiprocessing.Pipe()
    process = processes.Process(target=hold, args=(tmp_path / "run", there), daemon=True)
    process.start()
    assert here.poll(HELD_UP)
    assert here.recv() == "taken"
    yield process, here
    process.kill()
    process.join(HELD_UP)


@pytest.fixture
def quick(monkeypatch):
    """Leases that expire soon."""
    monkeypatch.setattr(leases, "LEASE_S", 0.5)
    monkeypatch.setattr(leases, "POLL_S", 0.02)


def wait_for(path, state):
    deadline = time.monotonic() + HELD_UP
    while Owner.of(path.read_bytes()).state != state and time.monotonic() < deadline:
        time.sleep(0.01)


def from_elsewhere(lease):
    """Let a lease be that of a process on another machine, which cannot be looked at from here."""
    give(lease, machine="another boot", host="elsewhere", process=7)


def test_a_second_writer_is_refused_and_told_the_process_of_the_first(tmp_path):
    lease = take(tmp_path / "run")
    with pytest.raises(Leased, match=f"^{HERE} is writing to the folder '.*run': wait until it ends"):
        take(tmp_path / "run")
    assert claim(tmp_path / "run") is None
    lease.release()
    take(tmp_path / "run").release()
    assert not (tmp_path / "run").exists()  # it was new, and is empty


def test_a_folder_that_was_removed_is_noticed(tmp_path):
    lease = take(tmp_path / "run")
    lease.refuse_lost()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(BadInput, match="was removed, emptied or replaced"):
        lease.refuse_lost()
    other = take(tmp_path / "run")
    with pytest.raises(BadInput, match=f"the run in '.*run' was taken over by {HERE}"):
        lease.refuse_lost()
    lease.release()
    other.refuse_lost()  # the file of the other lease was not deleted
    other.release()


def test_a_renamed_folder_is_noticed(tmp_path):
    lease = take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="was removed, emptied or replaced"):
        lease.refuse_lost()
    lease.release()


@pytest.mark.long
def test_the_lease_of_a_killed_process_is_taken_over_at_once(tmp_path, holder):
    process, _ = holder
    with pytest.raises(Leased, match=f"^process {process.pid} on "):
        take(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    wait_for(tmp_path / "run" / "lease", "ended")
    started = time.monotonic()
    take(tmp_path / "run").release()
    assert time.monotonic() - started < 1


def test_a_number_that_another_process_has_now_is_not_the_owner(tmp_path):
    lease = take(tmp_path)
    abandon(lease)
    other = take(tmp_path)
    with pytest.raises(BadInput, match="was taken over by"):
        lease.refuse_lost()
    other.release()


def test_a_stopped_process_loses_its_lease_and_notices_before_it_writes(tmp_path, holder, quick):
    process, connection = holder
    assert claim(tmp_path / "run") is None
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(tmp_path / "run" / "lease", "stopped")
    lease = take(tmp_path / "run")  # after LEASE_S
    os.kill(process.pid, signal.SIGCONT)
    connection.send("check")
    assert connection.poll(HELD_UP)
    answer = connection.recv()
    assert answer.startswith(f"the run in '{tmp_path / 'run'}' was taken over by {HERE}")
    assert "\n" not in answer
    lease.refuse_lost()
    lease.release()


def test_a_lease_of_another_machine_is_taken_over_when_its_counter_stops(tmp_path, quick, caplog):
    from_elsewhere(take(tmp_path))
    started = time.monotonic()
    lease = take(tmp_path)
    assert 0.5 <= time.monotonic() - started < 5
    assert "to see whether process 7 on elsewhere still uses" in caplog.text
    lease.release()


def test_a_lease_of_another_machine_that_is_renewed_is_respected(tmp_path, quick):
    lease = take(tmp_path)
    from_elsewhere(lease)
    has_ended = threading.Event()

    def renew():
        count = 0
        while not has_ended.wait(0.1):
            count += 1
            rewrite(lease.path, renewals=str(count))

    threading.Thread(target=renew, daemon=True).start()
    with pytest.raises(Leased, match=r"^process 7 on elsewhere is writing"):
        take(tmp_path)
    deadline = time.monotonic() + 1.2  # longer than LEASE_S
    while time.monotonic() < deadline:
        assert claim(tmp_path) is None
        time.sleep(0.05)
    has_ended.set()


@pytest.mark.long
def test_a_lease_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL_S", 0.02)
    lease = take(tmp_path / "a")
    lease.renew()
    before = json.loads(lease.path.read_text())["renewals"]
    deadline = time.monotonic() + HELD_UP
    while json.loads(lease.path.read_text())["renewals"] == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(lease.path.read_text())["renewals"] > before
    lease.release()


def test_a_renewal_after_a_takeover_does_not_touch_the_new_lease(tmp_path):
    lease = take(tmp_path)
    abandon(lease)
    other = take(tmp_path)
    content = other.path.read_bytes()
    lease.renew()
    lease.release()
    assert other.path.read_bytes() == content
    other.release()


def test_a_lease_that_was_renewed_meanwhile_is_put_back(tmp_path):
    lease = take(tmp_path)
    judged = lease.path.read_bytes()
    lease.renew()
    assert not leases._remove(lease.path, judged)
    lease.refuse_lost()
    rename = type(lease.path).rename

    def late(path, target):
        lease.renew()  # between the last look and the renaming
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(lease.path), "rename", late)
        assert not leases._remove(lease.path, lease.path.read_bytes())
    lease.refuse_lost()
    lease.release()
    assert not any(tmp_path.iterdir())


def test_an_unreadable_lease_expires(tmp_path, quick):
    (tmp_path / "lease").write_bytes(b"")
    take(tmp_path).release()


def test_a_forked_process_does_not_own_the_lease(tmp_path):
    lease = take(tmp_path)
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(int(lease.is_ours))
    assert os.waitpid(child, 0)[1] == 0
    lease.refuse_lost()
    lease.release()


def test_without_proc_only_the_counter_counts(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(leases, "this_machine", lambda: "")
    lease = take(tmp_path)
    assert Owner.of(lease.path.read_bytes()).state == "unknown"
    leases._renewed.discard(lease)
    take(tmp_path).release()


def test_many_processes_take_over_and_one_wins(tmp_path):
    """Threads stand for processes: a lease knows its own id only."""
    for _ in range(20):
        abandon(take(tmp_path))
        start, taken = threading.Barrier(8), []

        def race(start=start, taken=taken):
            start.wait()
            lease = claim(tmp_path)
            if lease is not None:
                taken.append(lease)

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        owners = [lease for lease in taken if lease.is_ours]
        assert len(owners) == 1
        assert len(taken) == 1
        owners[0].release()


def test_processes_that_share_a_folder_see_each_other(tmp_path):
    one = join(tmp_path, {"rounds": 3})
    two = join(tmp_path, {"rounds": 3})
    assert [owner.settings for owner in others(tmp_path, one)] == [{"rounds": 3}]
    assert is_held(tmp_path)
    abandon(two)
    assert others(tmp_path, one) == []
    with pytest.raises(BadInput, match="was removed, emptied or replaced, or continued"):
        two.refuse_lost()
    one.release()
    assert not any(tmp_path.iterdir())
    assert not is_held(tmp_path)


def test_turns_are_taken_one_after_the_other(tmp_path):
    has_started, events = threading.Event(), []

    def second():
        has_started.set()
        with turn(tmp_path / "shared"):
            events.append("second")

    thread = threading.Thread(target=second)
    with turn(tmp_path / "shared"):
        thread.start()
        assert has_started.wait(60)
        thread.join(0.2)  # time to enter, if nothing held it back
        events.append("first")
    thread.join(60)
    assert events == ["first", "second"]
