"""What all commands share: the consoles, tables and the summary of a run."""

import io
import re

from rich.console import Console
from rich.table import Table

from control_characters import CONTROL, NASTY
from helpers import call
from lamina import History
from lamina.cli import base


def test_the_summary_of_a_small_run_has_a_fitting_unit(capsys):
    base.print_summary(History([{"round": 1, "loss": 0.5, "bytes_down": 1200, "bytes_up": 1100, "seconds": 0.1}]))
    assert capsys.readouterr().out == "1 round, best loss 0.5000, last 0.5000, 2.3 kB sent, 0.1 s\n"


def test_control_characters_in_tables_do_not_reach_the_terminal():
    console = base.SafeConsole(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    table = Table()
    table.add_column(NASTY)
    table.add_row(NASTY)
    console.print(table)
    printed = console.file.getvalue()
    assert "\\x1b[2J" in printed
    assert not CONTROL.search(re.sub(r"\x1b\[[0-9;]*m", "", printed))  # rich's own bold


def test_a_name_is_printed_as_it_is(capsys):
    """Not with an emoji in place of a word between colons."""
    assert call("run", "a:heart:b.toml") == 2
    assert "'a:heart:b.toml'" in capsys.readouterr().err
    assert call("list", "a:heart:b") == 2
    assert "a:heart:b" in capsys.readouterr().err


def test_the_cells_of_a_table_are_text_not_markup(monkeypatch):
    console = Console(width=60, color_system=None)
    monkeypatch.setattr(base, "out", console)
    with console.capture() as captured:
        console.print(base.table(("name", "value"), [["[red]mine[/red]", ":smile: [1, 2]"]]))
    assert captured.get().splitlines()[1].split(maxsplit=1) == ["[red]mine[/red]", ":smile: [1, 2]"]
