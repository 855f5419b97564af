"""Draw how many samples of each class every client holds."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from lamina.data.partitions import label_counts
from lamina.data.parts import Indices, Labels
from lamina.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

_INK = "#1f3b57"
_BLUE = "#3b7dba"
_BUBBLES_UP_TO = (60, 25)  # clients, classes: beyond, bubbles would be specks and cells are clearer


def partition_picture(
    parts: Sequence[Indices],
    labels: Labels | None,
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the classes every client holds, and above them how many samples it has.

    `parts` are the sample indices of every client, as a partition's `split` returns them. Without labels (regression),
    only the sizes are drawn. With a path, the picture is saved there; its ending chooses the format.
    """
    # Figure without pyplot: no window, no global list of open figures, any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not parts:
        raise BadInput("there is no client to draw")
    clients = len(parts)
    width = min(5.0 + 0.11 * clients, 13.0)
    if labels is None:
        figure = Figure(figsize=(width, 2.6), layout="constrained")
        sizes_axes = figure.subplots()
        sizes_axes.set_xlabel("client")
    else:
        counts = label_counts(parts, labels)
        classes = counts.shape[1]
        height = min(max(0.28 * classes, 1.6), 6.0)
        figure = Figure(figsize=(width, height + 1.9), layout="constrained")
        sizes_axes, class_axes = figure.subplots(2, 1, sharex=True, height_ratios=(0.8, height))
        _draw_classes(figure, class_axes, counts)
        sizes_axes.tick_params(labelbottom=False)
    FigureCanvasAgg(figure)
    _draw_sizes(sizes_axes, parts)
    if title:
        figure.suptitle(title, color=_INK, fontsize=12)
    if path is not None:
        save_picture(figure, path)
    return figure


def save_picture(figure: Figure, path: str | os.PathLike[str] | BinaryIO) -> None:
    """Save a figure atomically; the ending of its name chooses the format, PNG without one."""
    from lamina.storage.files import write_file

    if not isinstance(path, str | os.PathLike):
        figure.savefig(path, dpi=150)
        return
    place, image = Path(path), io.BytesIO()
    if not place.suffix:
        place = place.with_name(f"{place.name}.png")
    try:
        figure.savefig(image, format=place.suffix.removeprefix("."), dpi=150)
        write_file(place, image.getvalue())
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise BadInput(f"cannot save the picture as '{path}': {reason}") from error


def _draw_sizes(axes: Axes, parts: Sequence[Indices]) -> None:
    sizes = [len(part) for part in parts]
    axes.bar(range(len(parts)), sizes, width=0.8 if len(parts) <= 100 else 1.0, color=_BLUE)
    axes.set_ylabel("samples")
    axes.set_xlim(-0.6, len(parts) - 0.4)
    axes.locator_params(axis="y", nbins=3)
    axes.xaxis.set_major_locator(_ticks(len(parts)))
    _plain(axes)


def _draw_classes(figure: Figure, axes: Axes, counts: Labels) -> None:
    from matplotlib.colors import PowerNorm

    clients, classes = counts.shape
    if clients <= _BUBBLES_UP_TO[0] and classes <= _BUBBLES_UP_TO[1]:
        _draw_bubbles(figure, axes, counts)
    else:
        # A square-root scale keeps a handful of samples visible beside thousands.
        norm = PowerNorm(0.5, 0, max(int(counts.max()), 1))
        cells = axes.imshow(counts.T, aspect="auto", origin="upper", cmap="Blues", norm=norm, interpolation="nearest")
        bar = figure.colorbar(cells, ax=axes, pad=0.01, aspect=30, label="samples")
        bar.outline.set_visible(False)
    axes.set_ylim(classes - 0.4, -0.6)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.xaxis.set_major_locator(_ticks(clients))
    axes.yaxis.set_major_locator(_ticks(classes))
    _plain(axes)


def _draw_bubbles(figure: Figure, axes: Axes, counts: Labels) -> None:
    clients, classes = counts.shape
    client, kind = np.nonzero(counts)
    held = counts[client, kind]
    # The largest bubble just fits its cell; an area is proportional to its count.
    inches_wide, inches_high = figure.get_size_inches()
    cell = 72 * min(0.88 * inches_wide / clients, 0.75 * (inches_high - 1.2) / classes)
    diameter = min(0.95 * cell, 22)
    style: Any = {"color": _BLUE, "alpha": 0.85, "linewidths": 0}
    axes.scatter(client, kind, s=diameter**2 * held / held.max(), **style)
    axes.set_axisbelow(True)
    axes.grid(True, color="#e8edf2", linewidth=0.8)
    # A key for the areas.
    for count in sorted({int(held.max()), max(int(held.max()) // 4, 1)}, reverse=True):
        axes.scatter([], [], s=diameter**2 * count / held.max(), label=str(count), **style)
    small: Any = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "labelspacing": 1.4}
    axes.legend(title="samples", loc="upper left", bbox_to_anchor=(1.0, 1.0), **small)


def _ticks(count: int) -> MultipleLocator:
    """Return about twenty ticks or fewer, at round numbers from 0."""
    from matplotlib.ticker import MultipleLocator

    magnitude = 10 ** len(str(count // 20))
    return MultipleLocator(next((step for step in (1, 2, 5, 10, 20, 50) if count <= 20 * step), magnitude))


def _plain(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
