"""Write docs/reproduction/speed-up.md and its figures from the measurements of reproduction/speedup.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from collect import called
from figures import COLOUR, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from speedup import STUDIES, Best, Run, Slope, best, by_point, read, slopes
from words import amount, escaped, markdown

from lamina.base.errors import BadInput
from lamina.experiment.config import load
from lamina.experiment.sections import Named
from lamina.report.curves import text
from lamina.report.figures import COLOURS, STYLE
from lamina.report.tables import NONE

PAGES = Path(__file__).parent.parent / "docs" / "reproduction"
HEAD = STUDIES / "head.md"  # what the papers predict, and how it was measured
PAPERS = {"fed-lamb": "fedlamb", "fedlada": "fedlada"}  # a figure for each: the paper's method beside FedAvg
BASELINE = "fedavg"
EDGE = "†"
MARKERS = "osD^v"  # by local steps
FEWEST_POINTS = 3  # for a slope


def write(folder: Path, pages: Path = PAGES) -> None:
    """Write the page and a figure for each paper."""
    studies = {path.stem: read(path) for path in sorted(folder.glob("*.csv"))}
    if not studies:
        raise BadInput(f"no measurements in {folder}: name the studies to run")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.csv")))).hexdigest()
    fastest = {name: chosen(runs) for name, runs in studies.items()}
    parts = [HEAD.read_text(encoding="utf-8").strip(), "## Slopes", slope_table(fastest)]
    for paper, method in PAPERS.items():
        picture = pages / f"speed-up-{paper}.png"
        save(figure(fastest, [BASELINE, method]), picture, digest)
        parts.append(f"![{called(method)}: rounds to the target against clients times local steps]({picture.name})")
    parts += [study_section(name, runs, fastest[name]) for name, runs in studies.items()]
    (pages / "speed-up.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


Chosen = dict[str, dict[tuple[int, int], Best | None]]  # by method, and by clients and steps


def chosen(runs: Sequence[Run]) -> Chosen:
    """Return the fastest rate of every point of every method; None where no rate reached the target."""
    fastest: Chosen = {}
    for (method, clients, steps), point in by_point(runs).items():
        fastest.setdefault(method, {})[clients, steps] = best(point)
    return fastest


def reached(points: Mapping[tuple[int, int], Best | None]) -> tuple[list[int], list[int], list[float]]:
    """Return clients, steps and rounds of the points that reached the target."""
    found = [(clients, steps, one.rounds) for (clients, steps), one in points.items() if one is not None]
    return [row[0] for row in found], [row[1] for row in found], [row[2] for row in found]


def slope_table(fastest: Mapping[str, Chosen]) -> str:
    """Return the slopes of every study and method."""
    head = ["data", "method", "points", "slope in clients × steps", "contains −1", "in clients", "in local steps"]
    rows = []
    for study, methods in fastest.items():
        for method, points in methods.items():
            clients, steps, rounds = reached(points)
            row = [study, escaped(called(method)), f"{len(rounds)} of {len(points)}"]
            if len(rounds) < FEWEST_POINTS:
                rows.append([*row, NONE, NONE, NONE, NONE])
                continue
            (both,) = slopes(rounds, np.multiply(clients, steps).tolist())
            row += [shown(both), "yes" if both.low <= -1 <= both.high else "no"]
            varied = len(set(clients)) > 1 and len(set(steps)) > 1
            row += map(shown, slopes(rounds, clients, steps)) if varied else [NONE, NONE]
            rows.append(row)
    return markdown(head, rows)


def shown(slope: Slope) -> str:
    """Return a slope and its interval.

    >>> shown(Slope(-0.5, -0.625, -0.375))
    '−0.50 (−0.62 to −0.38)'
    """
    return f"{slope.value:.2f} ({slope.low:.2f} to {slope.high:.2f})".replace("-", "−")


def rates(runs: Sequence[Run], method: str) -> str:
    """Return the learning rates that a method was run with."""
    return ", ".join(f"{lr:g}" for lr in sorted({run.lr for run in runs if run.algorithm == method}))


def options(section: Named) -> str:
    """Return the options of a section in brackets, such as `` (hidden 50)``; nothing if there are none."""
    words = ", ".join(f"{name} {text(value)}" for name, value in section.options().items())
    return f" ({words})" if words else ""


def study_section(name: str, runs: Sequence[Run], methods: Chosen) -> str:
    """Return the points of one study: rounds to the target and the rate."""
    experiment = load(STUDIES / f"{name}.toml")
    steps = sorted({run.steps for run in runs})
    rows = []
    for method, points in methods.items():
        for clients in sorted({count for count, _ in points}):
            cells = [points.get((clients, number)) for number in steps]
            rows.append(
                [
                    escaped(called(method)),
                    str(clients),
                    *(NONE if one is None else f"{one.rounds:.1f} ({one.lr:g}{EDGE * one.is_edge})" for one in cells),
                ]
            )
    seconds, devices = sum(run.seconds for run in runs), sorted({run.device for run in runs})
    seeds = len({run.seed for run in runs})
    precision = "" if experiment.run.precision == "fp32" else f" in {experiment.run.precision}"
    parts = [
        f"## {name}",
        f"```sh\npython reproduction/speedup.py {name}\n```",
        f"Model `{experiment.model.name}`{options(experiment.model)}{precision}, {experiment.data.clients} clients, "
        f"{experiment.data.partition.name}{options(experiment.data.partition)}, "
        f"batches of {experiment.train.batch_size}, target {experiment.compare.target:.0%} test accuracy, at most "
        f"{experiment.train.rounds} rounds. {amount(len(runs), 'run')}, {seeds} of each setting, "
        f"{sum(run.outcome == 'diverged' for run in runs)} diverged; {seconds:,.0f} s on {', '.join(devices)}.",
        f"Learning rates: {'; '.join(f'{called(method)} {rates(runs, method)}' for method in methods)}.",
        f"Rounds to the target, geometric mean over seeds; in brackets the rate ({EDGE}: smallest or largest tried):",
        markdown(["method", "active clients", *(f"{number} steps" for number in steps)], rows),
    ]
    return "\n\n".join(parts)


def figure(fastest: Mapping[str, Chosen], methods: Sequence[str]) -> Figure:
    """Draw rounds to the target against clients times local steps, a panel for each study."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(5.2 * len(fastest), 4.3), layout="constrained")
        panels = picture.subplots(1, len(fastest), squeeze=False)[0]
        for axes, (study, points) in zip(panels, fastest.items(), strict=True):
            for method in methods:
                draw(axes, method, points.get(method, {}), names_markers=method == methods[-1])
            axes.set(title=study, xlabel="active clients × local steps", ylabel="rounds to the target")
            for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
                scale("log")
                axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.25)
            axes.legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=7.5, frameon=False, columnspacing=1
            )
    return picture


def draw(axes: Axes, method: str, points: Mapping[tuple[int, int], Best | None], *, names_markers: bool) -> None:
    """Draw a method's points, one marker for each number of local steps, the fit, and slope -1 for comparison."""
    clients, steps, rounds = reached(points)
    if len(rounds) < FEWEST_POINTS:
        return
    products, colour = np.multiply(clients, steps), COLOURS[COLOUR[method]]
    for number, marker in zip(sorted(set(steps)), MARKERS, strict=False):
        here = [i for i, value in enumerate(steps) if value == number]
        label = f"{number} local steps" if names_markers else None
        axes.plot(products[here], np.array(rounds)[here], marker, color=colour, ms=5, label=label)
    (slope,) = slopes(rounds, products.tolist())
    ends = np.array([products.min(), products.max()], dtype=float)
    middle = np.exp(np.log(products).mean()), np.exp(np.log(rounds).mean())
    label = f"{called(method)}: {shown(slope)}"
    axes.plot(ends, middle[1] * (ends / middle[0]) ** slope.value, "-", color=colour, label=label)
    label = "slope −1, dotted" if names_markers else None
    axes.plot(ends, middle[1] * (ends / middle[0]) ** -1.0, ":", color=colour, label=label)
