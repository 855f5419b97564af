"""A comparison as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich import box
from rich.markup import escape
from rich.table import Table

from lamina.errors import BadInput
from lamina.experiment.compare import Entry
from lamina.history import History

MEGA = 1e6
# Okabe & Ito's colours, which colour-blind readers can tell apart; when they are used up, dashes tell more lines apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
LEGEND_INSIDE_UP_TO = 6  # entries; a longer legend would hide the curves


class Symbols(NamedTuple):
    """Characters of the table that not every terminal can show."""

    spread: str = "±"
    never: str = "∞"
    none: str = "–"


ASCII = Symbols("+-", "inf", "-")


def table(entries: list[Entry], target: float, symbols: Symbols = Symbols()) -> Table:  # noqa: B008 (immutable)
    """Rounds and megabytes to the target, best and last accuracy, megabytes in all."""
    seeds = max(len(entry.histories) for entry in entries)
    spread = f"mean {symbols.spread} std of {seeds} seeds" if seeds > 1 else "1 seed"
    made = Table(
        title=f"{spread}; target: test accuracy {target:.0%}", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    made.add_column("algorithm", overflow="fold")
    for heading in ("lr", "rounds\nto target", "MB to\ntarget", "best\nacc. %", "last\nacc. %", "MB\nin all"):
        made.add_column(heading, justify="right", no_wrap=True)

    def mean(values: list[float], digits: int = 1) -> str:
        return number(statistics.fmean(values) if values else math.nan, digits, symbols)

    def mean_and_spread(percent: list[float]) -> str:
        return mean(percent) + (f"{symbols.spread}{statistics.stdev(percent):.1f}" if len(percent) > 1 else "")

    for entry in entries:
        made.add_row(
            escape(entry.name),
            f"{entry.lr:g}",
            number(entry.rounds_to(target), 1, symbols),
            number(entry.bytes_to(target) / MEGA, 1, symbols),
            mean_and_spread(entry.values(lambda history: 100 * history.best("accuracy"))),
            mean_and_spread(entry.values(lambda history: 100 * history.last("accuracy"))),
            mean(entry.values(lambda history: (history.total("bytes_down") + history.total("bytes_up")) / MEGA)),
        )
    return made


def number(value: float, digits: int, symbols: Symbols) -> str:
    """A number for a table; never reached is the infinity sign."""
    return symbols.never if math.isinf(value) else symbols.none if math.isnan(value) else f"{value:.{digits}f}"


def picture(entries: list[Entry], path: str | Path, title: str) -> Figure:
    """Test accuracy against rounds and against megabytes sent, with the spread over seeds; saved to `path`."""
    several_seeds = any(len(entry.histories) > 1 for entry in entries)
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        long_legend = len(entries) > LEGEND_INSIDE_UP_TO
        figure = Figure(figsize=(13 if long_legend else 10, 4.2), layout="constrained")
        against_rounds, against_bytes = figure.subplots(1, 2, sharey=True)
        for i, entry in enumerate(entries):
            look = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}
            accuracy = 100 * by_round(entry.histories, "accuracy")
            sent = by_round(entry.histories, "bytes_down") + by_round(entry.histories, "bytes_up")
            drawn = ~np.isnan(accuracy).all(axis=0)  # rounds that some seed reached and evaluated
            if not drawn.any():  # every seed diverged at once: named in the table, nothing to draw
                continue
            # Every statistic of a round is over the seeds that got there: one that diverged does not cut the others.
            seen = accuracy[:, drawn]
            megabytes = np.cumsum(np.nanmean(sent, axis=0)) / MEGA
            rounds = np.arange(1, accuracy.shape[1] + 1)
            look["marker"] = "o" if drawn.sum() == 1 else ""  # a line of one point would not be seen
            for axes, x in ((against_rounds, rounds[drawn]), (against_bytes, megabytes[drawn])):
                low, high = np.nanmin(seen, axis=0), np.nanmax(seen, axis=0)
                axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
                axes.plot(x, np.nanmean(seen, axis=0), linewidth=1.8, label=f"{entry.title}, lr {entry.lr:g}", **look)
        for axes, name in ((against_rounds, "round"), (against_bytes, "megabytes sent, both directions")):
            axes.set_xlabel(name)
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
        against_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
        against_rounds.set_ylabel("test accuracy, %")
        handles, labels = against_rounds.get_legend_handles_labels()
        if handles:
            key = "mean; band: min to max over seeds" if several_seeds else ""
            style = {"fontsize": 9, "title": key, "title_fontsize": 8, "edgecolor": "none", "framealpha": 0.8}
            if long_legend:
                figure.legend(handles, labels, loc="outside right center", **style)
            else:
                against_rounds.legend(handles, labels, loc="lower right", **style)
        figure.suptitle(title, fontsize=11)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise BadInput(f"cannot save the picture as '{path}': {error.strerror or error}") from error
    return figure


def by_round(histories: list[History], column: str) -> NDArray[np.float64]:
    """[seeds, rounds]: a column of every history, NaN after its end."""
    values = np.full((len(histories), max(len(history) for history in histories)), np.nan)
    for row, history in zip(values, histories, strict=True):
        row[: len(history)] = history.column(column)
    return values
