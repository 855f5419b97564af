"""Metrics files: read once, read again while they grow, and read up to the first damaged line."""

import json

import pytest

from lamina.experiment.runs.metrics_file import MetricsFile


def line(number, **more):
    return json.dumps({"round": number, "loss": 1 / number, "seconds": 0.5, **more}) + "\n"


@pytest.fixture
def file(tmp_path):
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


def test_a_growing_file_is_read_again(file):
    file.read()
    rows = file.rows
    assert file.read().rows is rows  # nothing has changed
    append(file, line(11) + line(12)[:-5])
    assert len(file.read().rows) == 11  # the last line is half-written
    append(file, line(12)[-5:])
    assert len(file.read().rows) == 12


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
def test_rows_stop_before_a_damaged_line(file, damage):
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join([*lines[:3], damage + "\n", *lines[4:]]))
    file.read()
    assert (len(file.rows), file.damaged) == (3, 4)
    assert file.path.read_text()[: file.end_of(3)] == "".join(lines[:3])
    file.path.write_text("".join(lines))  # repaired
    assert (len(file.read().rows), file.damaged) == (10, None)
