"""The tables of a report: costs, results, configurations and runs against hand-computed numbers, and CSV."""

import csv
import io
import math

import pytest

import helpers
from lamina import History
from lamina.report import build, tables
from run_folders import curves_in, write_run


def runs(*accuracies, diverged=None):
    """Return a run for every list of accuracies; every round sends 5 bytes and takes half a second."""
    each_round = {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5}
    histories = [
        History([{"round": i, "accuracy": value, **each_round} for i, value in enumerate(seed, 1)])
        for seed in accuracies
    ]
    return helpers.trial("a", histories, diverged=diverged).records


def test_cost_to_target_is_the_mean_over_seeds_until_they_stay_there():
    # trailing means: .5, .7, .733; .6, .75, .8. They stay at 0.7 from round 2 on, and touch it in rounds 2 and 2
    cost = tables.cost_to_target(runs([0.5, 0.9, 0.8], [0.6, 0.9, 0.9]), 0.7)
    assert cost[:6] == (2.0, 10.0, 1.0, 2, 2.0, 3)
    # from rounds 3 and 2 on
    cost = tables.cost_to_target(runs([0.5, 0.9, 0.8], [0.6, 0.9, 0.9]), 0.71)
    assert cost[:6] == (2.5, 12.5, 1.25, 2, 2.0, 3)


def test_a_private_run_that_does_not_tell_its_seconds_has_none():
    (record,) = runs([0.9, 0.9])
    for row in record.history.rows:
        del row["seconds"]
    assert math.isnan(tables.cost_to_target([record], 0.8).seconds)
    curve = helpers.trial("a", [record.history])
    table = tables.results_table([curve])
    assert dict(zip(table.head, table.rows[0], strict=True))["seconds per round"] == "–"


def test_a_seed_that_does_not_stay_there_leaves_no_cost():
    cost = tables.cost_to_target(runs([0.9, 0.9], [0.9, 0.5]), 0.8)
    assert all(math.isnan(value) for value in cost[:3])
    assert cost[3:6] == (1, 1.0, 2)
    assert tables.rounds_text(cost.rounds, cost.limit) == "not within 2 rounds"
    nothing = tables.cost_to_target(runs([]), 0.9)
    assert all(math.isnan(value) for value in nothing[:3])
    assert tables.rounds_text(nothing.rounds, nothing.limit) == "–"


def test_a_run_that_diverged_has_no_cost_and_no_final_value():
    lost = runs([0.9, 0.9], diverged="in round 3")
    assert tables.cost_to_target(lost, 0.8).reached == 0
    assert tables.cost_to_target(lost, 0.8).touch == 1.0
    assert tables.final_and_best(lost, "accuracy") == ("–", "90.0")


def test_the_cost_table(two):
    table = tables.cost_table(curves_in(two), [0.4, 0.6], baseline=0)
    assert table.head[:6] == ["target", "curve", "reached", "rounds", "× baseline", "first touch"]
    # 60 %: FedAvg stays there from rounds 2 and 3 on; bytes 12.5 of 1e3, seconds 1.25; one seed of Fed-LAMB does not
    unreached = "not within 3 rounds"
    assert table.rows == [
        ["40%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "1.0", "1.00", "1.0", "0.00500", "1.00", "0.500", "1.00"],
        ["40%", "Fed-LAMB, lr 0.03", "2/2", "1.0", "1.00", "1.0", "0.00500", "1.00", "0.500", "1.00"],
        ["60%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "2.5", "1.00", "2.0", "0.0125", "1.00", "1.25", "1.00"],
        ["60%", "Fed-LAMB, lr 0.03", "1/2", unreached, "–", "1.0", "–", "–", "–", "–"],
    ]
    against_lamb = tables.cost_table(curves_in(two), [0.6], baseline=1)
    assert [row[4] for row in against_lamb.rows] == ["–", "–"]  # the baseline has no cost
    written = list(csv.reader(io.StringIO(tables.to_csv(table))))
    assert written[4][2:6] == ["1/2", "", "", "1.0"]


def test_the_seconds_of_a_clock_are_beside_the_other_costs(timed, tmp_path):
    curves = curves_in(timed)
    table = tables.cost_table(curves, [0.4, 0.6], baseline=0)
    assert table.head[-4:] == ["seconds", "× baseline", "clock s", "× baseline"]
    # FedAvg stays at 40 % from round 1 on, Fed-LAMB too; at 60 % from rounds 2 and 3 on, Fed-LAMB with one seed only
    assert [row[-2:] for row in table.rows] == [["10.0", "1.00"], ["4.00", "0.400"], ["25.0", "1.00"], ["–", "–"]]
    results = tables.results_table(curves)
    assert [results.head[-1], *(row[-1] for row in results.rows)] == ["clock s in all", "30.0", "12.0"]
    entries = [helpers.trial(curve.records[0].algorithm, curve.histories) for curve in curves]
    compared = tables.algorithms_table(entries, 0.4, "fedavg")
    assert compared.head[2:6] == ["rounds\nto target", "kB to\ntarget", "clock s to\ntarget", "final\nacc. %"]
    assert [row[4] for row in compared.rows] == ["10.0", "4.00"]
    assert tables.algorithms_table(entries, None).head[2] == "final\nacc. %"
    write_run(tmp_path / "plain", [0.9], lr=0.7)  # a run without a clock has no such cost
    assert [row[-2] for row in tables.cost_table(curves_in(tmp_path), [0.4], 0).rows] == ["10.0", "4.00", "–"]


def test_times_on_several_clocks(timed):
    table = tables.times_table({"a": curves_in(timed)[:1], "b": curves_in(timed)[1:]}, 0.6)
    assert table.head[5:] == ["rounds to 60%", "s to 60%", "s to first touch"]
    # the first touches of 60 % are in round 2 for both seeds of FedAvg, and in round 1 for those of Fed-LAMB
    assert [row[1:] for row in table.rows] == [
        ["a", "3", "10.0", "30.0 ± 0", "2.5", "25.0", "20.0"],
        ["b", "3", "4.00", "12.0 ± 0", "not within 3 rounds", "–", "4.00"],
    ]
    assert tables.times_table({"a": curves_in(timed)}, None).head[-1] == "s in all"


def test_the_results_table(two):
    table = tables.results_table(curves_in(two))
    first, second = table.rows
    # final: means 70 and 66.7 of three rounds; best 90 and 90
    assert first[:6] == ["FedAvg (Fed-SGD), lr 0.1", "2", "68.3 ± 2.4", "–", "90.0 ± 0.0", "3"]
    # final 43.3 and 60: seed by seed 26.7 and 6.7 less, in the mean 16.7 ± 12.706 * 14.14 / sqrt(2) = 127.1
    assert second[2:5] == ["51.7 ± 11.8", "-16.7 [-143.7, +110.4]", "85.0 ± 7.1"]
    assert table.head[3] == "difference to FedAvg (Fed-SGD), lr 0.1"
    assert table.head[6] == "kB per round"
    assert first[6:] == ["0.00500", "0.0150", "0.500"]
    against_lamb = tables.results_table(curves_in(two), baseline=1)
    assert [row[3] for row in against_lamb.rows] == ["+16.7 [-110.4, +143.7]", "–"]


def test_the_differences_of_a_comparison_are_paired_by_seed():
    entries = [helpers.trial(name, [History([{"round": 1, "accuracy": a}]) for a in values]) for name, values in (
        ("fedavg", (0.5, 0.7, 0.9)), ("fedlamb", (0.52, 0.71, 0.93)), ("mime", (0.6,)), ("scaffold", (math.nan,)),
    )]  # fmt: skip
    assert "difference\nto fedavg" not in tables.algorithms_table(entries, None).head
    table = tables.algorithms_table(entries, 0.8, "fedavg")
    assert table.head[4:7] == ["final\nacc. %", "difference\nto fedavg", "best\nacc. %"]
    # 2, 1 and 3 points: the mean 2 ± 4.303 / sqrt(3) = 2.484
    assert [row[5] for row in table.rows] == ["–", "+2.0 [-0.5, +4.5]", "+10.0", "–"]
    assert "mean ± std of 3 seeds; target: test accuracy 80%; difference of the final values" in table.title
    assert [row[2] for row in table.rows] == ["not in 1"] * 4


def test_halves_go_up_as_in_the_browser():
    assert [tables.fixed(26.25), tables.fixed(0.5, 0), tables.fixed(0.15)] == ["26.3", "1", "0.1"]
    assert tables.significant(1234.5) == "1235"


def test_default_targets_are_what_all_and_what_the_best_reach(two):
    # every seed of Fed-LAMB stays at 43.3 %, every seed of FedAvg at 66.7 %
    assert tables.default_targets(curves_in(two)) == [0.4, 0.65]


def test_the_configuration_tables(two):
    differs, common = tables.config_tables(curves_in(two))
    rows = {key: cells for key, *cells in differs.rows}
    assert rows["train.lr"] == ["0.1", "0.03"]
    assert rows["train.seed"] == ["0, 1", "0, 1"]
    assert ["model.hidden", "16"] in common.rows
    assert not {key for key, *_ in common.rows} & set(rows)


@pytest.mark.parametrize("is_private", [False, True])
def test_digests_of_private_data_are_in_no_report(tmp_path, is_private):
    privacy = {"privacy": {"bound": 1.0}} if is_private else {}
    for seed in (0, 1):
        data = {"name": "mine", "content": "abc", "test_content": f"def{seed}"}
        write_run(tmp_path / str(seed), [0.5], seed=seed, data=data, **privacy)
    shown = " ".join(map(str, tables.config_tables(curves_in(tmp_path))))
    assert ("abc" in shown, "def1" in shown) == (not is_private, not is_private)


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


def test_csv_has_the_ends_of_an_interval_in_columns_of_their_own():
    table = tables.Table("t", ["curve", "d"], [["a", "–"], ["b", "+1.5 [-0.5, +3.5]"], ["c", "-2.0"]])
    rows = list(csv.reader(io.StringIO(tables.to_csv(table))))
    assert rows == [["curve", "d", "d, low", "d, high"], ["a", "", "", ""], ["b", "+1.5", "-0.5", "+3.5"],
                    ["c", "-2.0", "", ""]]  # fmt: skip


def test_numbers_beyond_a_page_of_digits_are_written_as_in_the_browser():
    assert [tables.fixed(1e21), tables.fixed(-1.5e300), tables.significant(1e30)] == ["1e+21", "-1.5e+300", "1e+30"]
    assert tables.mean_and_spread([1e308, 1e308], tables.significant) == "∞ ± 0"
