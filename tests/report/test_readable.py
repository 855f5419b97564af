"""What people read: titles of their own algorithms, plurals, ticks, narrow terminals, and runs that have just begun."""

import itertools
import json
import re
import time
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from helpers import call, trial
from lamina import History, algorithms
from lamina.cli import base
from lamina.cli.compare import comparison_table
from lamina.experiment.runs.records import Record, find_records
from lamina.experiment.trials.trials import Trial
from lamina.report import figures
from lamina.report.build import build
from lamina.report.figures import curve_figure, metrics_of, rates_figure
from lamina.report.rates import Response
from lamina.report.tables import results_table, runs_tables
from lamina.storage.locks import Lock

SMALL = '[data]\nclients = 1\n[model]\nname = "mlp"\nhidden = 4\n[train]\nrounds = 1\n'
OWN = """
import lamina
from lamina.algorithms.fedavg import FedAvg

@lamina.algorithm("mine", title="My-LAMB", reference="mine", lr=0.1)
class Mine(FedAvg):
    pass
"""


@pytest.fixture
def here(empty_folder):
    (empty_folder / "small.toml").write_text(SMALL)
    (empty_folder / "mine_for_titles.py").write_text(OWN)
    with mock.patch.dict(algorithms.registry()):  # without the test's algorithm afterwards
        yield empty_folder


# --- titles


def test_the_title_of_a_users_algorithm_is_kept_in_tables_and_legends(here, capsys):
    name = "mine_for_titles:Mine"
    assert call("run", "small.toml", "--out", "run", "--set", f"algorithm.name={name}") == 0
    assert call("run", "small.toml", "--out", "other", "--set", "algorithm.name=fedavg") == 0
    algorithms.registry().clear()  # a report does not import the user's code
    report = build([here / "run", here / "other"])
    assert "My-LAMB" in [curve.name for curve in report.curves]
    assert any(row[0] == "My-LAMB" for row in results_table(report.curves).rows)
    legend = curve_figure(report.curves, metrics_of(report.curves)[0], "round").axes[0].get_legend()
    assert "My-LAMB" in [text.get_text() for text in legend.get_texts()]
    assert all(not heading.startswith("title") for table in runs_tables(report.curves) for heading in table.head)
    capsys.readouterr()
    assert call("watch", "run", "--once") == 0
    assert "run: My-LAMB lr 0.1" in capsys.readouterr().out


def test_a_run_with_a_title_is_recognised_when_it_is_started_again(here, capsys):
    command = ("run", "small.toml", "--out", "run", "--set", "algorithm.name=mine_for_titles:Mine")
    assert call(*command) == 0
    config = json.loads((here / "run" / "config.json").read_text())
    assert config.pop("title") == "My-LAMB"
    (here / "run" / "config.json").write_text(json.dumps(config))  # as an earlier lamina left it
    capsys.readouterr()
    assert call(*command) == 0
    assert "run/ is complete: 1 round;" in capsys.readouterr().out


def test_a_title_that_is_damaged_is_no_reason_to_refuse_a_run(here):
    assert call("run", "small.toml", "--out", "run", "--quiet") == 0
    config = json.loads((here / "run" / "config.json").read_text())
    config["algorithm"]["name"], config["title"] = "mine:Mine", 7
    (here / "run" / "config.json").write_text(json.dumps(config))
    assert find_records([here / "run"])[0].title == "mine:Mine"


def entries(*names):
    row = {"bytes_down": 1e6, "bytes_up": 1e6}
    histories = [History([{"round": 1, "accuracy": value, **row}]) for value in (0.91, 0.93)]
    return [trial(name, histories, title, lr=0.003) for name, title in names]


def test_the_table_of_a_comparison_has_the_title():
    table = comparison_table(entries(("fedlamb", "Fed-LAMB"), ("a.long.module:Mine", "My-LAMB")), 0.9)
    assert [str(cell) for cell in table.columns[0].cells] == ["fedlamb", "My-LAMB"]


def test_the_cells_of_a_table_are_text_not_markup(monkeypatch):
    console = Console(width=60, color_system=None)
    monkeypatch.setattr(base, "out", console)
    with console.capture() as captured:
        console.print(base.table(("name", "value"), [["[red]mine[/red]", ":smile: [1, 2]"]]))
    assert captured.get().splitlines()[1].split(maxsplit=1) == ["[red]mine[/red]", ":smile: [1, 2]"]


# --- narrow terminals


@pytest.mark.parametrize("width", [40, 60, 80])
def test_names_of_algorithms_are_whole_on_a_narrow_terminal(width, monkeypatch):
    names = ["fedavg", "fedlada_lamb", "fedadam_star"]
    console = Console(width=width, color_system=None)
    monkeypatch.setattr(base, "out", console)
    with console.capture() as captured:
        console.print(comparison_table(entries(*((n, n) for n in names)), 0.9))
    lines = captured.get().splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in names)
    assert all(len(line) <= width for line in lines)
    assert "92.0±1.4" in captured.get()  # what was compared is the last to go


def test_the_list_of_algorithms_has_whole_names_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("lamina.cli.WIDTH_FOR_PROGRAMS", 40)
    assert call("list", "algorithms") == 0
    firsts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {"fedlada_lamb", "fedadam_star", "mimelamb"} <= set(firsts)


def test_watch_shows_whole_names_on_a_narrow_terminal(here, capsys, monkeypatch):
    monkeypatch.setattr("lamina.cli.WIDTH_FOR_PROGRAMS", 40)
    for name in ("fedavg", "fedlada_lamb"):
        assert call("run", "small.toml", "--quiet", "--out", f"{name}/seed0", "--set", f"algorithm.name={name}") == 0
    assert call("watch", ".", "--once") == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fedlada_lamb/seed0", "complete"] in [line[:2] for line in words]


# --- watch


def test_watch_waits_for_a_run_in_a_folder_of_runs_before_its_first_round(here, capsys):
    lock = Lock(Path("runs/new"))
    assert call("watch", "runs", "--once") == 0
    lock.release()
    assert capsys.readouterr().out == "runs: waiting for the first round\n"


def test_watch_continues_while_a_second_run_has_not_finished_a_round(here, monkeypatch):
    assert call("run", "small.toml", "--quiet", "--out", "runs/old") == 0
    lock = Lock(Path("runs/new"))
    looks = []

    def look(_):
        looks.append(1)
        if len(looks) == 3:
            lock.release()

    monkeypatch.setattr(time, "sleep", look)
    assert call("watch", "runs") == 0
    assert len(looks) == 3


def test_watch_shows_a_run_whose_metrics_are_still_empty(here, capsys):
    assert call("run", "small.toml", "--quiet", "--out", "run") == 0
    (here / "run" / "metrics.jsonl").write_text("")
    lock = Lock(Path("run"))
    assert call("watch", "run", "--once") == 0
    lock.release()
    assert "0/1" in capsys.readouterr().out


# --- plurals


def test_one_is_singular_everywhere(here, capsys, monkeypatch):
    monkeypatch.setattr(figures, "report_figures", lambda report: [])  # their tables are read
    (here / "small.toml").write_text(SMALL + "[compare]\nalgorithms = ['fedavg']\nseeds = 1\n"
                                     "[compare.grid]\nfedavg = { lr = [0.1, 0.2] }\n"
                                     "[tune.grid]\n'train.lr' = [0.1]\n")  # fmt: skip
    for command in (
        ("run", "small.toml", "--out", "run"),
        ("run", "small.toml", "--out", "run"),
        ("compare", "small.toml", "--out", "compared"),
        ("tune", "small.toml", "--out", "tuned"),
        ("report", "run", "--out", "page.html", "--figures", "figures"),
    ):
        assert call(*command) == 0
    printed = capsys.readouterr()
    files = [path for path in here.rglob("*") if path.suffix in (".txt", ".toml", ".csv")]
    page = re.sub(r"<script.*?</script>", "", (here / "page.html").read_text(), flags=re.S)
    for text in (printed.out, printed.err, page, *(path.read_text() for path in files)):
        assert not re.search(r"\b1 (rounds|clients|seeds|runs|curves|trials|samples|steps|nodes)\b|\(s\)", text)
    assert "1 round," in printed.out
    assert "1 client," in (here / "run" / "log.txt").read_text()


# --- figures


@pytest.mark.parametrize(
    "rates",
    [[0.1, 0.11, 0.12], [0.02, 0.03, 0.05, 0.07], [0.01 * 1.2**i for i in range(14)], [1e-5 * 3**i for i in range(13)],
     [0.1], [0.001, 0.1, 0.1001, 0.1002, 1]],
)  # fmt: skip
def test_the_labels_of_learning_rates_do_not_overlap(rates):
    runs = [
        Record(Path(), {"train": {"rounds": 1}}, History([{"round": 1, "accuracy": 0.5 + lr / 1e3}]), {})
        for lr in rates
    ]
    tried = [(lr, Trial("", {}, [run], 1)) for lr, run in zip(rates, runs, strict=True)]
    figure = rates_figure([Response("FedAvg", "test", tried)])
    figure.draw_without_rendering()
    axis = figure.axes[0].xaxis
    low, high = axis.get_view_interval()
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    boxes = sorted(
        tick.label1.get_window_extent().extents[[0, 2]].tolist()
        for tick in ticks
        if tick.label1.get_text() and low <= tick.get_loc() <= high
    )
    assert boxes
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(boxes))
