"""`lamina frontier`: what it prints and writes, that it resumes, and errors in one line."""

from pathlib import Path

import pytest

from helpers import call, count, said_in_one_line, sets
from lamina.training.training import Training
from small_frontier import ROUNDS, TOML

NOTE = "note: private runs with secret cohorts: the time of other cohorts"
SMALL = sets("train.rounds=3", "frontier.epsilons=[8]", "compare.seeds=1")


@pytest.fixture
def here(empty_folder):
    Path("small.toml").write_text(TOML)
    return empty_folder


@pytest.mark.long
def test_it_prints_the_table_and_saves_table_picture_and_report(here, capsys, monkeypatch):
    assert call("frontier", "small.toml", *SMALL, "--algorithms", "fedavg") == 0
    printed, folder = capsys.readouterr(), here / "runs" / "small-frontier"
    rows = [line.split() for line in printed.out.splitlines() if line.startswith(" fedavg")]
    assert [row[:3] for row in rows] == [
        ["fedavg", "none", "∞"],
        ["fedavg", "sign,", "feedback"],
        ["fedavg", "none", "8.00"],
    ]
    assert "fastest to 20% on 4g: " in printed.out or "no method stays at 20%: not within 3 rounds" in printed.out
    assert NOTE not in printed.out  # all clients take part in every round
    assert len(printed.err.splitlines()) == 3  # a line for every run
    assert (folder / "frontier.png").stat().st_size > 10_000
    assert len((folder / "frontier.csv").read_text().splitlines()) == 1 + 3
    assert '<section id="frontier">' in (folder / "report.html").read_text()
    monkeypatch.setattr(Training, "record", None)
    more = sets("frontier.clocks=['lan']")
    assert call("frontier", "small.toml", *SMALL, "--algorithms", "fedavg", *more) == 0  # nothing is trained
    assert "lan" in (folder / "frontier.csv").read_text()
    assert call("report", folder, "--out", "page.html", "--figures", "figures") == 0
    assert '<section id="frontier">' in Path("page.html").read_text()
    assert Path("figures/frontier.csv").read_bytes() == (folder / "frontier.csv").read_bytes()


def test_seconds_of_secret_cohorts_are_noted(here, capsys):
    few = sets("train.participation=0.5", "frontier.channels=['none']", "compare.algorithms=['fedavg']")
    assert call("frontier", "small.toml", *SMALL, *few, "--out", "f") == 0
    assert capsys.readouterr().out.count(NOTE) == 1
    assert call("report", "f", "--clock", "4g") == 0  # whose table of the frontier has seconds as well
    assert capsys.readouterr().out.count(NOTE) == 1


@pytest.mark.long
def test_stopped_it_shows_the_runs_that_ended_and_resumes(here, capsys, monkeypatch):
    record, trained = Training.record, []

    def counted(self, *arguments, **options):
        trained.append(1)
        return record(self, *arguments, **options)

    monkeypatch.setattr(Training, "record", counted)
    monkeypatch.setattr("lamina.cli.base.Stop.__call__", lambda self: len(trained) == 5)
    arguments = ("frontier", "small.toml", *SMALL, "--out", "f")
    assert call(*arguments) == 130
    said = capsys.readouterr()
    assert "table and picture are of the finished runs; run the same command again to resume" in said.err
    assert sum(line.startswith(" fedavg") for line in said.out.splitlines()) == 1
    assert call(*arguments) == 0
    assert count("f") == len(trained) == 6 * 3
    assert ROUNDS > 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithms", "fedavgg"], "fedavgg"),
        (sets("frontier.channels=['zip']"), "frontier.channels: unknown codec 'zip'"),
        (sets("frontier.epsilons=[]"), "frontier.epsilons = []: must not be empty"),
        (["--workers", "100"], "--workers 100: there is no work for so many, only 16 runs"),
    ],
)
def test_user_errors_are_one_line(here, capsys, words, message):
    assert call("frontier", "small.toml", *words) == 2
    assert message in said_in_one_line(capsys)
    assert not Path("runs").exists()


def test_a_file_without_a_frontier_and_a_folder_of_something_else(here, capsys):
    Path("plain.toml").write_text(TOML.partition("[frontier]")[0])
    assert call("frontier", "plain.toml") == 2
    assert "the file has no [frontier]" in said_in_one_line(capsys)
    Path("other").mkdir()
    Path("other/config.json").write_text("{}")
    assert call("frontier", "small.toml", "--out", "other") == 2
    assert "holds other files than" in said_in_one_line(capsys)
