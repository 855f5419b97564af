"""``lamina compare``: what it prints and draws, on wide, narrow and plain terminals."""

import csv
import dataclasses
import io
import json
import re
import sys

import pytest
from rich.console import Console

from helpers import call, sets, trial
from lamina import History, algorithms
from lamina.cli import base
from lamina.cli.compare import comparison_table
from lamina.data.drawing import save_picture
from lamina.experiment.config import load
from lamina.experiment.trials.trials import Job, has_ended
from lamina.privacy.accounting import Accountant
from lamina.report.figures import comparison_figure


def test_compare_prints_the_table_and_saves_the_picture(here, capsys):
    """Off a terminal, a plain line for every run goes to stderr, the table to stdout."""
    overrides = sets("compare.grid.fedavg.lr=[0.01, 0.1]", "train.lr=0.05")
    assert call("compare", "small.toml", "--algorithms", "fedavg, fedlada", "--seeds", "2", *overrides) == 0
    printed = capsys.readouterr()
    assert "fedavg" in printed.out
    assert "fedlada" in printed.out
    out = here / "runs" / "small-compare"
    assert (out / "comparison.png").stat().st_size > 10_000
    assert len((out / "rounds.csv").read_text().splitlines()) == 1 + 2 * 2 * 3
    assert len((out / "tuning.csv").read_text().splitlines()) == 1 + 2
    assert len(printed.err.splitlines()) == 2 + 2 * 2
    assert "tuning fedavg, lr 0.01, seed -1, 3 rounds: final validation accuracy 0." in printed.err
    assert "note: rates were chosen on 20% of the training data, held out" in printed.out


def test_compare_prints_differences_to_a_baseline(here, capsys):
    arguments = ("--algorithms", "fedavg,fedlada", "--seeds", "2", "--out", "c", "--set", "train.lr=0.05")
    assert call("compare", "small.toml", *arguments, "--baseline", "fedlad") == 2
    assert "did you mean 'fedlada'" in capsys.readouterr().err
    assert not (here / "c").exists()
    assert call("compare", "small.toml", *arguments, "--baseline", "fedlada") == 0
    printed = capsys.readouterr().out
    assert "to fedlada" in printed
    assert "paired by seed" in " ".join(printed.split())
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(" fed")}
    assert re.search(r"[-+]\d+\.\d \[[-+][\d.]+, [-+][\d.]+\]", rows["fedavg"])
    assert "[" not in rows["fedlada"]


def test_compare_ignores_settings_for_others_but_not_misspelt_ones(here, capsys):
    others = ("--set", "compare.grid.fedams.lr=[0.1, 0.2]", "--set", "compare.options.scaffold.server_lr=0.5")
    assert call("compare", "small.toml", "--algorithms", "fedavg", "--seeds", "1", "--out", "c", "-q", *others) == 0
    assert call("compare", "small.toml", "--algorithms", "fedavg", "--set", "compare.grid.fedavgg.lr=[0.1]") == 2
    assert "did you mean 'fedavg'?" in capsys.readouterr().err


@pytest.mark.long
def test_compare_survives_seeds_that_diverge_at_once(here, capsys):
    arguments = ("--seeds", "2", "--out", "c", "--set", "train.lr=1e38", "--set", "train.seed=5")
    assert call("compare", "small.toml", "--algorithms", "fedavg,fedlamb", *arguments) == 3
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" fedavg"))
    assert row.split() == ["fedavg", "1e+38", "–", "–", "–", "–", "–"]
    assert (here / "c" / "comparison.png").exists()


def test_compare_uses_real_seeds_the_cards_rates_and_the_algorithm_section(here, capsys):
    (here / "free.toml").write_text((here / "small.toml").read_text().replace("lr = 0.02", "seed = 7"))
    assert call("compare", "free.toml", "--algorithms", "fedlamb,fedavg", "--seeds", "2", "--out", "c") == 0
    assert "train.lr" not in capsys.readouterr().out
    rows = list(csv.DictReader((here / "c" / "rounds.csv").open()))
    assert {row["seed"] for row in rows} == {"7", "8"}
    config = json.loads((here / "c" / "config.json").read_text())
    used = {name: section["lr"] for name, section in config["algorithms"].items()}
    assert used == {name: algorithms.find(name).card.lr for name in ("fedlamb", "fedavg")}
    assert config["algorithms"]["fedlamb"]["decay"] == 0.01
    assert call("compare", "small.toml", "--algorithms", "fedavg", "--seeds", "1", "--out", "d") == 0
    assert "train.lr = 0.02 is used for fedavg" in capsys.readouterr().out


@pytest.mark.long
def test_runs_that_their_privacy_budget_stops_are_complete(here, capsys):
    budget = Accountant(2.0, 1e-3, 8).epsilon(2) * (1 + 1e-9)
    (here / "private.toml").write_text(
        'extends = "small.toml"\n[train]\nlocal_steps = 1\nparticipation = 1.0\nrounds = 9\n[privacy]\nbound = 0.5\n'
        f'noise_multiplier = 2.0\nepsilon = {budget}\ndelta = 1e-3\nsecret = "secret"\n'
    )
    arguments = ["private.toml", "--algorithms", "fedavg", "--seeds", "1", *sets("compare.grid.fedavg.lr=[0.05]")]
    assert call("compare", *arguments, "--out", "c") == 0
    assert re.fullmatch(r"fedavg, lr 0.05, seed 0: final test accuracy [\d.]+\n", capsys.readouterr().err)
    experiment = load(here / "private.toml")
    assert has_ended(Job(experiment, here / "c" / "fedavg" / "seed0", "", tuning=False, algorithm="fedavg"))


def test_compare_does_not_write_into_a_runs_folder(here, capsys):
    assert call("run", "small.toml", "--out", "r", "-q") == 0
    assert call("compare", "small.toml", "--algorithms", "fedavg", "--out", "r") == 2
    assert "holds other files" in capsys.readouterr().err


def entry(*accuracies):
    rows = [
        History([{"round": i, "accuracy": a, "bytes_down": 1e6 * (1 + seed), "bytes_up": 0}
                 for i, a in enumerate(curve, 1)])
        for seed, curve in enumerate(accuracies)
    ]  # fmt: skip
    return trial("x", rows, "X")


def test_a_diverged_seed_does_not_shorten_the_picture():
    figure = comparison_figure([entry([0.1, 0.2, 0.4], [0.3], [])], "title")
    by_rounds, by_bytes = (axes.lines[0] for axes in figure.axes)
    assert list(by_rounds.get_ydata()) == pytest.approx([20, 20, 40])
    assert list(by_bytes.get_xdata()) == pytest.approx([1.5, 2.5, 3.5])  # round 1: the mean of 1 and 2 MB
    assert "band: min to max over seeds" in figure.axes[0].get_legend().get_title().get_text()


def test_the_table_fits_eighty_columns(monkeypatch, tmp_path):
    names = [dataclasses.replace(entry([0.1, 0.95], [0.2, 0.99]), name=name) for name in algorithms.registry()]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    monkeypatch.setattr(base, "out", console)
    console.print(comparison_table(names, 0.9))
    text = console.file.getvalue()
    assert all(f"{name} " in text for name in algorithms.registry())
    assert "97.0±2.8" in text
    save_picture(comparison_figure(names, "all of them"), tmp_path / "all.png")


def test_a_warning_of_several_runs_is_printed_once(here, capsys):
    shared = ("--set", "data.partition={name='reallocate', base='iid'}", "--set", "train.rounds=1")
    assert call("compare", "small.toml", "--algorithms", "fedlamb,fedams", "--seeds", "2", "--out", "c", *shared) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert warnings
    assert len(warnings) == len(set(warnings))


def test_a_terminal_without_unicode_stops_nothing(here, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert call("compare", "small.toml", "--algorithms", "fedavg", "--seeds", "2", "--out", "c") == 0
    assert call("show", "fedlada") == 0
    stream.flush()
    assert "fedavg" in stream.buffer.getvalue().decode("ascii")


def entries(*names):
    row = {"bytes_down": 1e6, "bytes_up": 1e6}
    histories = [History([{"round": 1, "accuracy": value, **row}]) for value in (0.91, 0.93)]
    return [trial(name, histories, title, lr=0.003) for name, title in names]


def test_the_table_of_a_comparison_has_the_title():
    table = comparison_table(entries(("fedlamb", "Fed-LAMB"), ("a.long.module:Mine", "My-LAMB")), 0.9)
    assert [str(cell) for cell in table.columns[0].cells] == ["fedlamb", "My-LAMB"]


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
