"""What people read: titles of their own algorithms, plurals, narrow terminals, and runs that have just begun."""

import json
import re
import time
from pathlib import Path
from unittest import mock

import pytest

from helpers import call
from lamina import algorithms
from lamina.experiment.runs.records import find_records
from lamina.report import figures
from lamina.report.build import build
from lamina.report.figures import curve_figure, metrics_of
from lamina.report.tables import results_table, runs_tables
from lamina.storage.leases import take

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


# --- narrow terminals


def test_watch_shows_whole_names_on_a_narrow_terminal(here, capsys, monkeypatch):
    monkeypatch.setattr("lamina.cli.WIDTH_FOR_PROGRAMS", 40)
    for name in ("fedavg", "fedlada_lamb"):
        assert call("run", "small.toml", "--quiet", "--out", f"{name}/seed0", "--set", f"algorithm.name={name}") == 0
    assert call("watch", ".", "--once") == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fedlada_lamb/seed0", "complete"] in [line[:2] for line in words]


# --- watch


def test_watch_waits_for_a_run_in_a_folder_of_runs_before_its_first_round(here, capsys):
    lease = take(Path("runs/new"))
    assert call("watch", "runs", "--once") == 0
    lease.release()
    assert capsys.readouterr().out == "runs: waiting for the first round\n"


def test_watch_continues_while_a_second_run_has_not_finished_a_round(here, monkeypatch):
    assert call("run", "small.toml", "--quiet", "--out", "runs/old") == 0
    lease = take(Path("runs/new"))
    looks = []

    def look(_):
        looks.append(1)
        if len(looks) == 3:
            lease.release()

    monkeypatch.setattr(time, "sleep", look)
    assert call("watch", "runs") == 0
    assert len(looks) == 3


def test_watch_shows_a_run_whose_metrics_are_still_empty(here, capsys):
    assert call("run", "small.toml", "--quiet", "--out", "run") == 0
    (here / "run" / "metrics.jsonl").write_text("")
    lease = take(Path("run"))
    assert call("watch", "run", "--once") == 0
    lease.release()
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
