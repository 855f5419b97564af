"""The tables of a report: costs, results, configurations and runs against hand-computed numbers, and CSV."""

import csv
import io
import math

from lamina import History
from lamina.report import build, tables
from run_folders import curves_in, write_run


def history(*accuracies, **each_round):
    each_round = {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5, **each_round}
    return History([{"round": i, "accuracy": a, **each_round} for i, a in enumerate(accuracies, 1)])


def test_cost_to_target_is_the_mean_over_seeds():
    cost = tables.cost_to_target([history(0.5, 0.8, 0.9), history(0.6, 0.95, 0.1)], 0.9)
    # rounds 3 and 2; 5 bytes and half a second in each
    assert cost == (2.5, 12.5, 1.25, 2)


def test_a_seed_that_never_gets_there_makes_the_cost_infinite():
    cost = tables.cost_to_target([history(0.5, 0.9), history(0.5, 0.8), History()], 0.9)
    assert cost == (math.inf, math.inf, math.inf, 1)
    nothing = tables.cost_to_target([History()], 0.9)
    assert all(math.isnan(value) for value in nothing[:3])


def test_the_cost_table(two):
    table = tables.cost_table(curves_in(two), [0.8, 0.9], baseline=0)
    assert table.head[:5] == ["target", "curve", "reached", "rounds", "× baseline"]
    # 80 %: rounds 2 and 3 against 1 and 1; bytes 12.5 and 5 of 1e3; seconds 1.25 and 0.5
    assert table.rows == [
        ["80%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "2.5", "1.00", "0.0125", "1.00", "1.25", "1.00"],
        ["80%", "Fed-LAMB, lr 0.03", "2/2", "1.0", "0.400", "0.00500", "0.400", "0.500", "0.400"],
        ["90%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "2.5", "1.00", "0.0125", "1.00", "1.25", "1.00"],
        ["90%", "Fed-LAMB, lr 0.03", "1/2", "∞", "∞", "∞", "∞", "∞", "∞"],
    ]
    against_lamb = tables.cost_table(curves_in(two), [0.9], baseline=1)
    assert [row[4] for row in against_lamb.rows] == ["–", "–"]  # nothing can be compared with never


def test_the_results_table(two):
    first, second = tables.results_table(curves_in(two)).rows
    # best 90, 90; last 70, 90: mean 80, std sqrt(2 * 10²) = 14.1
    assert first[:5] == ["FedAvg (Fed-SGD), lr 0.1", "2", "90.0 ± 0.0", "80.0 ± 14.1", "3"]
    # best 90, 80: mean 85, std 7.07; last 20, 40: mean 30, std 14.1
    assert second[2:4] == ["85.0 ± 7.1", "30.0 ± 14.1"]
    assert tables.results_table(curves_in(two)).head[5] == "kB per round"
    assert first[5:] == ["0.00500", "0.0150", "0.500"]


def test_halves_go_up_as_in_the_browser():
    assert [tables.fixed(26.25), tables.fixed(0.5, 0), tables.fixed(0.15)] == ["26.3", "1", "0.1"]
    assert tables.significant(1234.5) == "1235"


def test_default_targets_are_what_all_and_what_the_best_reach(two):
    # every seed of Fed-LAMB reaches 80 %, every seed of FedAvg 90 %
    assert tables.default_targets(curves_in(two)) == [0.8, 0.9]


def test_the_configuration_tables(two):
    differs, common = tables.config_tables(curves_in(two))
    rows = {key: cells for key, *cells in differs.rows}
    assert rows["train.lr"] == ["0.1", "0.03"]
    assert rows["train.seed"] == ["0, 1", "0, 1"]
    assert ["model.hidden", "16"] in common.rows
    assert not {key for key, *_ in common.rows} & set(rows)


def test_the_runs_table(tmp_path):
    write_run(tmp_path / "whole" / "seed0", [0.5, 0.6])
    write_run(tmp_path / "broken" / "seed0", [0.5], lr=9.0, rounds=2, diverged="round 2, client 3: not finite")
    write_run(tmp_path / "running" / "seed0", [0.5], lr=0.2, rounds=2, run={"device": "cuda:0"})
    runs, environment = tables.runs_tables(curves_in(tmp_path))
    assert runs.head == ["folder", "curve", "seed", "rounds", "device"]
    ended = {row[0]: row[3:] for row in runs.rows}
    assert ended["whole/seed0"] == ["2", "cpu"]
    assert ended["broken/seed0"] == ["1 of 2, diverged", "cpu"]
    assert ended["running/seed0"] == ["1 of 2, not finished", "cuda:0"]
    assert ["torch", "2.0"] in environment.rows
    notes = build.build([tmp_path]).notes
    assert "broken/seed0: round 2, client 3: not finite" in notes
    assert "running/seed0: 1 of 2 rounds, not finished" in notes


def test_csv_has_numbers_in_columns_of_their_own():
    table = tables.Table("t", ["curve", "best"], [['a, "b"', "1.0 ± 0.5"], ["c", "∞"], ["d", "–"]])
    rows = list(csv.reader(io.StringIO(tables.to_csv(table))))
    assert rows == [["curve", "best", "best, std"], ['a, "b"', "1.0", "0.5"], ["c", "inf", ""], ["d", "", ""]]


def test_numbers_beyond_a_page_of_digits_are_written_as_in_the_browser():
    assert [tables.fixed(1e21), tables.fixed(-1.5e300), tables.significant(1e30)] == ["1e+21", "-1.5e+300", "1e+30"]
    assert tables.mean_and_spread([1e308, 1e308], tables.significant) == "∞ ± 0"
