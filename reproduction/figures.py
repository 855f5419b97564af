"""The figures of docs/reproduction."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from record import Result, labelled

from lamina.experiment.trials import reproduction
from lamina.report.figures import COLOURS, DASHES, STYLE, described, draw_line
from lamina.training.history import History

# A method as given has the same colour in every figure; no two methods of one comparison share one.
COLOUR = {
    "fedlamb": 0, "fedams": 1, "mime": 4, "mimelamb": 3, "fedadam": 5, "fedavg": 6,
    "fedlada": 0, "scaffold": 1, "fedcm": 2, "localadam": 3, "fedprox": 4, "fedadam_star": 4,
}  # fmt: skip
MOST_POINTS = 200  # per line
MOST_LINES = 10  # more are drawn in two rows
PANEL_LETTERS = 92  # how many letters of a legend fit below a panel
HANDLE_LETTERS = 7  # the sample of a line beside its label, and the space
MAX_PANELS_PER_ROW = 3
# Metrics that are positive and span decades; the others have a linear axis.
LOGARITHMIC = {
    "consistency", "drift", "extrapolation", "gradient_squared_norm", "scaled_gradient_squared_norm",
    "pseudo_gradient_gap", "second_moment_mean", "second_moment_variance",
}  # fmt: skip
Line = tuple[str, str]  # variant's folder and algorithm
DRAWN_FROM = "drawn from"


def metrics_of(result: Result) -> list[str]:
    """Return the metrics to draw: the accuracy, and those in the claims."""
    return list(dict.fromkeys(["accuracy", *(claim["metric"] for claim in result.facts["claims"])]))


def drawn(result: Result) -> bool:
    """Return whether there is anything to draw."""
    return any(any(histories) for histories in result.histories.values())


def window_of(result: Result) -> int:
    """Return how many rounds a point of the figure averages: lines with very many points hide each other."""
    longest = max(len(history) for histories in result.histories.values() for history in histories)
    return 1 if longest <= MOST_POINTS else math.ceil(longest / MOST_POINTS)


def averaged(history: History, column: str, window: int) -> History:
    """Return means over windows of rounds, in the last row of each window; the other rows are empty."""
    if window == 1:
        return history
    column_of = history.column(column, optional=True)
    rows = [dict[str, float](round=number) for number in range(1, len(history) + 1)]
    for end in range(window, len(history) + 1, window):
        seen = [value for value in column_of[end - window : end] if not math.isnan(value)]
        if seen:
            rows[end - 1][column] = sum(seen) / len(seen)
    return History(rows)


def save_figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw a figure for each result, and remove figures without a result."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{result.name}.png" for result in results if drawn(result)]
    for old in set(folder.glob("*.png")) - set(paths):
        old.unlink()
    for result in results:
        if drawn(result):
            save(figure(result), folder / f"{result.name}.png", result.digest)
    return paths


def save(picture: Figure, path: Path, drawn_from: str) -> None:
    """Save a figure with few colours, which makes the file a third as large, and without a date.

    The digest of its data is stored in the file, so that an outdated figure can be detected.
    """
    drawn_in_full = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        picture.savefig(drawn_in_full, dpi=110, format="png")
    few = Image.open(drawn_in_full).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    facts = PngInfo()
    facts.add_text(DRAWN_FROM, drawn_from)
    few.save(path, "PNG", optimize=True, pnginfo=facts)


def figure(result: Result) -> Figure:
    """Draw each metric over rounds: one line per method, the mean over seeds, with a band from minimum to maximum.

    At most three panels stand side by side; further ones go below. A method without values of a metric has no line in
    its panel.
    """
    columns = metrics_of(result)
    rows, window = rows_of(list(result.histories)), window_of(result)
    panels_per_row = min(len(columns), MAX_PANELS_PER_ROW)
    panel_rows = math.ceil(len(columns) / panels_per_row)
    with matplotlib.rc_context(STYLE):
        across = legend_columns([labelled(name, variant) for variant, name in result.histories], panels_per_row)
        height = sum(3.5 * panel_rows + 0.19 * math.ceil(len(lines) / across) for lines in rows)
        picture = Figure(figsize=(5.6 * panels_per_row, height), layout="constrained")
        parts = picture.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for part, lines in zip(parts, rows, strict=True):
            looks = line_looks(lines)
            panels = list(part.subplots(panel_rows, panels_per_row, squeeze=False).flat)
            for unused in panels[len(columns) :]:
                unused.remove()
            for axes, column in zip(panels, columns, strict=False):
                for variant, name in lines:
                    histories = result.histories[variant, name]
                    if any(histories):
                        means = [averaged(history, column, window) for history in histories]
                        metric, label = described(column), labelled(name, variant)
                        draw_line(axes, means, metric, "round", label, looks[variant, name], unit=1)
                axes.set_xlabel("round")
                axes.set_ylabel(described(column).title)
                axes.grid(alpha=0.25)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                if column in LOGARITHMIC:
                    axes.set_yscale("log")
            add_legend(part, [labelled(name, variant) for variant, name in lines], across)
    return picture


def add_legend(part: SubFigure, labels: Sequence[str], across: int) -> None:
    """Add one legend for all panels, in the order of the labels: a method may have a line in some panels only."""
    handles: dict[str, Artist] = {}
    for axes in part.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [label for label in labels if label in handles]
    entries = [handles[label] for label in shown]
    part.legend(entries, shown, loc="outside lower center", ncols=across, fontsize=8, frameon=False)


def legend_columns(labels: Sequence[str], panels: int) -> int:
    """Return how many columns of these labels fit below so many panels: three at most.

    >>> legend_columns(["Fed-LAMB running-alone"], 1), legend_columns(["FedAdam (Adp-Fed) iid-0.03"], 1)
    (3, 2)
    """
    return max(1, min(3, PANEL_LETTERS * panels // (max(map(len, labels)) + HANDLE_LETTERS)))


def rows_of(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each row of a figure: one row, or two if there are many lines.

    The first has what is as given, the second the variants and, as given, the methods they are of.

    >>> many = [("as-given", str(i)) for i in range(8)] + [(f"variant {i}", "0") for i in range(8)]
    >>> [len(row) for row in rows_of(many)], rows_of(many)[1][:2], len(rows_of(many[:9]))
    ([8, 9], [('as-given', '0'), ('variant 0', '0')], 1)
    """
    as_given = [line for line in lines if line[0] == reproduction.FOLDER_AS_GIVEN]
    varied = {name for variant, name in lines if variant != reproduction.FOLDER_AS_GIVEN}
    if len(lines) <= MOST_LINES or not varied or len(as_given) == 1:
        return [list(lines)]
    second = [line for line in lines if line[0] != reproduction.FOLDER_AS_GIVEN or line[1] in varied]
    return [row for row in (as_given, second) if row]


def line_looks(lines: Sequence[Line]) -> dict[Line, int]:
    """Return the number of each line's colour and dashes, by variant and algorithm.

    A colour is a method's and dashes are a variant's, unless there are more variants than dashes or only one method:
    then only what is as given has its method's colour.
    """
    variants, methods = list(dict.fromkeys(v for v, _ in lines)), {name for _, name in lines}
    if len(variants) > len(DASHES) or (len(methods) == 1 and len(variants) > 1):
        fixed = {line: COLOUR.get(line[1], 2) for line in lines if line[0] == reproduction.FOLDER_AS_GIVEN}
        fixed = fixed if len(set(fixed.values())) == len(fixed) else {}
        free = (look for look in range(len(lines) + len(COLOURS)) if look not in fixed.values())
        return {line: fixed[line] if line in fixed else next(free) for line in lines}
    looks: dict[Line, int] = {}
    for v, name in lines:
        look = COLOUR.get(name, 2) + len(COLOURS) * variants.index(v)
        if look in looks.values() and name not in COLOUR:  # the next that is free, with other dashes
            look = next(i for i in itertools.count(look + len(COLOURS)) if i not in looks.values())
        while look in looks.values():  # methods of two papers in one figure
            look += len(COLOURS)
        looks[v, name] = look
    return looks
