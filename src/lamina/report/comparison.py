"""Show a comparison as a table on the terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.markup import escape
from rich.table import Table

from lamina.data.picture import save_picture
from lamina.experiment.settings import shown_name, written
from lamina.experiment.trials import Trial
from lamina.report.figures import LEGEND_INSIDE_UP_TO, METRICS, STYLE, draw
from lamina.report.tables import NEVER, NONE, best_and_last, cost_to_target, fixed, metric_of, sent, values
from lamina.text import plural

MEGA = 1e6
COLUMNS = ("lr", "rounds\nto target", "MB to\ntarget", "best", "last", "MB\nin all")
OF_TARGET = COLUMNS[1:3]
LEFT_OUT_FIRST = ("MB\nin all", "last", "MB to\ntarget", "lr")  # where the terminal is too narrow for all


ASCII = str.maketrans({"±": "+-", NEVER: "inf", NONE: "-"})  # for terminals without these characters


def table(entries: list[Trial], target: float | None, left_out: Sequence[str] = (), ascii_only: bool = False) -> Table:
    """Return rounds and megabytes to a target, best and last accuracy or loss, and megabytes in all.

    Args:
        entries: the algorithms, a row each.
        target: test accuracy, or loss where there is no accuracy; None leaves its columns out.
        left_out: headings of columns that are not shown.
        ascii_only: write signs such as ± in ASCII.
    """
    metric = metric_of(history for entry in entries for history in entry.histories)
    shown_target = "" if target is None else f"; target: test {metric} "
    if target is not None:
        shown_target += f"{target:.0%}" if metric == "accuracy" else f"{target:g}"
    left_out = [*left_out, *(OF_TARGET if target is None else ())]
    seeds = max(len(entry.histories) for entry in entries)
    to_terminal = ASCII if ascii_only else {}
    spread = f"mean ± std of {seeds} seeds".translate(to_terminal) if seeds > 1 else plural(seeds, "seed")
    shown_table = Table(title=f"{spread}{shown_target}", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown_table.add_column("algorithm", overflow="fold")
    for heading in COLUMNS:
        if heading not in left_out:
            unit = {"accuracy": "\nacc. %", "loss": "\nloss"}[metric] if heading in ("best", "last") else ""
            shown_table.add_column(heading + unit, justify="right", no_wrap=True)
    for entry in entries:
        histories, cost = entry.histories, cost_to_target(entry.histories, target or math.inf, metric)
        in_all = values(histories, lambda history: sent(history) / MEGA)
        cells = [
            f"{entry.lr:g}",
            fixed(cost.rounds),
            fixed(cost.bytes / MEGA),
            *best_and_last(histories, metric, spread="±"),
            fixed(sum(in_all) / len(in_all)) if in_all else NONE,
        ]
        shown = [
            cell.translate(to_terminal) for heading, cell in zip(COLUMNS, cells, strict=True) if heading not in left_out
        ]
        shown_table.add_row(escape(shown_name(entry.name, entry.title)), *shown)
    return shown_table


def picture(entries: list[Trial], path: str | Path | BinaryIO, title: str) -> Figure:
    """Draw test accuracy (or loss) against rounds and megabytes sent, with the spread over seeds; save it to `path`."""
    column = metric_of(history for entry in entries for history in entry.histories)
    metric = next(metric for metric in METRICS if metric.column == column)
    several_seeds = any(len(entry.histories) > 1 for entry in entries)
    with matplotlib.rc_context(STYLE):
        long_legend = len(entries) > LEGEND_INSIDE_UP_TO
        figure = Figure(figsize=(13 if long_legend else 10, 4.2), layout="constrained")
        against_rounds, against_bytes = figure.subplots(1, 2, sharey=True)
        for index, entry in enumerate(entries):
            label = f"{entry.title}, {written(entry.settings)}"
            draw(against_rounds, entry.histories, metric, "round", label, index, 1)
            draw(against_bytes, entry.histories, metric, "bytes", label, index, MEGA)
        for axes, name in ((against_rounds, "round"), (against_bytes, "megabytes sent, both directions")):
            axes.set_xlabel(name)
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
        against_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
        against_rounds.set_ylabel(metric.title)
        handles, labels = against_rounds.get_legend_handles_labels()
        if handles:
            key = "mean; band: min to max over seeds" if several_seeds else ""
            style = {"fontsize": 9, "title": key, "title_fontsize": 8, "edgecolor": "none", "framealpha": 0.8}
            if long_legend:
                figure.legend(handles, labels, loc="outside right center", **style)
            else:
                empty_corner = "lower right" if metric.percent else "upper right"
                against_rounds.legend(handles, labels, loc=empty_corner, **style)
        figure.suptitle(title, fontsize=11)
        save_picture(figure, path)
    return figure
