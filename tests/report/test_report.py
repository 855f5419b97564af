"""The report: its numbers against hand-computed ones, its page in a real browser."""

import csv
import io
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import call
from lamina import BadInput, History
from lamina.data import sources
from lamina.errors import MissingExtra
from lamina.experiment.records import FORMAT, find_records
from lamina.report import build, figures, page, save, tables
from lamina.report.curves import differing, group, without_repeats
from lamina.report.rates import rates_table, responses

ROOT = Path(__file__).parents[2]
EVIL = '<b><img src=x onerror="window.hacked=1"></b>'
CLOSING = "</script><script>window.hacked=1</script>"


def write_run(
    folder, accuracies, *, algorithm="fedavg", lr=0.1, seed=0, rounds=None, diverged=None, options=(), **sections
):
    """A run folder as lamina leaves it: 3 bytes down, 2 up and half a second in every round."""
    folder.mkdir(parents=True)
    config = {
        "lamina": "0.1.0",
        "format": FORMAT,
        "data": {"name": "digits", "dir": None, "clients": 8, "partition": {"name": "classes", "k": 2}},
        "model": {"name": "mlp", "hidden": 16},
        "algorithm": {"name": algorithm, "preset": None, **dict(options)},
        "train": {"rounds": len(accuracies) if rounds is None else rounds, "lr": lr, "seed": seed},
        "run": {"device": "cpu", "engine": "auto", "precision": "fp32", "out": str(folder)},
    }
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({"lamina": "0.1.0", "torch": "2.0", "python": "3.11"}))
    with (folder / "metrics.jsonl").open("w") as file:
        for number, accuracy in enumerate(accuracies, 1):
            row = {"round": number, "lr": lr, "train_loss": 1 / number, "consistency": 0.1, "update_norm": 0.2}
            row |= {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5}
            row |= {} if accuracy is None else {"loss": 2 / number, "accuracy": accuracy}
            file.write(json.dumps(row) + "\n")
    if diverged:
        (folder / "diverged.json").write_text(json.dumps({"message": diverged}))
    return folder


def history(*accuracies, **each_round):
    each_round = {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5, **each_round}
    return History([{"round": i, "accuracy": a, **each_round} for i, a in enumerate(accuracies, 1)])


def curves_in(folder):
    return group(run for run in find_records([folder]) if not run.tuning)


# --- numbers -----------------------------------------------------------------------------------------------------


def test_cost_to_target_is_the_mean_over_seeds():
    cost = tables.cost_to_target([history(0.5, 0.8, 0.9), history(0.6, 0.95, 0.1)], 0.9)
    # rounds 3 and 2; 5 bytes and half a second in each
    assert cost == (2.5, 12.5, 1.25, 2, 2)


def test_a_seed_that_never_gets_there_makes_the_cost_infinite():
    cost = tables.cost_to_target([history(0.5, 0.9), history(0.5, 0.8), History()], 0.9)
    assert cost == (math.inf, math.inf, math.inf, 1, 3)
    nothing = tables.cost_to_target([History()], 0.9)
    assert all(math.isnan(value) for value in nothing[:3])


@pytest.fixture
def two(tmp_path):
    """FedAvg with two seeds, Fed-LAMB with two seeds of which one never reaches 90 %."""
    write_run(tmp_path / "fedavg" / "seed0", [0.5, 0.9, 0.7])
    write_run(tmp_path / "fedavg" / "seed1", [0.5, 0.6, 0.9], seed=1)
    write_run(tmp_path / "fedlamb" / "seed0", [0.9, 0.2, 0.2], algorithm="fedlamb", lr=0.03)
    write_run(tmp_path / "fedlamb" / "seed1", [0.8, 0.6, 0.4], algorithm="fedlamb", lr=0.03, seed=1)
    return tmp_path


def test_the_cost_table(two):
    table = tables.cost_table(curves_in(two), [0.8, 0.9], baseline=0)
    assert table.head[:5] == ["target", "curve", "reached", "rounds", "× baseline"]
    # 80 %: rounds 2 and 3 against 1 and 1; bytes 12.5 and 5 of 1e6; seconds 1.25 and 0.5
    assert table.rows == [
        ["80%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "2.5", "1.00", "0.0000125", "1.00", "1.25", "1.00"],
        ["80%", "Fed-LAMB, lr 0.03", "2/2", "1.0", "0.400", "0.00000500", "0.400", "0.500", "0.400"],
        ["90%", "FedAvg (Fed-SGD), lr 0.1", "2/2", "2.5", "1.00", "0.0000125", "1.00", "1.25", "1.00"],
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
    assert first[5:] == ["0.00000500", "0.0000150", "0.500"]


def test_regression_has_losses_and_no_targets(tmp_path):
    folder = write_run(tmp_path / "a", [None, None])
    rows = [json.dumps({"round": i, "loss": loss}) for i, loss in enumerate((0.5, 0.25, 0.3), 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    made = build.build([tmp_path])
    assert tables.results_table(made.curves).rows[0][2:4] == ["0.250", "0.300"]
    assert made.targets == []
    assert "cost-to-target" not in [table.name for table in made.tables()]


def test_halves_go_up_as_in_the_browser():
    assert [tables.fixed(26.25), tables.fixed(0.5, 0), tables.fixed(0.15)] == ["26.3", "1", "0.1"]
    assert tables.significant(1234.5) == "1235"


def test_default_targets_are_what_all_and_what_the_best_reach(two):
    # every seed of Fed-LAMB reaches 80 %, every seed of FedAvg 90 %
    assert tables.default_targets(curves_in(two)) == [0.8, 0.9]


# --- curves ------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_all_but_the_seed_and_where_they_ran(tmp_path):
    write_run(tmp_path / "a", [0.5], seed=0)
    write_run(tmp_path / "b", [0.5], seed=1, run={"device": "cuda:0", "engine": "loop", "threads": 2})
    write_run(tmp_path / "c", [0.5], run={"precision": "bf16"})
    write_run(tmp_path / "d", [0.5], data={"partition": {"name": "dirichlet", "alpha": 0.3}})
    write_run(tmp_path / "e", [0.5], data={"partition": {"name": "dirichlet", "alpha": 0.5}})
    labels = [curve.label for curve in curves_in(tmp_path)]
    assert [len(curve.runs) for curve in curves_in(tmp_path)] == [2, 1, 1, 1]
    assert labels[0] == "FedAvg (Fed-SGD), classes, k 2, precision fp32"
    assert labels[1] == "FedAvg (Fed-SGD), classes, k 2, precision bf16"
    assert labels[2:] == [f"FedAvg (Fed-SGD), dirichlet, alpha {alpha}, precision fp32" for alpha in (0.3, 0.5)]


def test_an_algorithms_options_are_compared_with_its_own_kind(tmp_path):
    for alpha in (0.1, 0.2):
        write_run(tmp_path / f"lada{alpha}", [0.5], algorithm="fedlada", options={"alpha": alpha})
    write_run(tmp_path / "avg", [0.5])
    assert [c.label for c in curves_in(tmp_path)] == ["FedAvg (Fed-SGD)", "FedLADA, alpha 0.1", "FedLADA, alpha 0.2"]


def test_a_repeated_run_counts_once(tmp_path):
    write_run(tmp_path / "short", [0.5], rounds=3)
    write_run(tmp_path / "long", [0.5, 0.6, 0.7])
    kept, lines = without_repeats(find_records([tmp_path]))
    assert [run.folder.name for run in kept] == ["long"]
    assert len(lines) == 1
    assert "short" in lines[0]


def test_differing():
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}]) == ["b", "c"]


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


# --- learning rates ----------------------------------------------------------------------------------------------


def test_the_response_to_the_learning_rate(tmp_path):
    for lr, best in ((0.01, 0.5), (0.1, 0.9), (1.0, 0.7)):
        write_run(tmp_path / "tuning" / "fedavg" / f"lr{lr}", [0.1, best], lr=lr, data={"validation": 0.2})
        write_run(tmp_path / "tuning" / "fedcm" / f"lr{lr}", [0.1, lr / 2], lr=lr, algorithm="fedcm")
    write_run(
        tmp_path / "tuning" / "fedavg" / "lr10", [0.99], lr=10.0, rounds=2, diverged="x", data={"validation": 0.2}
    )
    write_run(tmp_path / "fedavg" / "seed0", [0.1, 0.8])
    made = build.build([tmp_path])
    assert [curve.label for curve in made.curves] == ["FedAvg (Fed-SGD)"]  # tuning runs are no curves
    averaged, other = sorted(made.responses, key=lambda response: not response.label.startswith("FedAvg"))[:2]
    assert (averaged.chosen, averaged.on, averaged.warning) == (0.1, "validation", "")  # what diverged is never best
    assert [trial.remark for _, trial in averaged.tried] == ["", "", "", "diverged"]
    assert other.chosen == 1.0
    assert "the best learning rate 1 lies on the edge of those tried; try larger ones" in " ".join(made.notes)


def test_a_rate_stands_for_the_best_of_the_other_settings(tmp_path):
    """Decay 0.01 is better at the low rate and diverges at the high one."""
    grid = {"grid": {"fedlamb": {"lr": [0.1, 1.0], "decay": [0.0, 0.01]}, "fedavg": {"lr": [0.1, 1.0]}}}
    best = {(0.1, 0.0): 0.5, (0.1, 0.01): 0.8, (1.0, 0.0): 0.6, (1.0, 0.01): 0.99}
    for (lr, decay), value in best.items():
        write_run(
            tmp_path / "tuning" / "fedlamb" / f"lr{lr}-decay{decay}", [0.1, value], lr=lr, algorithm="fedlamb",
            options={"decay": decay}, compare=grid, diverged="x" if value == 0.99 else None,
        )  # fmt: skip
        if not decay:
            write_run(tmp_path / "tuning" / "fedavg" / f"lr{lr}", [0.3, 0.4], lr=lr, compare=grid)
    found = {response.label: response for response in build.build([tmp_path]).responses}
    assert set(found) == {"Fed-LAMB", "FedAvg (Fed-SGD)"}
    tried = [(lr, trial.best, trial.remark, trial.name) for lr, trial in found["Fed-LAMB"].tried]
    assert tried == [(0.1, [0.8], "", "decay 0.01"), (1.0, [0.6], "", "decay 0")]
    table = rates_table(list(found.values()))
    assert table.head == ["curve", "lr", "with", "best accuracy, %", "on", ""]
    assert [row[2] for row in table.rows if row[0] == "FedAvg (Fed-SGD)"] == ["–", "–"]


def two_comparisons(folder):
    """The first tunes on validation data and takes 0.03 of five; the second takes another rate as it is."""
    for lr in (0.003, 0.01, 0.03, 0.1):
        write_run(folder / "a" / "tuning" / "fedams" / f"lr{lr}", [0.1, 0.9 - abs(lr - 0.03)], lr=lr,
                  algorithm="fedams", data={"validation": 0.2})  # fmt: skip
    write_run(folder / "a" / "fedams" / "seed0", [0.1, 0.9], lr=0.03, algorithm="fedams")
    write_run(folder / "b" / "fedams" / "seed0", [0.1, 0.8], lr=0.3, algorithm="fedams")


def test_validation_and_test_accuracies_are_told_apart(tmp_path):
    two_comparisons(tmp_path)
    made = build.build([tmp_path])
    assert [(response.label, response.on) for response in made.responses] == [
        ("Fed-AMS, validation", "validation"), ("Fed-AMS, test", "test")
    ]  # fmt: skip
    only = build.build([tmp_path / "a"])
    assert [response.label for response in only.responses] == ["Fed-AMS"]


def test_an_edge_is_one_of_all_rates_that_were_tried(tmp_path):
    """Below the better of two final runs there are rates that tuning tried: it is on no edge."""
    two_comparisons(tmp_path)
    final = [response for response in build.build([tmp_path]).responses if response.on == "test"]
    assert [(response.chosen, response.warning) for response in final] == [(0.03, "")]
    (alone,) = build.build([tmp_path / "a" / "fedams", tmp_path / "b"]).responses
    assert "0.03 lies on the edge of those tried; try smaller ones" in alone.warning  # nobody knows of the tuning
    write_run(tmp_path / "c" / "fedams" / "seed0", [0.1, 0.95], lr=1.0, algorithm="fedams")
    final = [response for response in build.build([tmp_path]).responses if response.on == "test"]
    assert "try larger ones" in final[0].warning


def test_without_several_rates_there_is_no_response(two):
    assert responses(find_records([two])) == []


# --- text that must stay text ------------------------------------------------------------------------------------


def test_names_stay_text_in_the_page(tmp_path):
    write_run(tmp_path / "a", [0.5], algorithm=EVIL, model={"name": CLOSING})
    write_run(tmp_path / "b", [0.5], algorithm="fedavg", diverged=EVIL)
    text = page.html(build.build([tmp_path], title=EVIL))
    assert "<img" not in text.replace(page.plotly_js(), "")
    assert CLOSING not in text
    data = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    assert EVIL in json.loads(data)["curves"][1]["label"] + json.loads(data)["curves"][0]["label"]


def test_latex_is_escaped():
    table = tables.Table("t", ["a_b", "50%"], [["x & y", "1.0 ± 0.5"], [r"\input{/etc/passwd}", "∞"]])
    assert tables.to_latex(table).splitlines() == [
        r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & 50\% \\",
        r"\midrule",
        r"x \& y & 1.0 $\pm$ 0.5 \\",
        r"\textbackslash{}input\{/etc/passwd\} & $\infty$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_csv_has_numbers_in_columns_of_their_own():
    table = tables.Table("t", ["curve", "best"], [['a, "b"', "1.0 ± 0.5"], ["c", "∞"], ["d", "–"]])
    rows = list(csv.reader(io.StringIO(tables.to_csv(table))))
    assert rows == [["curve", "best", "best, std"], ['a, "b"', "1.0", "0.5"], ["c", "inf", ""], ["d", "", ""]]


# --- the partition -----------------------------------------------------------------------------------------------


def test_the_partition_is_dealt_again(two):
    (dealt,) = build.build([two]).dealt
    counts = np.array(dealt.counts)
    assert counts.shape == (8, 10)
    assert ((counts > 0).sum(axis=1) <= 2).all()  # two classes per client
    assert counts.sum() == len(sources.load("digits").train)


def test_a_partition_that_cannot_be_dealt_is_left_out_with_a_word(tmp_path):
    write_run(tmp_path / "a", [0.5], data={"name": "cifar10", "dir": str(tmp_path / "nowhere")})
    made = build.build([tmp_path])
    assert made.dealt == []
    assert any("partition of cifar10" in note and "not shown" in note for note in made.notes)


# --- files -------------------------------------------------------------------------------------------------------


def test_a_real_run_and_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "FORMATS", ("svg",))  # the others are tested on one figure: they take their time
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("small.toml").write_text(
        '[data]\nname = "digits"\nclients = 6\npartition = { name = "classes", k = 2 }\n'
        '[model]\nname = "mlp"\nhidden = 8\n[algorithm]\nname = "fedlamb"\n[train]\nrounds = 2\n'
    )
    assert call("run", "small.toml", "--out", "runs/one", "-q") == 0
    assert call("report", "runs", "--figures", "figures", "--target", "0.05", "--title", "Tiny") == 0
    assert "report in report.html" in capsys.readouterr().out
    text = Path("report.html").read_text()
    assert "<h1>Tiny</h1>" in text
    written = {path.name for path in Path("figures").iterdir()}
    assert {"accuracy-by-bytes.svg", "train-loss-by-round.svg", "partition.svg", "results.csv"} <= written
    assert {"results.tex", "cost-to-target.tex", "common-configuration.csv"} <= written
    assert call("report", "runs") == 0  # an earlier report is replaced
    Path("report.html").write_text("mine")
    assert call("report", "runs") == 2
    assert "is there and is no report" in capsys.readouterr().err
    assert Path("report.html").read_text() == "mine"


def test_a_figure_in_every_format(tmp_path):
    write_run(tmp_path / "runs" / "a", [None, 0.5, None, 0.7], algorithm="fedavg$_{x")  # no mathematics in a name
    write_run(tmp_path / "runs" / "b", [None])  # never evaluated: nothing to draw
    write_run(tmp_path / "runs" / "c", [0.6], lr=0.2)  # a line of one point
    curves = curves_in(tmp_path / "runs")
    drawn = figures.curve_figure(curves, figures.METRICS[0], "bytes")
    assert [line.get_ydata().tolist() for line in drawn.axes[0].lines] == [[50, 70], [60]]
    assert drawn.axes[0].lines[0].get_xdata().tolist() == pytest.approx([10e-6, 20e-6])
    files = list(figures._save(drawn, tmp_path / "figure"))
    starts = [path.read_bytes()[:5] for path in files]
    assert starts == [b"%PDF-", b"<?xml", b"\x89PNG\r"]
    again = [path.read_bytes() for path in figures._save(drawn, tmp_path / "again")]
    assert again == [path.read_bytes() for path in files]  # the same figure is the same file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no folder 'nowhere'"),
        (["empty"], "no run in 'empty'"),
        (["good", "--target", "90"], "--target 90: must be an accuracy above 0 and up to 1"),
        (["good", "--baseline", "fedavgg"], "no run of the baseline 'fedavgg'; did you mean 'fedavg'?"),
        (["bad"], "is not a run's configuration: it lacks 'train'"),
        (["good", "--out", "good"], "cannot write 'good'"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("empty").mkdir()
    write_run(Path("good"), [0.5])
    write_run(Path("bad"), [0.5])
    Path("bad/config.json").write_text(json.dumps({"format": FORMAT, "algorithm": {"name": "fedavg"}}))
    assert call("report", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_without_plotly_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"lamina report needs plotly: pip install -e '\.\[report\]'"):
        page.plotly_js()


def test_a_damaged_folder_is_named(tmp_path):
    write_run(tmp_path / "a", [0.5])
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(BadInput, match=r"it has no config\.json"):
        build.build([tmp_path])


# --- the page in a browser ---------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and shutil.which("chromedriver")), reason="no chromium and chromedriver on this machine"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SIZE_LIMIT = 6e6
LOAD_LIMIT = 2000  # ms, from the click to the drawn figure


@pytest.fixture(scope="module")
def comparison_folder(tmp_path_factory):
    """Five algorithms, three seeds, 100 rounds, and rates tried with one of them; one algorithm's name is hostile."""
    folder = tmp_path_factory.mktemp("comparison")
    noise = np.random.default_rng(0)
    for i, name in enumerate(["fedavg", "fedams", "fedlamb", "fedlada", EVIL]):
        for seed in range(3):
            rising = 0.95 - 0.8 * np.exp(-np.arange(100) / (10 + 5 * i)) + noise.normal(0, 0.01, 100)
            write_run(folder / str(i) / f"seed{seed}", rising.clip(0, 1).tolist(), algorithm=name, seed=seed)
    for lr in (0.01, 0.1, 1.0):
        tuned = folder / "tuning" / "fedavg" / f"lr{lr}"
        write_run(tuned, [0.2, 0.5 + 0.3 * lr], lr=lr, data={"validation": 0.2})
    return folder


@pytest.fixture(scope="module")
def report(comparison_folder):
    return build.build([comparison_folder])


@pytest.fixture(scope="module")
def page_file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    save.save_page(report, path)
    return path


def test_the_page_is_small_enough(page_file):
    assert page_file.stat().st_size < SIZE_LIMIT


def test_long_runs_are_thinned_for_drawing_only(tmp_path):
    for name in ("fedavg", "fedlamb"):
        rising = np.linspace(0, 1, 4000)
        write_run(tmp_path / name, [a if i % 10 == 9 else None for i, a in enumerate(rising.tolist())], algorithm=name)
    made = build.build([tmp_path])
    (curve, _) = page.page_data(made)["curves"]
    assert curve["rounds"][-1] == 4000
    assert len(curve["rounds"]) <= 500
    assert all(value is not None for value in curve["columns"]["accuracy"][0])  # only rounds that were evaluated
    assert len(curve["steps"][0]) == 400  # every record, for the table


def test_plotlys_one_big_function_is_parsed_at_once():
    script = page.plotly_js()
    assert ': this, (() => {\n"use strict";' in script  # else a new plotly is wrapped otherwise, and opens slower
    assert script.endswith("\n})));")
    assert page.parsed_at_once("var other = 1;") == "var other = 1;"


def open_browser(profile):
    """A new browser, which has nothing cached."""
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(20)
    return driver


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page_file):
    """The page, freshly opened from disk on a desktop in light colours."""
    resize(browser, 1200)
    prefer(browser, "light")
    browser.get(page_file.as_uri())
    browser.execute_script("localStorage.clear()")
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    yield browser
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert severe == []


def resize(browser, width, mobile=False):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(browser, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_for(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda b: b.execute_script(f"return {condition}"))


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.execute_script(script, selector)


def choose(browser, control, value):
    """Set a control as a user does, with the event that follows."""
    browser.execute_script(
        "const c = document.getElementById(arguments[0]);"
        "c[c.type === 'checkbox' ? 'checked' : 'value'] = arguments[1]; c.dispatchEvent(new Event('input'))",
        control,
        value,
    )


@needs_browser
def test_the_page_opens_from_disk_within_two_seconds(page_file, tmp_path_factory):
    """The first look in a new browser, which compiles all of plotly, as a reader's does.

    The clock is that of the page's main thread: other work on the machine is not the page's. Such work slows the
    thread too, through caches and cores that are shared, so the best of three browsers counts.
    """
    times = []
    while len(times) < 3 and min(times, default=LOAD_LIMIT) >= LOAD_LIMIT:
        driver = open_browser(tmp_path_factory.mktemp("profile"))
        try:
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            driver.get(page_file.as_uri())
            assert texts(driver, "#curves-plot .xtitle") == ["round"]  # drawn
            measured = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            times += [1000 * one["value"] for one in measured if one["name"] == "TaskDuration"]
            first_paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
            assert driver.execute_script(first_paint) < LOAD_LIMIT  # header and tables do not wait for plotly
        finally:
            driver.quit()
    assert min(times) < LOAD_LIMIT, times


@needs_browser
def test_targets_that_cannot_be_used_are_named(opened):
    choose(opened, "target-list", "80, foo, 200 -5")
    assert texts(opened, "#target-problem") == ["not used: foo, 200, -5 (targets are above 0 and up to 100)"]
    assert opened.find_element("id", "target-list").get_attribute("aria-invalid") == "true"
    rows = opened.execute_script("return rowsOf(document.querySelector('#targets table'))")
    assert {row[0] for row in rows} == {"80%"}
    choose(opened, "target-list", "80")
    assert texts(opened, "#target-problem") == [""]


@needs_browser
def test_a_long_legend_of_rates_is_whole_on_a_phone(browser, tmp_path):
    names = ["fedavg", "fedams", "fedlamb", "mimelamb", "fedlada", "scaffold", "fedcm", "localadam"]
    for name in names:
        for lr in (0.1, 1.0):
            write_run(tmp_path / "tuning" / name / f"lr{lr}", [0.3, 0.4], lr=lr, algorithm=name)
    save.save_page(build.build([tmp_path]), tmp_path / "rates.html")
    resize(browser, 380, mobile=True)
    browser.get((tmp_path / "rates.html").as_uri())
    wait_for(browser, "document.querySelector('#rates-plot .main-svg')")
    shown = browser.find_elements("css selector", "#rates-legend button")
    assert len(shown) == len(names)
    assert all(one.is_displayed() and one.rect["x"] + one.rect["width"] <= 380 for one in shown)
    assert browser.execute_script("return document.querySelectorAll('#rates-plot .legend').length") == 0
    lines = "return document.querySelectorAll('#rates-plot .scatterlayer .trace').length"
    before = browser.execute_script(lines)
    shown[0].click()
    assert browser.execute_script(lines) < before


@needs_browser
def test_everything_is_there(opened, report):
    assert texts(opened, "nav a:not([hidden])") == [
        "Curves", "Targets", "Results", "Learning rates", "Partition", "Configuration", "Runs"
    ]  # fmt: skip
    assert texts(opened, "#legend button") == [curve.label for curve in report.curves]
    for plot in ("curves-plot", "rates-plot", "partition-plot"):
        assert opened.execute_script("return document.querySelectorAll(`#${arguments[0]} .main-svg`).length", plot)
    assert texts(opened, "#curves figure .export button") == ["PNG", "SVG"]
    assert "lies on the edge" in texts(opened, "#notes")[0]
    assert opened.execute_script("return window.hacked") is None
    assert opened.execute_script("return document.querySelectorAll('body img').length") == 0
    assert any(EVIL in label for label in texts(opened, "#legend button"))


@needs_browser
def test_hover_shows_a_label(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    plot = opened.find_element("id", "curves-plot")
    ActionChains(opened).move_to_element_with_offset(plot, 40, 0).move_by_offset(5, 5).perform()
    wait_for(opened, "document.querySelector('#curves-plot .hoverlayer').textContent.includes('Fed-LAMB')")
    shown = texts(opened, "#curves-plot .hoverlayer")[0]
    assert EVIL in shown  # as text, in Plotly's labels too


@needs_browser
def test_the_axes_can_be_switched(opened):
    choose(opened, "axis", "bytes")
    assert texts(opened, "#curves-plot .xtitle") == ["MB sent, both directions"]
    choose(opened, "axis", "seconds")
    assert texts(opened, "#curves-plot .xtitle") == ["seconds of training"]
    choose(opened, "metric", "2")
    assert texts(opened, "#curves-plot .ytitle") == ["training loss"]
    kind = "document.getElementById('curves-plot').layout"
    choose(opened, "log-y", True)
    choose(opened, "log-x", True)
    assert opened.execute_script(f"return [{kind}.xaxis.type, {kind}.yaxis.type]") == ["log", "log"]


@needs_browser
def test_the_legend_hides_and_shows(opened):
    lines = "document.querySelectorAll('#curves-plot .scatterlayer .trace').length"
    assert opened.execute_script(f"return {lines}") == 10  # a band and a line for each of five
    opened.find_element("css selector", "#legend button").click()
    assert opened.execute_script(f"return {lines}") == 8
    assert opened.execute_script("return document.querySelector('#legend button').ariaPressed") == "false"
    choose(opened, "seeds", True)
    assert opened.execute_script(f"return {lines}") == 8 + 4 * 3
    choose(opened, "band", "")
    assert opened.execute_script(f"return {lines}") == 4 + 4 * 3


@needs_browser
def test_smoothing_is_centred(opened):
    assert opened.execute_script("return smoothed([0, 3, null, 6, 0], 1)") == [0, 3, None, 3, 0]
    choose(opened, "smooth", "5")
    assert texts(opened, "#smooth-value") == ["± 5 points"]


@needs_browser
def test_the_pages_tables_are_pythons(opened, report):
    """The cost table, CSV and LaTeX are made in JavaScript, too: they must be those of `--figures`."""
    for targets, baseline in ((report.targets, report.baseline), ([0.6, 0.855], 2), ([0.99], 4)):
        choose(opened, "target-list", ", ".join(f"{100 * target:g}" for target in targets))
        choose(opened, "baseline", str(baseline))
        expected = tables.cost_table(report.curves, targets, baseline)
        assert opened.execute_script("return rowsOf(document.querySelector('#targets table'))") == expected.rows
        for function, write in (("csvOf", tables.to_csv), ("latexOf", tables.to_latex)):
            made = opened.execute_script(f"return {function}(document.querySelector('#targets table'))")
            assert made == write(expected)
    for table in report.tables()[1:]:
        found = f"document.querySelector('[data-name=\"{table.name}\"] table')"
        assert opened.execute_script(f"return csvOf({found})") == tables.to_csv(table)
        assert opened.execute_script(f"return latexOf({found})") == tables.to_latex(table)


@needs_browser
def test_figures_are_exported_as_on_paper(opened):
    made = "const done = arguments[arguments.length - 1]; imageOf(arguments[0], arguments[1]).then(done)"
    prefer(opened, "dark")
    for name in ("curves", "learning-rates", "partition"):
        assert opened.execute_async_script(made, name, "png").startswith("data:image/png;base64,")
        assert opened.execute_async_script(made, name, "svg").startswith("data:image/svg+xml,")
    drawn = opened.execute_script("return curveFigure(true).layout.font.color")
    assert drawn == "rgb(34, 38, 43)"  # dark ink, though the screen is dark


@needs_browser
def test_odd_runs_are_shown_as_far_as_they_go(browser, tmp_path, monkeypatch):
    """No rounds, no evaluation, numbers that are not finite, columns that are missing, more curves than colours."""
    (write_run(tmp_path / "none", [0.5]) / "metrics.jsonl").write_text("")
    write_run(tmp_path / "unevaluated", [None, None], lr=0.2)
    bare = write_run(tmp_path / "bare", [0.5], lr=0.3)
    (bare / "metrics.jsonl").write_text('{"round": 1, "train_loss": null, "trust_ratio/<b>": 0.5}\n')
    for i in range(20):
        write_run(tmp_path / f"many{i}", [0.3, 0.4], lr=1 + i / 10, data={"clients": 1, "partition": {"name": "iid"}})
    monkeypatch.setattr(figures, "FORMATS", ("svg",))
    made = build.build([tmp_path])
    save.save_page(made, tmp_path / "odd.html")
    save.save_files(made, tmp_path / "files")
    resize(browser, 1200)
    browser.get((tmp_path / "odd.html").as_uri())
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    for metric in range(browser.execute_script("return data.metrics.length")):
        for axis in ("round", "bytes", "seconds"):
            choose(browser, "metric", str(metric))
            choose(browser, "axis", axis)
    assert texts(browser, "#curves-plot .ytitle") == ["trust ratio/<b>"]
    assert (
        browser.execute_script("return rowsOf(document.querySelector('#targets table'))")
        == tables.cost_table(made.curves, made.targets, made.baseline).rows
    )
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


@needs_browser
def test_a_phone_scrolls_only_down(browser, page_file):
    resize(browser, 380, mobile=True)
    browser.get(page_file.as_uri())
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 380
    widest = (
        "Math.max(...[...document.querySelectorAll('.plot .main-svg')].map((e) => e.getBoundingClientRect().right))"
    )
    assert browser.execute_script(f"return {widest}") <= 380


@needs_browser
def test_dark_and_light(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.getElementById('curves-plot').layout.font.color"
    light = opened.execute_script(paper), opened.execute_script(ink)
    prefer(opened, "dark")
    wait_for(opened, "document.getElementById('theme').textContent === 'Light'")
    dark = opened.execute_script(paper), opened.execute_script(ink)
    assert dark == ("rgb(22, 24, 28)", "rgb(223, 226, 230)")
    opened.find_element("id", "theme").click()  # the switch overrules the system
    assert (opened.execute_script(paper), opened.execute_script(ink)) == light
