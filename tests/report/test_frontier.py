"""The table of a frontier against numbers computed from its run folders, and which rows are on the frontier."""

import contextlib
import csv
import io
import json
import math
import statistics
from pathlib import Path

import pytest

from lamina.base.errors import BadInput
from lamina.report import figures
from lamina.report.build import build
from lamina.report.figures import frontier_figure
from lamina.report.frontier import pareto, read_frontier
from lamina.report.page import html
from lamina.report.tables import to_csv
from small_frontier import RUNS, SEEDS, make

PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10  # of the model: digits have 64 pixels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a finished frontier."""
    place = tmp_path_factory.mktemp("frontier")
    with contextlib.chdir(place):
        make("f")
    return place / "f"


@pytest.fixture(scope="module")
def frontier(folder):
    return read_frontier(folder)


def cells(frontier):
    """Every row of the table by method and channel, as a dict by heading."""
    table = frontier.table()
    return [dict(zip(table.head, row, strict=True)) for row in table.rows]


def rows_of(folder, run):
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_accuracy_bytes_and_epsilon_are_those_of_the_run_folders(folder, frontier):
    rows = cells(frontier)
    assert len(rows) * SEEDS == len(RUNS)
    for number, row in enumerate(rows):
        runs = [rows_of(folder, run) for run in RUNS[number * SEEDS : (number + 1) * SEEDS]]
        finals = [100 * statistics.mean(each["accuracy"] for each in run[-10:]) for run in runs]
        shown = [float(part) for part in row["final accuracy, %"].split(" ± ")]
        assert shown == pytest.approx([statistics.mean(finals), statistics.stdev(finals)], abs=0.051)
        up, down = (
            statistics.mean(sum(each[key] for each in run) for run in runs) for key in ("bytes_up", "bytes_down")
        )
        assert float(row["kB up"]) == pytest.approx(up / 1e3, rel=5e-3)
        assert float(row["kB in all"]) == pytest.approx((up + down) / 1e3, rel=5e-3)
        spent = [run[-1].get("epsilon", math.inf) for run in runs]
        assert row["ε"] == ("∞" if math.isinf(spent[0]) else f"{max(spent):.2f}")
    # eleven rounds of four clients: four bytes a number; or a bit a number, and four bytes for each of four layers
    assert [row["kB up"] for row in rows[:2]] == [f"{44 * 4 * PARAMETERS / 1e3:.0f}", f"{44 * (77 + 16) / 1e3:.2f}"]


def test_the_cost_to_the_target(folder, frontier):
    fedavg = cells(frontier)[0]
    runs = [rows_of(folder, run) for run in RUNS[:SEEDS]]

    def settles(accuracies):
        means = [statistics.mean(accuracies[max(0, end - 5) : end]) for end in range(1, len(accuracies) + 1)]
        return next(start for start in range(len(means)) if min(means[start:]) >= 0.2) + 1

    rounds = [settles([row["accuracy"] for row in run]) for run in runs]
    size = statistics.mean(
        sum(row["bytes_up"] + row["bytes_down"] for row in run[:number])
        for run, number in zip(runs, rounds, strict=True)
    )
    assert float(fedavg["kB to 20%"]) == pytest.approx(size / 1e3, rel=5e-3)
    # the model each way over 14.7 and 13.6 Mbit/s, half a second a step, and a round trip; all clients take as long
    bits = 32 * PARAMETERS
    seconds = statistics.mean(rounds) * (bits / 14.7e6 + bits / 13.6e6 + 0.053 + 5 * 0.5)
    assert float(fedavg["s to 20%, 4g"]) == pytest.approx(seconds, rel=5e-3)


def test_the_fastest_on_every_clock_in_words(frontier):
    seconds = {(row["method"], row["channel"], row["ε"]): row for row in cells(frontier)}
    best = {}
    for clock in ("4g", "home"):
        reached = {
            key: float(row[f"s to 20%, {clock}"]) for key, row in seconds.items() if row[f"s to 20%, {clock}"] != "–"
        }
        best[clock] = min(reached, key=reached.get)
    method, channel, _ = best["4g"]
    named = method if channel == "none" else f"{method} with sign and feedback"
    assert frontier.sentence().startswith(f"fastest to 20% on 4g: {named}")
    assert "; on home: " in frontier.sentence()
    assert [row[0] for row in frontier.tables()[1].rows] == ["4g", "home"]


def test_a_target_that_no_run_reaches(folder):
    config = folder / "config.json"
    before = config.read_text()
    tree = json.loads(before)
    tree["compare"]["target"] = 1.0
    try:
        config.write_text(json.dumps(tree))
        unreached = read_frontier(folder)
    finally:
        config.write_text(before)
    assert {row["kB to 100%"] for row in cells(unreached)} == {"not within 11 rounds"}
    assert {row["s to 100%, 4g"] for row in cells(unreached)} == {"–"}
    assert unreached.sentence() == "no method stays at 100%: not within 11 rounds"


def test_without_a_target_the_seconds_are_those_in_all(folder):
    config = folder / "config.json"
    before = config.read_text()
    tree = json.loads(before)
    tree["compare"]["target"] = None
    try:
        config.write_text(json.dumps(tree))
        frontier = read_frontier(folder)
    finally:
        config.write_text(before)
    bits = 32 * PARAMETERS
    in_all = 11 * (bits / 14.7e6 + bits / 13.6e6 + 0.053 + 5 * 0.5)
    assert float(cells(frontier)[0]["s in all, 4g"]) == pytest.approx(in_all, rel=5e-3)
    assert float(cells(frontier)[2]["s in all, 4g"]) == pytest.approx(in_all, rel=5e-3)  # private: the same bytes
    assert frontier.sentence() == ""
    assert len(frontier.tables()) == 1


def test_pareto_on_numbers_by_hand():
    # minus accuracy, megabytes, ε
    rows = {
        "accurate": (-0.9, 100, math.inf),
        "small": (-0.8, 10, math.inf),
        "worse than small in both": (-0.7, 20, math.inf),
        "as good as small, and larger": (-0.8, 11, math.inf),
        "the same as small": (-0.8, 10, math.inf),
        "private": (-0.6, 100, 8.0),
        "private, and no better for a larger ε": (-0.6, 100, 9.0),
        "diverged": (math.inf, 1, math.inf),
    }
    kept = dict(zip(rows, pareto(list(rows.values())), strict=True))
    assert [name for name, is_kept in kept.items() if is_kept] == ["accurate", "small", "the same as small", "private"]
    assert pareto([]) == []


def test_the_marked_rows_are_those_that_no_row_beats(folder, frontier):
    numbers = []
    for number in range(len(frontier.points)):
        runs = [rows_of(folder, run) for run in RUNS[number * SEEDS : (number + 1) * SEEDS]]
        accuracy = statistics.mean(statistics.mean(each["accuracy"] for each in run[-10:]) for run in runs)
        size = sum(each["bytes_up"] + each["bytes_down"] for run in runs for each in run)
        numbers.append((accuracy, -size, -max(run[-1].get("epsilon", math.inf) for run in runs)))
    expected = []
    for one in numbers:
        better = [all(b >= a for a, b in zip(one, other, strict=True)) and other != one for other in numbers]
        expected.append("" if any(better) else "yes")
    assert [row["frontier"] for row in cells(frontier)] == expected
    assert {"", "yes"} == set(expected)


def test_the_report_of_the_folder_has_table_and_picture(folder, frontier):
    report = build([folder])
    written = {table.name: to_csv(table) for table in report.tables()}
    assert {"frontier", "fastest"} <= written.keys()
    rows = list(csv.DictReader(io.StringIO(written["frontier"])))
    assert [row["method"] for row in rows] == [point.method for point in frontier.points]
    page = html(report)
    assert page.count('<section id="frontier">') == 1
    assert 'data-name="frontier"' in page
    assert "data:image/png;base64," in page
    # the curves are named by what differs: the noise of single seeds is not among it
    names = [curve.name for curve in report.curves]
    assert names[:4] == [f"FedAvg (Fed-SGD){what}" for what in ("", ", epsilon 2", ", epsilon 8", ", sign")]
    assert all(len(curve.records) == SEEDS for curve in report.curves)


def test_the_report_of_a_single_run_has_none(folder, monkeypatch):
    report = build([folder / "fedavg"])
    assert not report.frontiers
    assert 'id="frontier"' not in html(report)
    for name in ("curve_figure", "frontier_figure"):
        monkeypatch.setattr(figures, name, lambda *arguments: None)
    assert "frontier" not in {name for name, _ in figures.report_figures(report)}
    assert "frontier" in {name for name, _ in figures.report_figures(build([folder]))}


def test_the_picture_has_a_panel_for_bytes_every_clock_and_epsilon(frontier):
    figure = frontier_figure(frontier)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == [
        "kB sent, both directions", "seconds in all, 4g", "seconds in all, home", "ε: smaller is safer"
    ]  # fmt: skip
    assert all(axes.get_xscale() == "log" for axes in panels)
    drawn = [len(axes.lines) for axes in panels]
    assert drawn == [2 + 4] * 4  # a line for every method, and a marker for every point: 2 codecs, or 2 levels


def test_a_damaged_configuration_is_one_line(folder, tmp_path):
    tree = json.loads((folder / "config.json").read_text())
    del tree["frontier"]["entries"]
    Path(tmp_path, "config.json").write_text(json.dumps(tree))
    with pytest.raises(BadInput, match="is not a frontier's configuration"):
        read_frontier(tmp_path)
