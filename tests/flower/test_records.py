"""What the server keeps beside the model: the journal, and the count of its starts."""

import json

from lamina.flower.records import TASKS_PER_START, Attendance, Journal, count_start


def test_a_torn_journal_is_mended(tmp_path):
    journal = Journal(tmp_path)
    lines = [{"round": 1, "complete": True}, {"round": 2, "complete": False}, {"round": 2, "complete": True}]
    journal.path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"round": 3, "com')
    journal.cut(1)
    assert journal.path.read_text() == "".join(json.dumps(line) + "\n" for line in lines[:2])


def test_every_start_has_numbers_of_its_own(tmp_path):
    assert count_start(tmp_path, 0) == TASKS_PER_START
    assert count_start(tmp_path, 0) == 2 * TASKS_PER_START
    assert count_start(tmp_path, 7 * TASKS_PER_START + 5) == 8 * TASKS_PER_START
    assert count_start(tmp_path, 0) == 9 * TASKS_PER_START


def test_a_round_is_recorded_by_client_and_node(tmp_path):
    attendance = Attendance(3, 2, nodes={0: 70, 1: 71, 2: 2**63 + 5})
    attendance.miss(0, "it went offline")
    attendance.refuse(1, "its training loss is nan")
    attendance.miss(3, "it is not connected")
    for _ in range(2):
        attendance.note("client 1 has lost its client state and starts again")
    attendance.accept([2])
    assert attendance.lines() == [
        "client 0 (node 70): it went offline",
        "client 3: it is not connected",
        "client 1 (node 71): refused: its training loss is nan",
        "client 1 has lost its client state and starts again",
    ]
    Journal(tmp_path).write(attendance)
    entry = json.loads((tmp_path / "federation.jsonl").read_text())
    assert (entry["round"], entry["attempt"], entry["complete"]) == (3, 2, True)
    assert entry["took_part"] == [{"client": 2, "node": str(2**63 + 5)}]
