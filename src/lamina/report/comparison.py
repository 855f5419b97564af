"""A comparison as a table on the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.markup import escape
from rich.table import Table

from lamina.data.picture import save_picture
from lamina.experiment.compare import Entry
from lamina.experiment.settings import shown_name, written
from lamina.report.figures import LEGEND_INSIDE_UP_TO, METRICS, STYLE, draw
from lamina.report.tables import NEVER, NONE, cost_to_target, fixed, mean_and_spread, sent, values
from lamina.text import plural

MEGA = 1e6
COLUMNS = ("lr", "rounds\nto target", "MB to\ntarget", "best\nacc. %", "last\nacc. %", "MB\nin all")
LEFT_OUT_FIRST = ("MB\nin all", "last\nacc. %", "MB to\ntarget", "lr")  # where the terminal is too narrow for all
ACCURACY = METRICS[0]


class Symbols(NamedTuple):
    """Characters of the table that not every terminal can show."""

    spread: str = "±"
    never: str = NEVER
    none: str = NONE


ASCII = Symbols("+-", "inf", "-")


def table(
    entries: list[Entry],
    target: float,
    symbols: Symbols = Symbols(),  # noqa: B008 (immutable)
    left_out: Sequence[str] = (),
) -> Table:
    """Rounds and megabytes to the target, best and last accuracy, megabytes in all; without some of the columns."""
    seeds = max(len(entry.histories) for entry in entries)
    spread = f"mean {symbols.spread} std of {seeds} seeds" if seeds > 1 else plural(seeds, "seed")
    made = Table(
        title=f"{spread}; target: test accuracy {target:.0%}", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    made.add_column("algorithm", overflow="fold")
    for heading in COLUMNS:
        if heading not in left_out:
            made.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        histories, cost = entry.histories, cost_to_target(entry.histories, target)
        in_all = values(histories, lambda history: sent(history) / MEGA)
        cells = [
            f"{entry.lr:g}",
            fixed(cost.rounds),
            fixed(cost.bytes / MEGA),
            mean_and_spread(values(histories, lambda history: 100 * history.best(optional=True)), spread="±"),
            mean_and_spread(values(histories, lambda history: 100 * history.last(optional=True)), spread="±"),
            fixed(sum(in_all) / len(in_all)) if in_all else NONE,
        ]
        shown = [
            cell.replace("±", symbols.spread).replace(NEVER, symbols.never).replace(NONE, symbols.none)
            for heading, cell in zip(COLUMNS, cells, strict=True)
            if heading not in left_out
        ]
        made.add_row(escape(shown_name(entry.name, entry.title)), *shown)
    return made


def picture(entries: list[Entry], path: str | Path | BinaryIO, title: str) -> Figure:
    """Test accuracy against rounds and against megabytes sent, with the spread over seeds; saved to `path`."""
    several_seeds = any(len(entry.histories) > 1 for entry in entries)
    with matplotlib.rc_context(STYLE):
        long_legend = len(entries) > LEGEND_INSIDE_UP_TO
        figure = Figure(figsize=(13 if long_legend else 10, 4.2), layout="constrained")
        against_rounds, against_bytes = figure.subplots(1, 2, sharey=True)
        for index, entry in enumerate(entries):
            label = f"{entry.title}, {written(entry.settings)}"
            draw(against_rounds, entry.histories, ACCURACY, "round", label, index, 1)
            draw(against_bytes, entry.histories, ACCURACY, "bytes", label, index, MEGA)
        for axes, name in ((against_rounds, "round"), (against_bytes, "megabytes sent, both directions")):
            axes.set_xlabel(name)
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
        against_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
        against_rounds.set_ylabel(ACCURACY.title)
        handles, labels = against_rounds.get_legend_handles_labels()
        if handles:
            key = "mean; band: min to max over seeds" if several_seeds else ""
            style = {"fontsize": 9, "title": key, "title_fontsize": 8, "edgecolor": "none", "framealpha": 0.8}
            if long_legend:
                figure.legend(handles, labels, loc="outside right center", **style)
            else:
                against_rounds.legend(handles, labels, loc="lower right", **style)
        figure.suptitle(title, fontsize=11)
        save_picture(figure, path)
    return figure
