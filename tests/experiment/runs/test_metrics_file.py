"""Metrics files: read once, read again while they grow, and read up to the first damaged line."""

import json

import pytest

from lamina.experiment.runs import metrics_file
from lamina.experiment.runs.metrics_file import MetricsFile


def line(number, **more):
    return json.dumps({"round": number, "loss": 1 / number, "seconds": 0.5, **more}) + "\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "CHUNK_BYTES", 100)  # less than three lines
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(1, 11))))
    return MetricsFile(path)


def append(file, text):
    with file.path.open("a") as growing:
        growing.write(text)


def test_rows_and_the_bytes_where_they_end(file):
    file.read()
    assert [row["round"] for row in file.rows] == list(range(1, 11))
    text = file.path.read_bytes()
    assert [text[: file.end_of(number)].count(b"\n") for number in range(11)] == list(range(11))
    assert file.damaged is None


def test_only_new_lines_are_read_again(file, monkeypatch):
    file.read()
    read = []
    monkeypatch.setattr(metrics_file, "_rows", lambda lines, before, rows=metrics_file._rows: (
        read.append(lines) or rows(lines, before)
    ))  # fmt: skip
    assert len(file.read().rows) == 10
    assert read == []
    append(file, line(11) + line(12)[:-5])
    assert len(file.read().rows) == 11  # the last line is half-written
    append(file, line(12)[-5:])
    assert len(file.read().rows) == 12
    assert b"".join(read).decode() == line(11) + line(12)


def test_a_file_that_was_cut_back_or_replaced_is_read_as_a_whole(file):
    file.read()
    lines = [line(number) for number in range(1, 8)] + [line(number, accuracy=0.5) for number in range(8, 15)]
    file.path.write_text("".join(lines))
    assert len(file.read().rows) == 14
    assert file.rows[9]["accuracy"] == 0.5
    file.path.write_text("".join(lines[:3]))
    assert len(file.read().rows) == 3


DAMAGE = [
    "", "x", "5", "[1]", "\x00\x00", '{"round": 4}, {"round": 5}', '{"round": 5, "loss": 1}', '{"loss": 1}',
    '{"round": 4,', '{"round": 4, "loss": "0.5"}', '{"round": 4, "loss": true}', '{"round": 4, "loss": NaN}',
    '{"round": 4, "loss": 1e999}', '{"round": 4, "loss": {}}', '{"round": 4, "loss": 1' + "0" * 400 + "}",
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("chunk", [100, 10_000])
def test_rows_stop_before_a_damaged_line(file, monkeypatch, damage, chunk):
    monkeypatch.setattr(metrics_file, "CHUNK_BYTES", chunk)
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join([*lines[:3], damage + "\n", *lines[4:]]))
    file.read()
    assert (len(file.rows), file.damaged) == (3, 4)
    assert file.path.read_text()[: file.end_of(3)] == "".join(lines[:3])
    file.path.write_text("".join(lines))  # repaired
    assert (len(file.read().rows), file.damaged) == (10, None)


def test_a_line_without_an_end_is_damage_and_not_kept_in_memory(file, monkeypatch):
    monkeypatch.setattr(metrics_file, "LONGEST_LINE_BYTES", 500)
    append(file, "9" * 5000)
    assert (len(file.read().rows), file.damaged) == (10, 11)
