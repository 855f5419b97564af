"""Runs of many rounds: curves are thinned, tables use every round."""

import subprocess
import sys

import pytest

from lamina.report import build, figures, page, tables
from run_folders import LONG_RUN_ROUNDS, PEAK_ROUND, write_long_run, write_run


@pytest.fixture
def long_run(tmp_path):
    return write_long_run(tmp_path / "long")


def test_a_long_curve_is_drawn_at_evenly_spaced_rounds_and_tables_use_all(long_run):
    report = build.build([long_run], targets=[0.9])
    (curve,) = page.page_data(report)["curves"]
    assert (curve["rounds"][0], curve["rounds"][-1]) == (1, LONG_RUN_ROUNDS)
    assert len(curve["rounds"]) == figures.MOST_ROUNDS_DRAWN
    assert curve["thinned"] == f"{len(curve['rounds'])} of {LONG_RUN_ROUNDS} rounds"
    assert [PEAK_ROUND, 0.95] in curve["touches"][0]  # the page's own table
    assert tables.cost_to_target(report.curves[0].records, 0.9).touch == PEAK_ROUND
    assert tables.results_table(report.curves).rows[0][3] == "95.0"
    settled = tables.cost_to_target(report.curves[0].records, 0.55).rounds
    assert settled == next(step[0] for step in curve["steps"][0] if step[1] >= 0.55)


COMMANDS = """
import resource, sys
from lamina import cli
for folder in ("short", "long"):
    for command in (["watch", "--once"], ["export", "--out", f"{folder}.csv"], ["report", "--out", f"{folder}.html"]):
        try:
            cli.main([command[0], folder, *command[1:]])
        except SystemExit as ended:
            assert not ended.code, ended.code
        print(command[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.long
def test_a_hundred_thousand_rounds_take_forty_megabytes(tmp_path):
    """Stored as dicts, they took 220. One process imports everything for the short run, and then reads the long one."""
    for name, rounds in (("short", 1), ("long", 100_000)):
        write_run(tmp_path / name, [0.5] * rounds)
    done = subprocess.run([sys.executable, "-c", COMMANDS], cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, before, watch, export, report = (line.split() for line in done.stderr.splitlines())
    for command, kilobytes in (watch, export, report):  # the most so far
        assert int(kilobytes) - int(before[1]) < 40_000, command
