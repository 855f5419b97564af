"""The page that compares locally adaptive methods: one table and picture of all panels, then a table for each.

The panels are the presets ``adaptive-2026…``. The docs' front page includes the part of all panels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from appendix import bytes_of_a_round
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import Result
from words import markdown, named

from lamina.experiment.trials import reproduction
from lamina.experiment.trials.claims import Finding, Pair
from lamina.report.figures import STYLE
from lamina.report.tables import NONE, mean_and_spread, significant
from lamina.training.history import History, mean, values

PANEL = "adaptive-2026"  # the panel without a suffix; the names of the others start with it
BASELINE = "fedavg"
PICTURE = "adaptive.png"
TITLES = {
    "adaptive-2026": "Handwritten digits",
    "adaptive-2026-fmnist-200": "Fashion-MNIST, 200 clients with two classes each, all active",
    "adaptive-2026-fmnist-25-of-50": "Fashion-MNIST, 25 of 50 clients active, two classes each",
    "adaptive-2026-cifar100": "CIFAR-100, ResNet-18, 10 of 100 clients active, Dirichlet 0.6",
    "adaptive-2026-cifar100-skewed": "CIFAR-100, ResNet-18, 10 of 100 clients active, Dirichlet 0.1",
    "adaptive-2026-shakespeare": "Shakespeare by speaker, a small transformer",
}
ABOVE, BELOW, OPEN = "#2a7f3f", "#b3312c", "#777777"

TITLE = "# Locally adaptive methods beside FedAvg"
COLUMN_TITLES = {  # of the table of all panels
    "adaptive-2026": "digits",
    "adaptive-2026-fmnist-200": "Fashion-MNIST, 200 of 200 clients",
    "adaptive-2026-fmnist-25-of-50": "Fashion-MNIST, 25 of 50",
    "adaptive-2026-cifar100": "CIFAR-100, Dirichlet 0.6",
    "adaptive-2026-cifar100-skewed": "CIFAR-100, Dirichlet 0.1",
    "adaptive-2026-shakespeare": "Shakespeare, a transformer",
}
SETTINGS = {  # what the titles leave out
    "adaptive-2026": "20 clients (Dirichlet 0.5), ten active, an MLP, five local steps, 60 rounds",
}
SEED_HISTORY = {"adaptive-2026": "We first ran five seeds, then ten."}  # notes.toml: how a panel got its seeds
BARELY = 0.1  # points between 0 and the nearer end of an interval
LOWEST = -12.0  # points: the picture writes smaller differences as numbers at its left edge
GRIDS = """Every method has the same number of candidates: seven learning rates times two values of one further option.
The further option differs by method. Weight decay is tuned for FedAvg only; others keep their default: 0.01 for
LocalAdam, FedLADA, Local AdamW, FedAdamW, Local Muon and FedMuon, 0.1 for DiLoCo, and none for the rest. Settings
are chosen on held-out training data, with one seed that is not reported. With the same seed, all methods have the same
initial weights, clients and batches."""
OVERVIEW = """The table shows by how many points a method's test accuracy is above FedAvg's: the mean of the last ten
rounds, with the 95 % interval over seeds. Bold: the interval is above 0. At the top are the methods with the most
panels above FedAvg, less those below it."""
COLUMNS = """- *Accuracy* is the mean of the last ten rounds on the test data, with its standard deviation over seeds.
- *Difference* is the mean over seeds of the difference to FedAvg with the same seed, with its 95 % interval (Student's
  t). Each interval is for one method alone: no correction is made for looking at many.
- *Rounds to 90 %*, or to the panel's target, is the first round from which the mean of five rounds stays there until
  the end, averaged over seeds.
- *MB* are what all clients send and receive until then. *Modelled seconds* are those on the preset's
  [clock](../how-to/time-on-a-network.md): a home network (100 Mbit/s down, 20 up), and a fixed time for each gradient.
  Both are the rounds times the mean of a round."""


@dataclass(frozen=True)
class Row:
    """A method in the table of a panel."""

    name: str
    accuracies: list[float]  # of every seed, in per cent
    pair: Pair | None  # with the baseline
    rounds: float  # to the target; infinite if a seed does not stay there
    megabytes: float  # of a round
    seconds: float  # of a round, on the clock


def panels(results: Sequence[Result]) -> list[Result]:
    """Return the complete records of the panels, in the order of their titles."""
    by_name = {result.name: result for result in results if result.facts["complete"]}
    return [by_name[name] for name in TITLES if name in by_name]


def rows_of(result: Result, findings: Sequence[Finding]) -> list[Row]:
    """Return the methods of a panel, the most accurate first."""
    pairs = {
        pair.better: pair
        for finding in findings
        if finding.claim.kind == "order"
        for pair in finding.pairs
        if pair.worse == BASELINE
    }
    reach = next((finding.values for finding in findings if finding.claim.target is not None), {})
    rows = []
    for (variant, name), histories in result.histories.items():
        if variant == reproduction.FOLDER_AS_GIVEN:
            accuracies = values(histories, lambda history: 100 * history.final(optional=True))
            megabytes = bytes_of_a_round(histories) / 1e6
            rounds = reach.get(name, float("nan"))
            rows.append(Row(name, accuracies, pairs.get(name), rounds, megabytes, seconds_of_a_round(histories)))
    return sorted(rows, key=lambda row: -mean(row.accuracies))


def seconds_of_a_round(histories: Sequence[History]) -> float:
    """Return the mean seconds of a round on the clock of the runs."""
    return mean(history.last("clock_seconds", optional=True) / len(history) for history in histories)


def table(result: Result, rows: Sequence[Row], findings: Sequence[Finding]) -> str:
    """Return the table of a panel."""
    target = next((finding.claim.target for finding in findings if finding.claim.target is not None), None)
    longest = max(len(history) for histories in result.histories.values() for history in histories)
    to = f"to {100 * target:g} %" if target is not None else "to target"
    head = ["method", "accuracy, %", "difference, points [95 %]", f"rounds {to}", f"MB {to}", f"modelled seconds {to}"]
    lines = []
    for row in rows:
        cells = [named(row.name), mean_and_spread(row.accuracies), difference(row.pair)]
        if row.rounds < float("inf"):
            cells += [
                f"{row.rounds:.1f}",
                significant(row.rounds * row.megabytes),
                significant(row.rounds * row.seconds),
            ]
        else:
            cells += [f"not in {longest}" if row.rounds == float("inf") else NONE, NONE, NONE]
        lines.append(cells)
    return markdown(head, lines)


def difference(pair: Pair | None) -> str:
    """Return the difference of a method to the baseline with its interval, in points."""
    if pair is None:
        return NONE
    if pair.lead is None:
        return pair.remark
    mean_, low, high = (100 * number for number in (pair.lead.mean, pair.lead.low, pair.lead.high))
    return f"{mean_:+.2f} [{low:+.2f}, {high:+.2f}]"


def counted(rows: Sequence[Row]) -> str:
    """Return in a sentence how many methods are above the baseline, below it, and neither.

    >>> counted([Row("fedlamb", [], Pair("fedlamb", "fedavg", "right"), 1, 1, 1)])
    'Of 1 method beside FedAvg, 1 is above it, 0 are below it, and for 0 the interval includes 0.'
    """
    outcomes = [row.pair.outcome for row in rows if row.pair]
    above, below, tied = (outcomes.count(word) for word in ("right", "wrong", "tie"))
    are = {number: f"{number} {'is' if number == 1 else 'are'}" for number in (above, below)}
    rest = len(outcomes) - above - below - tied
    ending = f", and {rest} cannot be compared" if rest else ""
    return (
        f"Of {len(outcomes)} method{'s' * (len(outcomes) != 1)} beside FedAvg, {are[above]} above it, "
        f"{are[below]} below it, and for {tied} the interval includes 0{ending}."
    )


def one_data_set(rows: Sequence[Row]) -> str:
    """Return what the panel of digits alone can say."""
    leads = [100 * row.pair.lead.mean for row in rows if row.pair and row.pair.lead]
    ahead = sum(row.pair.outcome == "right" for row in rows if row.pair)
    return (
        f"This is one easy data set, on which tuned FedAvg is hard to beat: {ahead} of {len(leads)} methods are above "
        f"it, the best by {max(leads):.1f} points. It says nothing about other data."
    )


def edges(result: Result) -> str:
    """Return which methods were chosen a rate on the edge of the grid, so that a better one may lie beyond."""
    methods = result.facts["variants"][reproduction.FOLDER_AS_GIVEN]["methods"]
    found = [f"{named(name)} ({method['edge']['lr']})" for name, method in methods.items() if "lr" in method["edge"]]
    return f"The chosen rate is on the edge of the grid for: {', '.join(found)}." if found else ""


def held_out_order(result: Result, rows: Sequence[Row]) -> str:
    """Return the order of the methods on the data that chose their settings; empty if it is that of the table."""
    scores = {
        name: score for (variant, name), score in result.held_out.items() if variant == reproduction.FOLDER_AS_GIVEN
    }
    order = sorted(scores, key=lambda name: -scores[name])
    if order == [row.name for row in rows if row.name in scores]:
        return ""
    listing = ", ".join(f"{named(name)} {100 * scores[name]:.1f}" for name in order)
    return (
        "Intervals cover seeds, not the choice of settings: on the held-out data, one seed, the order is different "
        f"(accuracy in %): {listing}."
    )


def close_calls(name: str, rows: Sequence[Row]) -> str:
    """Return how the panel got its seeds, and whose interval excludes 0 by little."""
    close = [
        named(row.name)
        for row in rows
        if row.pair
        and row.pair.lead
        and row.pair.outcome in ("right", "wrong")
        and 100 * min(abs(row.pair.lead.low), abs(row.pair.lead.high)) < BARELY
    ]
    barely = f"Intervals that barely exclude 0: {', '.join(close)}." if close else ""
    return " ".join(filter(None, [SEED_HISTORY.get(name, ""), barely]))


def overview(panels_rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of all panels: each method's difference to the baseline."""
    pairs: dict[str, dict[str, Pair]] = {}
    for panel, rows in panels_rows.items():
        for row in rows:
            if row.pair:
                pairs.setdefault(row.name, {})[panel] = row.pair

    def balance(name: str) -> tuple[int, float]:
        """Return panels below minus panels above, then the mean difference with its sign reversed."""
        found = pairs[name].values()
        outcomes = [pair.outcome for pair in found]
        return (
            outcomes.count("wrong") - outcomes.count("right"),
            -mean([pair.lead.mean if pair.lead else -1.0 for pair in found]),
        )

    def cell(pair: Pair | None) -> str:
        if pair is None:
            return NONE
        return f"**{difference(pair)}**" if pair.outcome == "right" else difference(pair)

    head = ["method", *(COLUMN_TITLES[panel] for panel in panels_rows)]
    lines = [
        [named(name), *(cell(pairs[name].get(panel)) for panel in panels_rows)] for name in sorted(pairs, key=balance)
    ]
    return markdown(head, lines)


def page(results: Sequence[Result], findings: Mapping[str, Sequence[Finding]]) -> str:
    """Return the page; what the docs' front page includes is between its two comments."""
    shown = panels(results)
    panels_rows = {one.name: rows_of(one, findings[one.name]) for one in shown}
    front = ["<!-- front page -->", GRIDS]
    if shown:
        front += [OVERVIEW, overview(panels_rows)]
        front.append(f"![Difference of every method to FedAvg, with its interval]({PICTURE})")
    missing = [f"- {title} (`{name}`)" for name, title in TITLES.items() if name not in panels_rows]
    if missing:
        front.append("\n".join(["Not run yet:", "", *missing]))
    if [*panels_rows] == [PANEL]:
        front.append(one_data_set(panels_rows[PANEL]))
    parts = []
    for result in shown:
        rows = panels_rows[result.name]
        seeds = max(len(row.accuracies) for row in rows)
        setting = f"{SETTINGS[result.name]}, " if result.name in SETTINGS else ""
        text = f"{setting}{seeds} seeds ([details](appendix/{result.name}.md))."
        remarks = (counted(rows), edges(result), close_calls(result.name, rows), held_out_order(result, rows))
        parts += [
            f"## {TITLES[result.name]}",
            text,
            table(result, rows, findings[result.name]),
            " ".join(filter(None, remarks)),
        ]
    return "\n\n".join([TITLE, *front, "<!-- end of front page -->", *parts, "## Columns", COLUMNS]) + "\n"


def digest(results: Sequence[Result]) -> str:
    """Return a digest of the records of the picture, to detect an outdated one."""
    return hashlib.sha256("".join(result.digest for result in panels(results)).encode()).hexdigest()


def picture(results: Sequence[Result], findings: Mapping[str, Sequence[Finding]]) -> Figure:
    """Draw the difference of every method to the baseline with its interval, a part for each panel."""
    shown = panels(results)
    with matplotlib.rc_context(STYLE):
        drawn = [
            (one, [row for row in rows_of(one, findings[one.name]) if row.pair and row.pair.lead]) for one in shown
        ]
        pairs = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]  # two panels side by side
        heights = [max(len(rows) for _, rows in pair) + 1 for pair in pairs]
        figure = Figure(figsize=(10.0, sum(0.24 * height + 0.9 for height in heights)), layout="constrained")
        parts = figure.subplots(len(pairs), 2, squeeze=False, height_ratios=heights)
        for axes in parts.flat[len(drawn) :]:
            axes.set_visible(False)
        for axes, (result, rows) in zip(parts.flat, drawn, strict=False):
            draw(axes, TITLES[result.name], rows)
    return figure


def draw(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Draw a panel: a line for each method."""
    for height, row in enumerate(rows):
        assert row.pair
        assert row.pair.lead
        low, middle, high = (100 * number for number in (row.pair.lead.low, row.pair.lead.mean, row.pair.lead.high))
        colour = ABOVE if low > 0 else BELOW if high < 0 else OPEN
        if middle < LOWEST:
            edge = axes.get_yaxis_transform()  # x in parts of the width
            axes.text(0.01, height, f"◂ {middle:.1f}", color=colour, fontsize=8, va="center", transform=edge)
            continue
        axes.plot([low, high], [height, height], color=colour, linewidth=1.6)
        axes.plot([middle], [height], "o", color=colour, markersize=4.5)
    labels = [named(row.name).replace("\\", "") for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("test accuracy minus FedAvg's, points [95 % interval]: right of 0 is better", fontsize=8)
    axes.grid(axis="x", alpha=0.25)
