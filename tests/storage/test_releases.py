"""The ledger of releases: what is free, refused or counted, and what it survives."""

import json
import multiprocessing

import pytest

from lamina.base.errors import BadInput
from lamina.storage.releases import Releases


@pytest.fixture
def path(tmp_path):
    return tmp_path / "key.releases" / "run.jsonl"


def enter_many(path, start, results):
    start.wait()
    ledger, salts = Releases(path, can_repeat=True), []
    for number in range(1, 41):
        salts.append(ledger.enter(number, "same")[1])
    results.put(salts)


def test_the_same_mean_is_free_and_another_one_is_refused(path):
    for _ in range(2):
        ledger = Releases(path)
        for number, tag in enumerate("abc", 1):
            assert ledger.enter(number, tag) == (0, "")
    assert len(path.read_text().splitlines()) == 3
    before = path.read_bytes()
    for number in (1, 3):
        with pytest.raises(BadInput, match=f"round {number} was released before") as error:
            Releases(path).enter(number, "other")
        assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0


def test_repeats_have_salts_of_their_own_and_are_counted(path):
    ledger = Releases(path, can_repeat=True)
    salts = {tag: ledger.enter(1, tag) for tag in "abc"}
    assert [place for place, _ in salts.values()] == [0, 1, 2]
    assert len({salt for _, salt in salts.values()}) == 3
    assert all(len(salt) == 32 for _, salt in salts.values())
    again = Releases(path, can_repeat=True)
    assert {tag: again.enter(1, tag) for tag in "bca"} == salts
    assert again.first_salt(1) == salts["a"][1]
    again.enter(2, "d")
    assert ledger.counts() == again.counts() == {1: 3, 2: 1}


def test_a_round_needs_the_one_before_in_the_ledger(path):
    Releases(path).enter(1, "a")
    with pytest.raises(BadInput, match="lacks round 2"):
        Releases(path).enter(3, "c")
    path.unlink()
    with pytest.raises(BadInput, match="lacks round 1") as error:
        Releases(path).enter(2, "b")
    assert "\n" not in str(error.value)


def test_half_a_line_is_no_release_and_a_damaged_one_is_refused(path):
    Releases(path).enter(1, "a")
    whole = path.read_bytes()
    line = json.dumps({"round": 2, "mean": "killed", "salt": ""}).encode()
    path.write_bytes(whole + line)
    ledger = Releases(path)
    assert ledger.counts() == {1: 1}
    assert ledger.enter(2, "b") == (0, "")
    assert Releases(path).counts() == {1: 1, 2: 1}
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(BadInput, match="is damaged at byte 0"):
        Releases(path).counts()


def test_two_objects_on_one_file_see_each_others_releases(path):
    one, other = Releases(path), Releases(path)
    one.enter(1, "a")
    other.enter(1, "a")
    other.enter(2, "b")
    with pytest.raises(BadInput, match="round 2 was released before"):
        one.enter(2, "c")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])  # restored from an older copy
    one.enter(2, "c")
    assert one.counts() == {1: 1, 2: 1}


@pytest.mark.long
def test_processes_that_write_at_once_agree_on_every_salt(path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=enter_many, args=(path, start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    first, *others = (results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    assert others == [first, first]
    assert len(path.read_text().splitlines()) == 40
