"""Lines of lamina's logger in the logs of the runs they are about."""

import logging
from pathlib import Path

import pytest

from comparisons import RUNS, TOML, command
from helpers import call, skip_pictures
from lamina.base.warnings_once import print_warnings_once
from lamina.experiment.runs.log_lines import LogLines

logger = logging.getLogger("lamina.test")


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


@pytest.fixture
def runs(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    return folders


def texts(folder):
    """The lines of a log without their times."""
    return [line.split(" ", 2)[2] for line in (folder / "log.txt").read_text().splitlines()]


def test_a_log_has_the_lines_from_before_it_was_opened_and_none_about_other_runs(runs):
    a, b = runs
    with LogLines() as lines:
        logger.info("early")
        lines.follow(a)
        lines.follow(b)
        logger.warning("of one", extra={"about": a})
        lines.about = b
        logger.info("of the other")
    logger.warning("late")
    assert texts(a) == ["INFO early", "WARNING of one"]
    assert texts(b) == ["INFO early", "INFO of the other"]


def test_the_level_of_the_logger_is_restored():
    lamina_logger = logging.getLogger("lamina")
    before = lamina_logger.level, list(lamina_logger.handlers)
    with LogLines():
        assert lamina_logger.isEnabledFor(logging.INFO)
    assert (lamina_logger.level, lamina_logger.handlers) == before


def test_a_warning_is_printed_once_whatever_logs_are_open(runs, capsys, monkeypatch):
    """A comparison builds a simulation before it opens its logs, and again for every run."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("lamina"), "handlers", [])
    print_warnings_once()
    logger.warning("padded")
    for folder in runs:
        with LogLines() as lines:
            lines.follow(folder)
            logger.warning("padded")
            logger.info("not printed")
            logger.warning("of %s", folder.name)
        assert texts(folder) == ["WARNING padded", "INFO not printed", f"WARNING of {folder.name}"]
    assert capsys.readouterr().err == "padded\nof a\nof b\n"


def test_a_line_break_in_a_message_does_not_start_a_line(runs):
    with LogLines() as lines:
        lines.follow(runs[0])
        logger.info("two\nlines")
    assert len(texts(runs[0])) == 1


def test_a_log_that_cannot_be_opened_ends_nothing(runs):
    with LogLines() as lines:
        lines.follow(runs[0] / "missing")
        lines.follow(runs[1])
        logger.info("still logged")
    assert texts(runs[1]) == ["INFO still logged"]


def test_a_log_is_about_its_own_run(here):
    assert call(*command("c", "compare.grid.fedavg.lr=[0.05, 1e30]", "train.rounds=2")) == 0
    logs = {name: Path("c", name, "log.txt").read_text() for name in RUNS[2:]}
    logs |= {f"tuning/fedavg/lr{lr}": Path(f"c/tuning/fedavg/lr{lr}/log.txt").read_text() for lr in ("0.05", "1e+30")}
    for name, text in logs.items():
        assert f"c/{name}: " in text
        assert not any(f"c/{other}: " in text for other in logs if other != name)
        assert ("diverged" in text) == name.endswith("1e+30")
