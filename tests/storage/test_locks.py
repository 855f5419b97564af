"""Locks: one writer per folder, who notices that the folder was removed, and turns of several processes."""

import os
import shutil
import threading

import pytest

from lamina.base.errors import BadInput
from lamina.storage.locks import Lock, Locked, turn


def test_a_second_writer_is_refused_and_told_the_process_of_the_first(tmp_path):
    lock = Lock(tmp_path / "run")
    with pytest.raises(Locked, match=f"^process {os.getpid()} is writing to the folder '.*run': wait until it ends"):
        Lock(tmp_path / "run")
    lock.release()
    Lock(tmp_path / "run").release()


def test_a_released_lock_deletes_its_file_only_if_told(tmp_path):
    Lock(tmp_path).release()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    Lock(tmp_path).release(delete=True)
    assert not (tmp_path / "lock").exists()


def test_a_folder_that_was_removed_or_replaced_is_noticed(tmp_path):
    lock = Lock(tmp_path / "run")
    lock.refuse_lost()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(BadInput, match="was removed, emptied or replaced"):
        lock.refuse_lost()
    other = Lock(tmp_path / "run")
    with pytest.raises(BadInput, match="was removed, emptied or replaced"):
        lock.refuse_lost()
    lock.release(delete=True)
    other.refuse_lost()  # the file of the other lock was not deleted
    other.release()


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
