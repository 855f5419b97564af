"""`lamina export`: every round and setting as CSV."""

import csv
import io
import json
from pathlib import Path

from helpers import call
from lamina.cli.export import table_parts
from lamina.experiment.runs import metrics_file
from lamina.experiment.runs.records import find_folders
from run_folders import LONG_RUN_ROUNDS, write_long_run, write_run


def exported(folder):
    return list(csv.DictReader(io.StringIO(b"".join(table_parts(find_folders([folder]))).decode())))


def test_an_export_holds_every_round(tmp_path):
    long_run = write_long_run(tmp_path / "long")
    rows = exported(long_run)
    written = [json.loads(line) for line in (long_run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == LONG_RUN_ROUNDS
    for name in written[0]:
        assert [json.loads(row[name]) for row in rows] == [line[name] for line in written]
    assert rows[0]["round"] == "1"


def test_an_export_keeps_gaps_names_and_awkward_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics_file, "CHUNK_BYTES", 100)  # less than a line
    folder = write_run(Path("a],[b"), [0.5, None, 0.25])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"late": 1e-05, "null_column": None, "bytes_up": 2**62}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = exported(folder)
    assert [row["run"] for row in rows] == ["a],[b"] * 3
    assert [row["accuracy"] for row in rows] == ["0.5", "", "0.25"]
    assert [row["null_column"] for row in rows] == ["", "", ""]
    assert [row["late"] and float(row["late"]) for row in rows] == ["", 1e-05, ""]
    assert [row["bytes_up"] for row in rows] == ["2", str(2**62), "2"]


def test_exported_runs_hold_no_formula(here, capsys):
    assert call("run", "small.toml", "--out", "=run", "--quiet") == 0
    assert call("export", "=run") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["run"] == "'=run"
    assert float(rows[0]["seed"]) == 0
