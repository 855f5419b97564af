"""A comparison as a table and as a picture."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from lamina.experiment.compare import Entry

MEGA = 1e6
# Okabe & Ito's colours, which colour-blind readers can tell apart; grey for the seventh and later ones
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")


def table(entries: list[Entry], target: float) -> Table:
    """Rounds and megabytes to the target, best and last accuracy, megabytes in all."""
    seeds = max(len(entry.histories) for entry in entries)
    made = Table(
        title=f"mean ± std of {seeds} seed{'s' if seeds > 1 else ''}; target: test accuracy {target:.0%}",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("algorithm", no_wrap=True)
    for heading in ("lr", "rounds\nto target", "MB to\ntarget", "best\nacc. %", "last\nacc. %", "MB\nin all"):
        made.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        best, best_spread = entry.values(lambda h: h.best("accuracy"))
        last, last_spread = entry.values(lambda h: h.last("accuracy"))
        total, _ = entry.values(lambda h: h.total("bytes_down") + h.total("bytes_up"))
        made.add_row(
            entry.title,
            f"{entry.lr:g}",
            number(entry.rounds_to(target), 1),
            number(entry.bytes_to(target) / MEGA, 1),
            f"{100 * best:.1f}±{100 * best_spread:.1f}",
            f"{100 * last:.1f}±{100 * last_spread:.1f}",
            number(total / MEGA, 1),
        )
    return made


def number(value: float, digits: int) -> str:
    """A number for a table; never reached is the infinity sign."""
    return "∞" if math.isinf(value) else "–" if math.isnan(value) else f"{value:.{digits}f}"


def picture(entries: list[Entry], path: str | Path, title: str) -> Figure:
    """Test accuracy against rounds and against megabytes sent, with the spread over seeds; saved to `path`."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        against_rounds, against_bytes = figure.subplots(1, 2, sharey=True)
        for i, entry in enumerate(entries):
            colour = COLOURS[min(i, len(COLOURS) - 1)]
            length = min(len(history) for history in entry.histories)
            if length == 0:  # diverged in round 1: named in the table, nothing to draw
                continue
            curves = 100 * np.array([history.column("accuracy")[:length] for history in entry.histories])
            first = entry.histories[0][:length]
            sent = np.cumsum(np.array(first.column("bytes_down")) + np.array(first.column("bytes_up"))) / MEGA
            drawn = ~np.isnan(curves).any(axis=0)  # rounds that were evaluated
            for axes, x in ((against_rounds, np.array(first.column("round"))), (against_bytes, sent)):
                low, high = curves.min(axis=0), curves.max(axis=0)
                axes.fill_between(x[drawn], low[drawn], high[drawn], color=colour, alpha=0.15, linewidth=0)
                label = f"{entry.title}, lr {entry.lr:g}"
                axes.plot(x[drawn], curves.mean(axis=0)[drawn], color=colour, linewidth=1.8, label=label)
        for axes, name in ((against_rounds, "round"), (against_bytes, "megabytes sent, both directions")):
            axes.set_xlabel(name)
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
        against_rounds.set_ylabel("test accuracy, %")
        against_rounds.legend(frameon=False, fontsize=9, loc="lower right")
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=150)
    return figure
