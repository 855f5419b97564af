"""Runs of many rounds: curves are thinned without losing a peak, tables and exports use every round."""

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
PEAK, LOWER_PEAK, DIP, SPIKE = 7_654, 15_050, 12_345, 4_400  # rounds, none of which an even choice would hit


@pytest.fixture
def long_run(tmp_path):
    """A slow rise with two peaks and one dip of a single round, and a spike in another column."""
    accuracies = [0.4 + 0.2 * i / ROUNDS for i in range(1, ROUNDS + 1)]
    accuracies[PEAK - 1], accuracies[LOWER_PEAK - 1], accuracies[DIP - 1] = 0.95, 0.8, 0.01
    folder = write_run(tmp_path / "long", accuracies)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[SPIKE - 1] = json.dumps({**json.loads(lines[SPIKE - 1]), "train_loss": 99.0}) + "\n"
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_a_thinned_curve_keeps_extremes_and_the_first_round_at_a_target(long_run):
    report = build.build([long_run], targets=[0.5, 0.9])
    (curve,) = page.page_data(report)["curves"]
    crossing = tables.cost_to_target(report.curves[0].histories, 0.5).rounds
    assert crossing == 7_654  # the peak
    assert {1, PEAK, LOWER_PEAK, DIP, SPIKE, ROUNDS} <= set(curve["rounds"])
    assert len(curve["rounds"]) < 600
    drawn = dict(zip(curve["rounds"], curve["columns"]["accuracy"][0], strict=True))
    assert (drawn[PEAK], drawn[DIP]) == (0.95, 0.01)
    assert max(curve["columns"]["train_loss"][0]) == 99.0
    assert curve["thinned"] == f"{len(curve['rounds'])} of {ROUNDS} rounds"


def test_a_target_between_the_drawn_rounds_is_drawn(long_run):
    below_peak = 0.45004  # reached in round 5,004
    (curve,) = page.page_data(build.build([long_run], targets=[below_peak]))["curves"]
    assert 5_004 in curve["rounds"]


def test_a_drawn_figure_keeps_extremes(long_run):
    curves = build.build([long_run]).curves
    metric = figures.described("accuracy")
    (line,) = figures.curve_figure(curves, metric, "round").axes[0].lines
    rounds, values = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert len(rounds) <= 6 * figures.STRETCHES + 2
    assert {1, PEAK, LOWER_PEAK, DIP, ROUNDS} <= set(rounds.astype(int))
    assert (values.min(), values.max()) == pytest.approx((1.0, 95.0))


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
