"""Draw the figures of comparisons and reports with matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from lamina.data.drawing import partition_picture
from lamina.experiment.trials.settings import written
from lamina.experiment.trials.trial import Trial
from lamina.report.build import Report
from lamina.report.frontier import Frontier, Point, noise_free, pareto
from lamina.report.rates import Response, drawn_scores, metrics_in
from lamina.report.tables import CLOCK, MEGABYTES, Unit, has_clock, metric_of, significant, unit_of_bytes
from lamina.training.history import History, mean, score_key
from lamina.training.metrics import is_metric, is_percent, with_unit

# Okabe & Ito's colours, which colour-blind readers can tell apart; more lines than colours differ in their dashes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^Dv<>PX*hpd8"
MOST_PANELS_IN_A_ROW, MOST_PANEL_LABELS = 3, 5
LEGEND_INSIDE_UP_TO = 6  # entries; a longer legend would hide the curves
MOST_RATE_LABELS = 7  # below a figure of this width
MOST_ROUNDS_DRAWN = 1000  # of a curve
FORMATS = ("pdf", "svg", "png")
MARK = "lamina report"  # in the metadata of a figure, which may then be replaced
# Without a date, the same figure is the same file.
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


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=100)
        return image.getvalue()


class Metric(NamedTuple):
    """A column of a history as it is drawn."""

    column: str
    title: str
    percent: bool


# Columns that are drawn after the metrics, in this order, and whose title is not their name.
TITLES = {
    "train_loss": "training loss",
    "consistency": "consistency ‖y − x⁺‖²",
    "update_norm": "update norm ‖x⁺ − x‖",
    "client_accuracy": "accuracy on the clients' data, mean, %",
    "client_accuracy_worst10": "accuracy on the clients' data, worst 10 %, %",
    "client_accuracy_std": "accuracy on the clients' data, std, %",
    "gradient_squared_norm": "squared gradient ‖∇F(z)‖²",
    "scaled_gradient_squared_norm": "scaled squared gradient ‖∇F(z)/v^¼‖²",
    "pseudo_gradient_gap": "pseudo-gradient gap",
    "pseudo_gradient_cosine": "pseudo-gradient cosine",
    "drift": "drift ‖y − x‖², mean over local steps",
    "extrapolation": "extrapolation ‖z − x⁺‖²",
}
# Columns that do not measure the quality of a model.
NOT_DRAWN = {
    "round", "clients", "steps", "bytes_down", "bytes_up", "paper_bytes", "seconds", "evaluation_seconds",
    "clock_seconds",
}  # fmt: skip


def metrics_of(curves: Sequence[Trial]) -> list[Metric]:
    """Return the metrics of the curves: the usual ones in their order, then others by their column's name."""
    histories = [history for curve in curves for history in curve.histories]
    columns = dict.fromkeys(column for history in histories for column in history.columns)
    scheduled = any(len(np.unique(history.array("lr", optional=True))) > 1 for history in histories)
    hidden = NOT_DRAWN | (set() if scheduled else {"lr"})
    listed = [metric_of(curves), *filter(is_metric, columns), *TITLES]
    usual = [described(column) for column in dict.fromkeys(listed) if column in columns]
    if all(run.on_validation_data for curve in curves for run in curve.records):
        usual = [metric._replace(title=metric.title.replace("test", "validation")) for metric in usual]
    return usual + [described(column) for column in columns if column not in {*listed, *hidden}]


def described(column: str) -> Metric:
    """Return how a column is drawn."""
    title = ("test " if is_metric(column) else "") + with_unit(column).replace("_", " ")
    return Metric(column, TITLES.get(column, title), is_percent(column))


# --- one line and its band ---------------------------------------------------------------------------------------


def look(index: int) -> dict[str, Any]:
    """Return colour and dashes of the line with this number."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def by_round(histories: Sequence[History], column: str) -> NDArray[np.float64]:
    """Return [seeds, rounds]: a column of every history, NaN after its end."""
    values = np.full((len(histories), max(len(history) for history in histories)), np.nan)
    for row, history in zip(values, histories, strict=True):
        row[: len(history)] = history.array(column, optional=True)
    return values


@np.errstate(over="ignore")
def spent(histories: Sequence[History], axis: str) -> NDArray[np.float64]:
    """Return [seeds, rounds]: rounds, bytes in both directions, seconds of training or of a clock since the start."""
    if axis in ("round", CLOCK):
        return by_round(histories, axis)
    columns = ("bytes_down", "bytes_up") if axis == "bytes" else (axis,)
    each: NDArray[np.float64] = np.sum([by_round(histories, column) for column in columns], axis=0)
    return np.cumsum(each, axis=1)


@np.errstate(over="ignore", invalid="ignore")
def mean_spent(histories: Sequence[History], axis: str) -> NDArray[np.float64]:
    """Return [rounds]: the mean over seeds, summed round by round, so that it grows even where a seed ends."""
    return np.cumsum(mean_of_seen(np.diff(spent(histories, axis), axis=1, prepend=0.0)))


@np.errstate(over="ignore", invalid="ignore")
def mean_of_seen(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [rounds]: the mean over the seeds that have a value; NaN, without a warning, where none has."""
    means: NDArray[np.float64] = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return means


def thinned(rounds: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return at most `MOST_ROUNDS_DRAWN` of some rounds, evenly spaced, with the first and the last."""
    if len(rounds) <= MOST_ROUNDS_DRAWN:
        return rounds
    kept: NDArray[np.intp] = rounds[np.linspace(0, len(rounds) - 1, MOST_ROUNDS_DRAWN).astype(int)]
    return kept


def draw(axes: Axes, lines: Iterable[tuple[str, Sequence[History]]], metric: Metric, axis: str, unit: Unit) -> None:
    """Draw every line, a label and a history per seed: the mean, and a band from the minimum to the maximum."""
    for index, (label, histories) in enumerate(lines):
        draw_line(axes, histories, metric, axis, label, index, unit.bytes if axis == "bytes" else 1)
    axes.set_xlabel(axis_title(axis, unit.name))
    axes.grid(alpha=0.25)
    if axis == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(metric.title)


def draw_line(
    axes: Axes, histories: Sequence[History], metric: Metric, axis: str, label: str, index: int, unit: float
) -> None:
    """Draw the mean over seeds as a line, minimum to maximum as a band.

    Every round is averaged over the seeds that reached it: one that diverged does not cut the others short.
    """
    values = by_round(histories, metric.column) * (100 if metric.percent else 1)
    drawn = thinned(np.flatnonzero(~np.isnan(values).all(axis=0)))  # rounds that some seed reached and evaluated
    if not len(drawn):  # every seed diverged at once: only the table names them
        return
    seen, x = values[:, drawn], mean_spent(histories, axis)[drawn] / unit
    marker = "o" if len(drawn) == 1 else ""  # a line of one point is invisible
    style = look(index)
    low, high = np.nanmin(seen, axis=0), np.nanmax(seen, axis=0)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(x, mean_of_seen(seen), linewidth=1.8, label=label, marker=marker, **style)


# --- whole figures -----------------------------------------------------------------------------------------------


@matplotlib.rc_context(STYLE)
def curve_figure(curves: Sequence[Trial], metric: Metric, axis: str) -> Figure:
    """Draw one metric against rounds, bytes, seconds of training or of a clock."""
    figure = Picture(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    draw(axes, [(curve.name, curve.histories) for curve in curves], metric, axis, unit_of_bytes(curves))
    axes.set_ylabel(metric.title)
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.ones(1)])
    if not metric.percent and drawn.min() > 0 and drawn.max() > 100 * drawn.min():
        axes.set_yscale("log")
    _add_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def comparison_figure(entries: Sequence[Trial], title: str) -> Figure:
    """Draw the first metric on the test data against rounds and megabytes sent, with the spread over seeds."""
    metric = described(metric_of(entries))
    lines = [(f"{entry.title}, {written(entry.settings)}", entry.histories) for entry in entries]
    figure = Picture(figsize=(10, 4.2), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 2, sharey=True), ("round", "bytes"), strict=True):
        draw(axes, lines, metric, axis, MEGABYTES)
        axes.set_xlim(left=0)
    has_band = any(len(entry.histories) > 1 for entry in entries)
    _add_legend(figure, figure.axes[0], "mean; band: min to max over seeds" if has_band else "")
    figure.suptitle(title, fontsize=11)
    return figure


def axes_of(curves: Sequence[Trial]) -> list[str]:
    """Return what metrics are drawn against."""
    return ["round", "bytes", "seconds", *([CLOCK] if has_clock(curves) else [])]


def axis_title(axis: str, unit: str) -> str:
    """Return the title of the horizontal axis."""
    titles = {"seconds": "seconds of training", CLOCK: "seconds on the clock's network"}
    return {"round": "round", "bytes": f"{unit} sent, both directions", **titles}[axis]


@matplotlib.rc_context(STYLE)
def rates_figure(responses: Sequence[Response]) -> Figure:
    """Draw the final score against the learning rate; mark the best rate and those without a finished run."""
    figure = Picture(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for index, response in enumerate(responses):
        _draw_response(axes, response, look(index))
    tried = [one for response in responses for one in response.tried]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(rates_to_label([rate for rate, _ in tried])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    remarks = dict.fromkeys(trial.remark for _, trial in tried if trial.remark)
    crosses = f"; cross: {' or '.join(remarks)}" if remarks else ""
    axes.set_xlabel(f"learning rate (ring: best{crosses})")
    axes.set_ylabel(f"final {' or '.join(dict.fromkeys(one.on for one in responses))} {metrics_in(responses)}")
    axes.grid(alpha=0.25)
    _add_legend(figure, axes)
    return figure


def _draw_response(axes: Axes, response: Response, style: dict[str, Any]) -> None:
    scale, colour = 100 if is_percent(response.metric) else 1, style["color"]
    finished = []
    for rate, trial in response.tried:
        finals = drawn_scores(trial)
        if not finals:
            continue
        score = scale * mean(finals)
        axes.plot([rate] * 2, [scale * min(finals), scale * max(finals)], color=colour, linewidth=1)
        if trial.remark:
            axes.plot(rate, score, "x", color=colour)
            continue
        finished.append((rate, score))
        if rate == response.chosen:
            axes.plot(rate, score, "o", markersize=10, markerfacecolor="none", color=colour)
    line = style if response.joined else {**style, "linestyle": "none"}
    rates, scores = [rate for rate, _ in finished], [score for _, score in finished]
    axes.plot(rates, scores, marker="o", markersize=4, label=response.label, **line)


def rates_to_label(rates: Sequence[float], most: int = MOST_RATE_LABELS) -> list[float]:
    """Return the rates that have room for a label on a logarithmic axis: both ends, and others between.

    >>> rates_to_label([0.1, 0.101, 0.001, 0.01, 0.01]), rates_to_label([])
    ([0.001, 0.01, 0.101], [])
    """
    every = sorted(set(rates))
    if len(every) < 3:
        return every
    apart = (math.log(every[-1]) - math.log(every[0])) / most
    kept = every[:1]
    for rate in every[1:-1]:
        if min(math.log(rate) - math.log(kept[-1]), math.log(every[-1]) - math.log(rate)) >= apart:
            kept.append(rate)
    return [*kept, every[-1]]


@matplotlib.rc_context(STYLE)
def frontier_figure(frontier: Frontier) -> Figure:
    """Draw the final values against bytes, seconds on every clock and ε: a colour for a method, a marker for a codec.

    A line joins the points of a method that none of its others beats.
    """
    unit = unit_of_bytes([point.trial for point in frontier.points])
    points = [point for point in frontier.points if not math.isnan(point.score)]
    panels: list[tuple[str, list[tuple[Point, float]]]] = []  # the title, and points with their costs
    open_points = noise_free(points)
    panels.append((f"{unit.name} sent, both directions", [(each, each.bytes / unit.bytes) for each in open_points]))
    panels += [
        (f"seconds in all, {clock}", [(each, each.seconds[clock]) for each in open_points]) for clock in frontier.clocks
    ]
    if frontier.has_noise:
        panels.append(("ε: smaller is safer", [(each, each.epsilon) for each in points if math.isfinite(each.epsilon)]))
    columns = min(len(panels), MOST_PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    figure = Picture(figsize=(1.2 + 3.6 * columns, 0.4 + 3 * rows), layout="constrained")
    places = np.ravel(figure.subplots(rows, columns, squeeze=False))
    methods = list(dict.fromkeys(point.method for point in frontier.points))
    channels = list(dict.fromkeys(point.channel for point in frontier.points))
    for axes, (title, costs) in zip(places, panels, strict=False):
        for index, method in enumerate(methods):
            points_of_method = [(point, cost) for point, cost in costs if point.method == method]
            _draw_frontier(axes, points_of_method, frontier.metric, COLOURS[index % len(COLOURS)], channels)
        axes.set_xscale("log")
        ticks = rates_to_label([cost for _, cost in costs], most=MOST_PANEL_LABELS)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
        axes.minorticks_off()
        axes.set_xlabel(title)
        axes.grid(alpha=0.25)
    for axes in places[1 : 1 + len(frontier.clocks)]:
        axes.sharey(places[0])
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    for axes in places[::columns]:
        axes.set_ylabel(f"final {with_unit(frontier.metric)}")
    keys = [Line2D([], [], color=COLOURS[i % len(COLOURS)], label=method) for i, method in enumerate(methods)]
    style: Any = {"color": "#444444", "linestyle": "none"}
    keys += [Line2D([], [], marker=_marker(channels, channel), label=channel, **style) for channel in channels]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_frontier(
    axes: Axes, costs: Sequence[tuple[Point, float]], metric: str, colour: str, channels: list[str]
) -> None:
    """Draw the points of a method, and a line through those that none of its others beats."""
    scale = 100 if is_percent(metric) else 1
    kept = pareto([(-score_key(point.score, metric), cost) for point, cost in costs])
    line = sorted((cost, scale * point.score) for (point, cost), is_kept in zip(costs, kept, strict=True) if is_kept)
    axes.plot([cost for cost, _ in line], [score for _, score in line], color=colour, linewidth=1.4)
    for (point, cost), is_kept in zip(costs, kept, strict=True):
        style: Any = {"color": colour, "alpha": 1.0 if is_kept else 0.4}
        axes.plot(cost, scale * point.score, marker=_marker(channels, point.channel), **style)


def _marker(channels: list[str], channel: str) -> str:
    return MARKERS[channels.index(channel) % len(MARKERS)]


def report_figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Yield every figure of a report with the name of its file."""
    metrics = metrics_of(report.curves)
    for metric in metrics:
        # only the first metric is drawn against its cost
        for axis in axes_of(report.curves) if metric is metrics[0] else ("round",):
            column = re.sub(r"[^A-Za-z0-9]+", "-", metric.column).strip("-")
            yield f"{column}-by-{axis.replace('_', '-')}", curve_figure(report.curves, metric, axis)
    if report.responses:
        yield "learning-rates", rates_figure(report.responses)
    for number, frontier in enumerate(report.frontiers, 1):
        yield f"frontier-{number}" if len(report.frontiers) > 1 else "frontier", frontier_figure(frontier)
    for number, (title, counts) in enumerate(report.dealt, 1):
        name = f"partition-{number}" if len(report.dealt) > 1 else "partition"
        # the picture does not depend on which samples a client holds: number them client by client, class by class
        labels = np.tile(np.arange(len(counts[0])), len(counts)).repeat(np.ravel(counts))
        parts = np.split(np.arange(len(labels)), np.cumsum(np.sum(counts, axis=1))[:-1])
        yield name, partition_picture(parts, labels, title=title)


@matplotlib.rc_context(STYLE)
def image_of(figure: Figure, ending: str) -> bytes:
    """Return a figure as the content of a file in one of `FORMATS`."""
    image = io.BytesIO()
    figure.savefig(image, format=ending, dpi=300, metadata=METADATA[ending])
    return image.getvalue()


def _add_legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """Add a legend inside the axes or, if it is long, below them in a figure that grows with it."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [label.replace("$", r"\$") for label in labels]  # else matplotlib reads it as mathematics
    style: Any = {"fontsize": 8, "title": title, "title_fontsize": 8}
    if len(handles) > LEGEND_INSIDE_UP_TO or any(len(label) > 30 for label in labels):
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.19 * len(handles))
        figure.legend(handles, labels, loc="outside lower center", frameon=False, **style)
    elif handles:
        axes.legend(handles, labels, edgecolor="none", framealpha=0.8, **style)
