"""`lamina reproduce`: the editable copy of an experiment file, and how findings are printed."""

import pytest

from lamina import BadInput
from lamina.cli.reproduce import show, write_copy
from lamina.experiment.config import Claim, load
from lamina.experiment.trials.claims import Finding, Pair
from lamina.experiment.trials.pairs import Difference

FINDING = Finding(
    Claim(
        text="Fed-LAMB [is] best",
        kind="order",
        expect=["fedlamb", "fedavg", "fedams"],
        paper={"fedlamb": 98.5, "fedavg": 95.5},
    ),
    {"fedlamb": 0.972, "fedavg": 0.96, "fedams": 0.965},
    [
        Pair("fedlamb", "fedavg", "right", Difference(0.012, 0.002, 3)),
        Pair("fedlamb", "fedams", "tie", Difference(0.007, 0.01, 3), "holds by less than the interval"),
        Pair("fedavg", "fedams", "not comparable", None, "fedams diverged in 1 of 3 seeds"),
    ],
)


def test_a_copy_is_complete_without_the_file_that_it_extends(here, capsys):
    (here / "child.toml").write_text('extends = "small.toml"\n[train]\nrounds = 7\n')
    write_copy(here / "child.toml", here / "copy.toml")
    assert "extends" not in (here / "copy.toml").read_text()
    assert load(here / "copy.toml") == load(here / "child.toml")
    assert capsys.readouterr().out.endswith(f"run it with: lamina reproduce {here / 'copy.toml'}\n")


def test_a_copy_replaces_nothing_and_names_a_missing_folder(here):
    (here / "mine.toml").write_text("mine")
    with pytest.raises(BadInput, match="File exists"):
        write_copy(here / "small.toml", here / "mine.toml")
    assert (here / "mine.toml").read_text() == "mine"
    with pytest.raises(BadInput, match="No such file or directory"):
        write_copy(here / "small.toml", here / "nowhere" / "copy.toml")


def test_the_papers_numbers_are_beside_ours_and_a_verdict_names_the_pairs(capsys):
    show([FINDING], "full")
    printed = capsys.readouterr().out
    assert "claim: Fed-LAMB [is] best" in printed
    cells = {words[0]: words[1:] for words in map(str.split, printed.splitlines()) if len(words) == 3}
    assert (cells["fedlamb"], cells["fedams"]) == (["98.5", "97.2"], ["-", "96.5"])
    assert "verdict: partly (1 of 3 pairs, 3 seeds)" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "fedlamb / fedavg +1.2 [+1, +1.4] right" in lines
    assert "fedlamb / fedams +0.7 [-0.3, +1.7] tie: holds by less than the interval" in lines
    assert "fedavg / fedams - not comparable: fedams diverged in 1 of 3" in lines  # the table folds


def test_a_small_version_has_no_verdict(capsys):
    show([FINDING], "small")
    printed = capsys.readouterr().out
    assert "verdict:" not in printed
    assert "a smoke test, and no verdict about the paper" in printed
