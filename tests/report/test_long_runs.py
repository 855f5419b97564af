"""Runs of many rounds: curves are thinned, tables and exports use every round."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lamina.cli.export import table_parts
from lamina.experiment.runs import metrics_file
from lamina.experiment.runs.records import find_folders
from lamina.report import build, figures, page, tables
from run_folders import write_run

ROUNDS = 20_000
PEAK = 7_654


@pytest.fixture
def long_run(tmp_path):
    """A slow rise with a peak of a single round, which no even choice of rounds hits."""
    accuracies = [0.4 + 0.2 * i / ROUNDS for i in range(1, ROUNDS + 1)]
    accuracies[PEAK - 1] = 0.95
    return write_run(tmp_path / "long", accuracies)


def test_a_long_curve_is_drawn_at_evenly_spaced_rounds_and_tables_use_all(long_run):
    report = build.build([long_run], targets=[0.9])
    (curve,) = page.page_data(report)["curves"]
    assert (curve["rounds"][0], curve["rounds"][-1]) == (1, ROUNDS)
    assert len(curve["rounds"]) == figures.MOST_ROUNDS_DRAWN
    assert curve["thinned"] == f"{len(curve['rounds'])} of {ROUNDS} rounds"
    assert [PEAK, 0.95] in [step[:2] for step in curve["steps"][0]]  # the page's own table
    assert tables.cost_to_target(report.curves[0].histories, 0.9).rounds == PEAK
    assert tables.results_table(report.curves).rows[0][2] == "95.0"


def test_a_figure_draws_the_ends_of_a_long_run(long_run):
    (line,) = figures.curve_figure(build.build([long_run]).curves, figures.described("accuracy"), "round").axes[0].lines
    rounds = np.asarray(line.get_xdata())
    assert (rounds[0], rounds[-1], len(rounds)) == (1, ROUNDS, figures.MOST_ROUNDS_DRAWN)


def exported(folder):
    return list(csv.DictReader(io.StringIO(b"".join(table_parts(find_folders([folder]))).decode())))


def test_an_export_holds_every_round(long_run):
    rows = exported(long_run)
    written = [json.loads(line) for line in (long_run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == ROUNDS
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


MEASURE = """
import resource, sys
from lamina import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.parametrize("command", [["watch", "--once"], ["export", "--out", "x.csv"], ["report", "--out", "x.html"]])
def test_a_hundred_thousand_rounds_take_forty_megabytes(tmp_path, command):
    """Stored as dicts, they took 220."""
    kilobytes = []
    for rounds in (1, 100_000):
        folder = write_run(tmp_path / str(rounds), [0.5] * rounds)
        arguments = [sys.executable, "-c", MEASURE, command[0], str(folder), *command[1:]]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
        kilobytes.append(int(done.stderr))
    assert kilobytes[1] - kilobytes[0] < 40_000
