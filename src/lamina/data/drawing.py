"""Draw how many samples of each class every client holds."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.data.partitions import label_counts
from lamina.data.parts import Indices, Labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_INK = "#1f3b57"
_BLUE = "#3b7dba"


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
    width = min(5.0 + 0.11 * len(parts), 13.0)
    if labels is None:
        figure = Figure(figsize=(width, 2.6), layout="constrained")
        sizes_axes = bottom_axes = figure.subplots()
    else:
        counts = label_counts(parts, labels)
        height = min(max(0.28 * counts.shape[1], 1.6), 6.0)
        figure = Figure(figsize=(width, height + 1.9), layout="constrained")
        sizes_axes, bottom_axes = figure.subplots(2, 1, sharex=True, height_ratios=(0.8, height))
        sizes_axes.tick_params(labelbottom=False)
        _draw_classes(figure, bottom_axes, counts)
    FigureCanvasAgg(figure)
    sizes_axes.bar(range(len(parts)), list(map(len, parts)), width=0.8 if len(parts) <= 100 else 1.0, color=_BLUE)
    sizes_axes.set_ylabel("samples")
    sizes_axes.set_xlim(-0.6, len(parts) - 0.4)
    sizes_axes.locator_params(axis="y", nbins=3)
    bottom_axes.set_xlabel("client")
    bottom_axes.xaxis.set_major_locator(_ticks())
    for axes in {sizes_axes, bottom_axes}:
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors=_INK)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
    if title:
        figure.suptitle(title, color=_INK, fontsize=12)
    if path is not None:
        save_picture(figure, path)
    return figure


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Save a figure atomically; the ending of its name chooses the format, PNG without one."""
    place, image = Path(path), io.BytesIO()
    if not place.suffix:
        place = place.with_name(f"{place.name}.png")
    try:
        figure.savefig(image, format=place.suffix.removeprefix("."), dpi=150)
        write_file(place, image.getvalue())
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise BadInput(f"cannot save the picture as '{path}': {reason}") from error


def _draw_classes(figure: Figure, axes: Axes, counts: Labels) -> None:
    """Draw a cell for every client and class [clients, classes]."""
    from matplotlib.colors import PowerNorm

    # A square-root scale keeps a handful of samples visible beside thousands.
    norm = PowerNorm(0.5, 0, max(int(counts.max()), 1))
    cells = axes.imshow(counts.T, aspect="auto", origin="upper", cmap="Blues", norm=norm, interpolation="nearest")
    bar = figure.colorbar(cells, ax=axes, pad=0.01, aspect=30, label="samples")
    bar.outline.set_visible(False)
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(_ticks())


def _ticks() -> MaxNLocator:
    """Return about twenty ticks or fewer, at round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(20, steps=[1, 2, 5, 10], integer=True)
