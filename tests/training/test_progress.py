"""The progress of training: scores in words, and where bars and lines are shown."""

import io
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from lamina.training import progress


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"round": 1, "loss": 0.25, "accuracy": 0.5}, "accuracy 0.500"),
        ({"round": 1, "loss": 0.25}, "loss 0.250"),
        ({"round": 1, "train_loss": 0.25}, ""),
    ],
)
def test_the_score_of_a_round_in_words(row, text):
    assert progress.score_of(row) == text


def test_a_bar_keeps_the_score_of_the_last_evaluated_round():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with progress.Bars(["fedavg"], console, is_shown=True, total=2) as bars:
        bars.update("fedavg", {"round": 1, "accuracy": 0.5}, completed=1)
        bars.update("fedavg", {"round": 2, "train_loss": 1.0}, completed=2)
    last = console.file.getvalue().rpartition("2/2")[2]
    assert "accuracy 0.500" in last


def test_hidden_bars_print_nothing():
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress.Bars(["fedavg"], console, is_shown=False) as bars:
        bars.update("fedavg", {"round": 1, "accuracy": 0.5}, advance=1)
    assert not bars.live
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(("is_terminal", "asked", "is_shown"), [(True, None, True), (False, None, False),
                                                               (True, False, False), (False, True, True)])  # fmt: skip
def test_bars_are_for_terminals_unless_asked_for(monkeypatch, is_terminal, asked, is_shown):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal))
    assert progress.python_bars(["fedavg"], asked).live == is_shown


def test_the_time_left_counts_only_the_rounds_of_this_process(monkeypatch):
    """A run resumed after round 90 has taken 40 s for one round, and nine are left."""
    clock, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = progress.IntervalLines("a\x1b[2J", 100, 90, lines.append)
    clock[0] = 40.0
    log.round_finished({"round": 91, "train_loss": 1.5})
    assert lines == ["a\\x1b[2J: round 91 of 100, train loss 1.5, 360 s left"]
