"""What Python shows: simulations and histories as text and HTML, progress bars, and lines of a log."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

import lamina
from lamina.training import progress
from lamina.training.progress import IntervalLines, NotebookBars
from two_classes import simulate


def test_a_simulation_and_its_history_show_themselves():
    simulation = simulate()
    assert "rounds: 0" in repr(simulation)
    simulation.run(1)
    assert "FedAvg" in repr(simulation)
    assert simulation._repr_html_().count("<table>") == 2


def test_a_long_history_is_shortened():
    history = lamina.History([{"round": r, "loss": 1 / r} for r in range(1, 101)])
    lines = str(history).splitlines()
    assert len(lines) == 12
    assert [line.split()[0] for line in lines[5:8]] == ["5", "…", "96"]
    assert history._repr_html_().count("<tr>") == 12
    assert len(str(history[:30]).splitlines()) == 31


def test_progress_is_shown_in_a_terminal_only_unless_asked(capsys):
    simulation = simulate()
    simulation.run(1)
    assert capsys.readouterr() == ("", "")
    simulation.run(1, progress=True)
    assert "FedAvg" in capsys.readouterr().err
    simulation.run(1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_gets_html_bars(monkeypatch):
    drawn = []
    handle = SimpleNamespace(update=lambda value: drawn.append(value))
    IPython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(IPython, "display", lambda bars, display_id: handle)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    with progress.python_bars(["a<b"], None, total=4, state="") as bars:
        assert isinstance(bars, NotebookBars)
        bars.update("a<b", {"round": 1, "accuracy": 0.5}, completed=1)
        html = drawn[0]._repr_mimebundle_((), ())["text/html"]
        assert "a&lt;b" in html
        assert "1/4" in html
        assert "accuracy 0.500" in html
    assert len(drawn) == 2  # the bar, and nothing at the end
    assert not progress.python_bars(["a"], False).live


def test_bars_show_names_as_they_are():
    """No word between colons becomes an emoji, and no bracket is read as markup."""
    name, state = "a:heart:[b]", "try [/x] :heart:"
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with progress.Bars([name], console, is_shown=True) as bars:
        bars.update(name, state=state, total=2, completed=1)
    shown = console.file.getvalue()
    assert name in shown
    assert state in shown


def test_a_log_gets_lines_at_intervals(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = IntervalLines("fedavg", 100, 0, lines.append)
    for number in range(1, 101):
        clock[0] += 3
        log.round_finished({"round": number, "accuracy": 0.5, "train_loss": 1.0})
    assert len(lines) == 10
    assert lines[0] == "fedavg: round 10 of 100, accuracy 0.500, train loss 1, 270 s left"
