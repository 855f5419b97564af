"""Figures for papers, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from lamina.data.picture import partition_picture
from lamina.experiment.outputs import write_output
from lamina.history import History
from lamina.report.curves import Curve
from lamina.report.partition import Dealt
from lamina.report.rates import Response, metrics_in
from lamina.report.tables import unit_of_bytes

# Okabe & Ito's colours, which colour-blind readers can tell apart; when they are used up, dashes tell more lines apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
# of a rate that did not run to its end: whether it was pruned, then its mark and what a reader is told
MARKS = {False: ("x", "cross: diverged or not finished"), True: ("v", "triangle: pruned")}
LEGEND_INSIDE_UP_TO = 6  # entries; a longer legend would hide the curves
MOST_RATE_LABELS = 7  # beside each other below a figure of this width
FORMATS = ("pdf", "svg", "png")
MARK = "lamina report"  # in a figure's metadata: an earlier figure of ours may be replaced
# without a date the same figure is the same file
METADATA: dict[str, dict[str, str | None]] = {
    "pdf": {"Creator": MARK, "CreationDate": None},
    "svg": {"Creator": MARK, "Date": None},
    "png": {"Software": MARK},
}
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # letters stay letters, as many journals ask
    "svg.fonttype": "none",
    "svg.hashsalt": "lamina",  # the same figure is the same file
}


class Metric(NamedTuple):
    """A column of a history as it is drawn."""

    column: str
    title: str
    percent: bool = False


METRICS = (
    Metric("accuracy", "test accuracy, %", True),
    Metric("loss", "test loss"),
    Metric("train_loss", "training loss"),
    Metric("consistency", "consistency ‖y − x⁺‖²"),
    Metric("update_norm", "update norm ‖x⁺ − x‖"),
    Metric("client_accuracy", "accuracy on the clients' data, mean, %", True),
    Metric("client_accuracy_worst10", "accuracy on the clients' data, worst 10 %, %", True),
    Metric("client_accuracy_std", "accuracy on the clients' data, std, %", True),
)
# columns that say how a round went, not how good it was
NOT_DRAWN = {"round", "clients", "steps", "bytes_down", "bytes_up", "paper_bytes", "seconds", "evaluation_seconds"}


def metrics_of(curves: Sequence[Curve]) -> list[Metric]:
    """What the histories hold: the usual metrics in their order, then any others by their column's name."""
    columns = dict.fromkeys(c for curve in curves for history in curve.histories for c in history.columns)
    scheduled = any(
        len(set(history.column("lr", optional=True))) > 1 for curve in curves for history in curve.histories
    )
    hidden = NOT_DRAWN | (set() if scheduled else {"lr"})
    usual = [metric for metric in METRICS if metric.column in columns]
    if all(run.on_validation_data for curve in curves for run in curve.runs):
        usual = [metric._replace(title=metric.title.replace("test", "validation")) for metric in usual]
    known = {metric.column for metric in METRICS} | hidden
    return usual + [Metric(column, column.replace("_", " ")) for column in columns if column not in known]


# --- one line and its band ---------------------------------------------------------------------------------------


def look(index: int) -> dict[str, Any]:
    """Colour and dashes of the line with this number."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def by_round(histories: Sequence[History], column: str) -> NDArray[np.float64]:
    """[seeds, rounds]: a column of every history, NaN after its end."""
    values = np.full((len(histories), max(len(history) for history in histories)), np.nan)
    for row, history in zip(values, histories, strict=True):
        row[: len(history)] = history.column(column, optional=True)
    return values


def spent(histories: Sequence[History], axis: str) -> NDArray[np.float64]:
    """[seeds, rounds]: rounds, bytes in both directions or seconds of training since the start."""
    if axis == "round":
        return np.cumsum(np.where(np.isnan(by_round(histories, "round")), np.nan, 1.0), axis=1)
    if axis == "seconds":
        return np.cumsum(by_round(histories, "seconds"), axis=1)
    return np.cumsum(by_round(histories, "bytes_down") + by_round(histories, "bytes_up"), axis=1)


def mean_spent(histories: Sequence[History], axis: str) -> NDArray[np.float64]:
    """[rounds]: the mean over seeds, round by round, so that it grows even where a seed drops out."""
    each = np.diff(spent(histories, axis), axis=1, prepend=0.0)
    return np.cumsum(mean_of_seen(each))


def mean_of_seen(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[rounds]: the mean over the seeds that have a value; NaN, without a warning, where none has."""
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0.0).sum(axis=0)
    means = np.full(total.shape, np.nan)
    np.divide(total, seen.sum(axis=0), out=means, where=seen.any(axis=0))
    return means


def draw(
    axes: Axes, histories: Sequence[History], metric: Metric, axis: str, label: str, index: int, unit: float
) -> None:
    """The mean over seeds as a line, minimum to maximum as a band.

    Every statistic of a round is over the seeds that got there: one that diverged does not cut the others short.
    """
    values = by_round(histories, metric.column) * (100 if metric.percent else 1)
    drawn = ~np.isnan(values).all(axis=0)  # rounds that some seed reached and evaluated
    if not drawn.any():  # every seed diverged at once: named in the table, nothing to draw
        return
    seen, x = values[:, drawn], mean_spent(histories, axis)[drawn] / unit
    marker = "o" if drawn.sum() == 1 else ""  # a line of one point would not be seen
    axes.fill_between(
        x, np.nanmin(seen, axis=0), np.nanmax(seen, axis=0), color=look(index)["color"], alpha=0.15, linewidth=0
    )
    axes.plot(x, mean_of_seen(seen), linewidth=1.8, label=label, marker=marker, **look(index))


# --- whole figures -----------------------------------------------------------------------------------------------


def curve_figure(curves: Sequence[Curve], metric: Metric, axis: str) -> Figure:
    """One metric against rounds, bytes or seconds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        unit = unit_of_bytes(curves)
        for index, curve in enumerate(curves):
            if any(curve.histories):
                scale = unit.bytes if axis == "bytes" else 1.0
                draw(axes, curve.histories, metric, axis, curve.label, index, scale)
        axes.set_xlabel(axis_title(axis, unit.name))
        axes.set_ylabel(metric.title)
        if not metric.percent and _spans_decades(axes):
            axes.set_yscale("log")
        if axis == "round":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, axes)
    return figure


def axis_title(axis: str, unit: str) -> str:
    """What the horizontal axis shows."""
    return {"round": "round", "bytes": f"{unit} sent, both directions", "seconds": "seconds of training"}[axis]


def rates_figure(found: Sequence[Response]) -> Figure:
    """Best accuracy or loss against learning rate; the best rate and those that did not run to their end are marked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for index, response in enumerate(found):
            style, scale = look(index), 100 if response.metric == "accuracy" else 1
            ran = [tried for tried in response.tried if not math.isnan(tried.mean)]
            finished = [tried for tried in ran if not tried.failed]
            for tried in ran:
                best = [scale * value for value in tried.best]
                axes.plot([tried.lr] * 2, [min(best), max(best)], color=style["color"], linewidth=1)
                if tried.failed:
                    mark = MARKS[tried.failed == "pruned"][0]
                    axes.plot(tried.lr, scale * tried.mean, mark, color=style["color"])
            axes.plot(
                [tried.lr for tried in finished],
                [scale * tried.mean for tried in finished],
                marker="o",
                markersize=4,
                label=response.label,
                **(style if response.joined else {**style, "linestyle": "none"}),
            )
            for tried in finished:
                if tried.lr == response.chosen:
                    axes.plot(
                        tried.lr, scale * tried.mean, "o", markersize=10, markerfacecolor="none", color=style["color"]
                    )
        axes.set_xscale("log")
        rates = rates_to_label([tried.lr for response in found for tried in response.tried])
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        kinds = sorted({tried.failed == "pruned" for response in found for tried in response.tried if tried.failed})
        axes.set_xlabel(f"learning rate ({'; '.join([*(MARKS[kind][1] for kind in kinds), 'ring: best'])})")
        axes.set_ylabel(f"best {' or '.join(dict.fromkeys(response.on for response in found))} {metrics_in(found)}")
        _finish(figure, axes)
    return figure


def rates_to_label(rates: Sequence[float]) -> list[float]:
    """Return the rates that have room for a label on a logarithmic axis: both ends, and others that keep apart.

    >>> rates_to_label([0.1, 0.101, 0.001, 0.01, 0.01]), rates_to_label([])
    ([0.001, 0.01, 0.101], [])
    """
    every = sorted(set(rates))
    if len(every) < 3:
        return every
    apart = (math.log(every[-1]) - math.log(every[0])) / MOST_RATE_LABELS
    kept = every[:1]
    for rate in every[1:-1]:
        if min(math.log(rate) - math.log(kept[-1]), math.log(every[-1]) - math.log(rate)) >= apart:
            kept.append(rate)
    return [*kept, every[-1]]


def save_figures(
    folder: Path, curves: Sequence[Curve], found: Sequence[Response], dealt: Sequence[Dealt]
) -> list[Path]:
    """Every figure as PDF, SVG and PNG; returns the files."""
    files: list[Path] = []
    metrics = metrics_of(curves)
    for metric in metrics:
        # what it costs to get there is asked of the first metric: accuracy, or the loss where there is none
        for axis in ("round", "bytes", "seconds") if metric is metrics[0] else ("round",):
            name = f"{_file_name(metric.column)}-by-{axis}"
            files += _save(curve_figure(curves, metric, axis), folder / name)
    if found:
        files += _save(rates_figure(found), folder / "learning-rates")
    for number, one in enumerate(dealt, 1):
        figure = partition_picture(one.parts, one.labels, title=one.title)
        files += _save(figure, folder / (f"partition-{number}" if len(dealt) > 1 else "partition"))
    return files


def _finish(figure: Figure, axes: Axes) -> None:
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    labels = [label.replace("$", r"\$") for label in labels]  # matplotlib would set it as mathematics
    if len(handles) > LEGEND_INSIDE_UP_TO or any(len(label) > 30 for label in labels):
        figure.set_size_inches(5.2, 3.4 + 0.19 * len(handles))
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False)
    elif handles:
        axes.legend(handles, labels, fontsize=8, edgecolor="none", framealpha=0.8)


def _spans_decades(axes: Axes) -> bool:
    """Whether the lines, all positive, cover more than two decades, which a linear axis would flatten."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.ones(1)])
    return bool(values.min() > 0 and values.max() > 100 * values.min())


def _file_name(column: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", column).strip("-")


def _save(figure: Figure, stem: Path) -> Iterator[Path]:
    for ending in FORMATS:
        path = stem.with_name(f"{stem.name}.{ending}")
        image = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure.savefig(image, format=ending, dpi=300, metadata=METADATA[ending])
        write_output(
            path,
            image.getvalue(),
            is_ours=lambda ends: MARK.encode() in ends,
            kind="figure of a report",
            option="--figures",
        )
        yield path
