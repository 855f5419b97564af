"""The report: its numbers against hand-computed ones, and its files."""

import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from helpers import call, said_in_one_line
from lamina import BadInput, History
from lamina.base.errors import MissingExtra
from lamina.data.readers import sources
from lamina.experiment.runs.records import FORMAT, find_records
from lamina.report import build, figures, page, tables
from lamina.report.curves import differing, group, without_repeats
from lamina.report.rates import rates_table, responses
from run_folders import EVIL, write_run

ROOT = Path(__file__).parents[2]
CLOSING = "</script><script>window.hacked=1</script>"


def history(*accuracies, **each_round):
    each_round = {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5, **each_round}
    return History([{"round": i, "accuracy": a, **each_round} for i, a in enumerate(accuracies, 1)])


def curves_in(folder):
    return group(run for run in find_records([folder]) if not run.tuning)


# --- numbers -----------------------------------------------------------------------------------------------------


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


def test_regression_has_losses_and_no_targets(tmp_path):
    folder = write_run(tmp_path / "a", [None, None])
    rows = [json.dumps({"round": i, "loss": loss}) for i, loss in enumerate((0.5, 0.25, 0.3), 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    report = build.build([tmp_path])
    assert tables.results_table(report.curves).rows[0][2:4] == ["0.250", "0.300"]
    assert report.targets == []
    assert "cost-to-target" not in [table.name for table in report.tables()]


def test_runs_with_another_first_metric_are_noted(two, tmp_path):
    folder = write_run(tmp_path / "other", [None])
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "loss": 0.5}) + "\n")
    notes = build.build([two, tmp_path / "other"]).notes
    assert "some runs have another first metric (loss), but all are judged by 'accuracy' here" in notes


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
    labels = [curve.name for curve in curves_in(tmp_path)]
    assert [len(curve.records) for curve in curves_in(tmp_path)] == [2, 1, 1, 1]
    assert labels[0] == "FedAvg (Fed-SGD), classes, k 2, precision fp32"
    assert labels[1] == "FedAvg (Fed-SGD), classes, k 2, precision bf16"
    assert labels[2:] == [f"FedAvg (Fed-SGD), dirichlet, alpha {alpha}, precision fp32" for alpha in (0.3, 0.5)]


def test_an_algorithms_options_are_compared_with_its_own_kind(tmp_path):
    for alpha in (0.1, 0.2):
        write_run(tmp_path / f"lada{alpha}", [0.5], algorithm="fedlada", options={"alpha": alpha})
    write_run(tmp_path / "avg", [0.5])
    assert [c.name for c in curves_in(tmp_path)] == ["FedAvg (Fed-SGD)", "FedLADA, alpha 0.1", "FedLADA, alpha 0.2"]


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
    report = build.build([tmp_path])
    assert [curve.name for curve in report.curves] == ["FedAvg (Fed-SGD)"]  # tuning runs are no curves
    averaged, other = sorted(report.responses, key=lambda response: not response.label.startswith("FedAvg"))[:2]
    assert (averaged.chosen, averaged.on, averaged.warning) == (0.1, "validation", "")  # what diverged is never best
    assert [trial.remark for _, trial in averaged.tried] == ["", "", "", "diverged"]
    assert other.chosen == 1.0
    assert "the best learning rate 1 lies on the edge of those tried; try larger ones" in " ".join(report.notes)


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
    by_label = {response.label: response for response in build.build([tmp_path]).responses}
    assert set(by_label) == {"Fed-LAMB", "FedAvg (Fed-SGD)"}
    tried = [(lr, trial.best, trial.remark, trial.name) for lr, trial in by_label["Fed-LAMB"].tried]
    assert tried == [(0.1, [0.8], "", "decay 0.01"), (1.0, [0.6], "", "decay 0")]
    table = rates_table(list(by_label.values()))
    assert table.head == ["curve", "lr", "with", "best accuracy, %", "on", ""]
    assert [row[2] for row in table.rows if row[0] == "FedAvg (Fed-SGD)"] == ["–", "–"]


def two_comparisons(folder):
    """The first tunes on validation data and takes 0.03 of five; the second takes another rate as it is."""
    for lr in (0.003, 0.01, 0.03, 0.1):
        write_run(folder / "a" / "tuning" / "fedams" / f"lr{lr}", [0.1, 0.9 - abs(lr - 0.03)], lr=lr,
                  algorithm="fedams", data={"validation": 0.2})  # fmt: skip
    write_run(folder / "a" / "fedams" / "seed0", [0.1, 0.9], lr=0.03, algorithm="fedams")
    write_run(folder / "b" / "fedams" / "seed0", [0.1, 0.8], lr=0.3, algorithm="fedams")


def test_validation_and_test_accuracies_are_labelled(tmp_path):
    two_comparisons(tmp_path)
    report = build.build([tmp_path])
    assert [(response.label, response.on) for response in report.responses] == [
        ("Fed-AMS, validation", "validation"), ("Fed-AMS, test", "test")
    ]  # fmt: skip
    only = build.build([tmp_path / "a"])
    assert [response.label for response in only.responses] == ["Fed-AMS"]


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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_latex_is_escaped():
    rows = [["x & y", "1.0 ± 0.5"], [r"\input{/etc/passwd}", "∞"]]
    script = (resources.files("lamina.report") / "page.js").read_text(encoding="utf-8")
    characters = script[script.index("const NUMBER =") : script.index("const textsOf =")]
    numeric = script[script.index("const isNumeric =") : script.index("function csvOf")]
    program = (
        f"const headOf = () => ['a_b', '50%']; const rowsOf = () => {json.dumps(rows)};\n{characters}\n{numeric}\n"
        f"{script[script.index('function latexOf') : script.index('/** Numbers to the right')]}\n"
        "process.stdout.write(latexOf(null));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
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


def test_the_partitions_of_the_first_seeds_are_shown_once_each(tmp_path):
    two_clients, other = [[3, 0, 1], [0, 2, 2]], [[1, 2, 1], [2, 0, 2]]
    for place, lr, seed, counts in [("a", 0.1, 0, two_clients), ("b", 0.1, 1, other), ("c", 0.2, 0, two_clients),
                                    ("d", 0.3, 5, other), ("e", 0.4, 0, None)]:  # fmt: skip
        folder = write_run(tmp_path / place, [0.5], lr=lr, seed=seed)
        if counts is not None:  # runs of data without classes have no such file
            (folder / "partition.json").write_text(json.dumps({"class_counts": counts}))
    report = build.build([tmp_path])
    named = "digits, classes (k=2), 8 clients, seed"
    assert report.dealt == [(f"{named} 0", two_clients), (f"{named} 5", other)]
    assert not any("split" in note or "partition" in note for note in report.notes)
    drawn = dict(figures.report_figures(report))["partition-1"]
    assert [bar.get_height() for bar in drawn.axes[0].patches] == [4, 4]
    assert drawn.axes[1].images[0].get_array().tolist() == [[3, 0], [0, 2], [1, 2]]


def test_text_in_place_of_the_numbers_of_a_partition_is_refused(tmp_path):
    folder = write_run(tmp_path / "a", [0.5])
    (folder / "partition.json").write_text(json.dumps({"class_counts": [[EVIL]]}))
    with pytest.raises(ValueError, match="invalid literal"):
        build.build([tmp_path])


def test_no_file_that_a_folder_names_is_opened(tmp_path, monkeypatch):
    """A folder may be from somebody else, and name any file of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_run(tmp_path / "a", [0.5], data={"name": "table", "path": "/etc/shadow", "label": "kind"})
    opened = []
    monkeypatch.setattr(sources, "load", lambda *names, **options: opened.append(names))
    for command in (("report", "a"), ("export", "a"), ("watch", "a", "--once")):
        assert call(*command) == 0
    assert opened == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "diverged.json"])
def test_a_pipe_in_a_folder_is_not_read(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), [0.5])
    Path("a", name).unlink(missing_ok=True)
    os.mkfifo(Path("a", name))
    for command in (("report", "a"), ("watch", "a", "--once"), *([("export", "a")] * (name != "diverged.json"))):
        assert call(*command) == 2
        assert f"{name}': it is not a file" in said_in_one_line(capsys)


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
    assert {"cost-to-target.csv", "common-configuration.csv"} <= written
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
    drawn = figures.curve_figure(curves, figures.described("accuracy"), "bytes")
    assert [line.get_ydata().tolist() for line in drawn.axes[0].lines] == [[50, 70], [60]]
    assert drawn.axes[0].lines[0].get_xdata().tolist() == pytest.approx([10e-3, 20e-3])
    images = [figures.image_of(drawn, ending) for ending in figures.FORMATS]
    assert [image[:5] for image in images] == [b"%PDF-", b"<?xml", b"\x89PNG\r"]
    assert [figures.image_of(drawn, ending) for ending in figures.FORMATS] == images  # the same figure, the same file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no folder 'nowhere'"),
        (["empty"], "no run in 'empty'"),
        (["good", "--target", "90"], "--target 90: must be an accuracy above 0 and up to 1"),
        (["bad"], "is not a run's configuration: KeyError('train')"),
        (["good", "--out", "good"], "cannot write 'good'"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("empty").mkdir()
    write_run(Path("good"), [0.5])
    write_run(Path("bad"), [0.5])
    Path("bad/config.json").write_text(json.dumps({"format": FORMAT, "algorithm": {"name": "fedavg"}}))
    assert call("report", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
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
