"""The report's table of results and its forest plot: the central claims, tested by pairs of the presets' claims."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from words import escaped, markdown, named

from lamina.base.errors import BadInput
from lamina.experiment.config import Claim
from lamina.experiment.trials.claims import Finding, Pair, in_per_cent, written_lead, written_outcome
from lamina.report.figures import STYLE

HERE = Path(__file__).parent
RESULTS, CLAIMS = "<!-- results -->", "<!-- claims -->"  # where the template gets the table, and the list of claims
COLOURS = {"right": "#2a7f3f", "wrong": "#b3312c", "tie": "#777777", "not comparable": "#bbbbbb"}


@dataclass(frozen=True)
class Row:
    """One line of the table of results: a pair of a preset's claim, or numbers written by hand."""

    panel: str
    paper: str
    ours: str
    outcome: str
    claim: Claim | None = None
    pair: Pair | None = None

    @property
    def label(self) -> str:
        """Return the panel and the two methods."""
        return f"{self.panel}: {named(self.pair.better)} / {named(self.pair.worse)}" if self.pair else self.panel


@dataclass(frozen=True)
class Central:
    """A central claim with the rows that test it."""

    title: str
    text: str
    verdict: str
    rows: list[Row]


def read_central(findings: Mapping[str, Sequence[Finding]], path: Path = HERE / "central.toml") -> list[Central]:
    """Return the central claims, with the verdicts that the rule of `lamina.experiment.trials.claims` gives."""
    central = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]:
        rows = [row for given in entry["rows"] for row in read_rows(given, entry.get("paper", ""), findings)]
        pairs = [row.pair for row in rows if row.pair]
        claim = next((row.claim for row in rows if row.claim), None)
        verdict = Finding(claim, {}, pairs).verdict if claim else entry["verdict"]
        central.append(Central(entry["title"], entry["text"], verdict, rows))
    return central


def read_rows(given: Mapping[str, Any], paper: str, findings: Mapping[str, Sequence[Finding]]) -> list[Row]:
    """Return the rows of one entry: its pairs, or the numbers that it has itself."""
    if "preset" not in given:
        return [Row(given["panel"], given["paper"], given["ours"], given["outcome"])]
    finding = next((one for one in findings[given["preset"]] if one.claim.text == given["claim"]), None)
    pairs = {f"{pair.better} / {pair.worse}": pair for pair in finding.pairs} if finding else {}
    if finding is None or not pairs.keys() >= set(given["pairs"]):
        raise BadInput(f"central.toml: {given['preset']} has no pairs {given['pairs']} of a claim '{given['claim']}'")
    return [
        Row(
            given["panel"],
            papers_lead(finding.claim, pairs[name]) or paper,
            ours(finding.claim, pairs[name]),
            shown_outcome(pairs[name]),
            finding.claim,
            pairs[name],
        )
        for name in given["pairs"]
    ]


def papers_lead(claim: Claim, pair: Pair) -> str:
    """Return the paper's difference of a pair, or the size that it claims; empty without either."""
    if claim.at_least is not None:
        return f"≥ {in_per_cent(claim, claim.at_least):g}"
    if claim.at_most is not None:
        return f"within {in_per_cent(claim, claim.at_most):g}"
    if not {pair.better, pair.worse} <= claim.paper.keys():
        return ""
    better, worse = claim.paper[pair.better], claim.paper[pair.worse]
    lead = worse - better if claim.target is not None or claim.lower_is_better else better - worse
    return "never" if lead == float("inf") else f"{lead:+.4g}"


def ours(claim: Claim, pair: Pair) -> str:
    """Return our difference of a pair with its interval and number of seeds."""
    seeds = f", n = {pair.lead.seeds}" if pair.lead else ""
    unit = " rounds" if claim.target is not None else " points" if in_per_cent(claim, 1) != 1 else ""
    return written_lead(claim, pair) + (unit + seeds if pair.lead else "")


def shown_outcome(pair: Pair) -> str:
    """Return an outcome; its remark is left out where the interval, or the number of seeds, says the same.

    >>> shown_outcome(Pair("a", "b", "tie", remark="holds by less than the interval"))
    'tie'
    >>> shown_outcome(Pair("a", "b", "right", remark="holds by less than the interval"))
    'right, but less than the interval'
    """
    if "less than the interval" in pair.remark:
        return pair.outcome if pair.outcome == "tie" else f"{pair.outcome}, but less than the interval"
    return pair.outcome if pair.remark == "one seed" else written_outcome(pair)


def report(central: Sequence[Central], template: Path = HERE / "report.md") -> str:
    """Return the report: the template with the list of claims and the table of results."""
    claims = "\n".join(f"{number}. {one.text}" for number, one in enumerate(central, 1))
    text = template.read_text(encoding="utf-8")
    return text.replace(CLAIMS, claims).replace(RESULTS, results_table(central))


def results_table(central: Sequence[Central]) -> str:
    """Return the table of results: each claim with its verdict, and below it the pairs that test it."""
    rows = []
    for number, one in enumerate(central, 1):
        rows.append([f"**{number}**", f"**{escaped(one.title)}**", "", "", f"**{one.verdict}**"])
        rows += [["", row.label, row.paper, row.ours, row.outcome] for row in one.rows]
    return markdown(["", "claim and comparison", "paper", "ours [95 % interval], seeds", "outcome"], rows)


def digest(central: Sequence[Central]) -> str:
    """Return a digest of the numbers of the forest plot, to detect an outdated figure."""
    return hashlib.sha256(results_table(central).encode()).hexdigest()


def forest_plot(central: Sequence[Central]) -> Figure:
    """Draw the difference of every pair with its interval: accuracies above, rounds to a target below."""
    rows = [
        (f"{number}  {row.label}".replace("\\", ""), row)
        for number, one in enumerate(central, 1)
        for row in one.rows
        if row.pair and row.pair.lead and row.claim and (row.claim.target or "accuracy" in row.claim.metric)
    ]
    parts = [[one for one in rows if (one[1].claim.target is not None) == rounds] for rounds in (False, True)]  # type: ignore[union-attr]
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(8.2, 0.19 * len(rows) + 1.6), layout="constrained")
        panels = picture.subplots(2, 1, squeeze=False, height_ratios=[max(1, len(part)) for part in parts])[:, 0]
        for axes, part, unit in zip(panels, parts, ("lead, points", "rounds saved"), strict=True):
            for height, (_, row) in enumerate(part):
                draw_row(axes, row, height)
            axes.set_yticks(range(len(part)), [label for label, _ in part], fontsize=7)
            axes.set_ylim(len(part) - 0.3, -0.7)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_xlabel(f"{unit} [95 % interval]: right of 0 as the paper says", fontsize=8)
            axes.grid(axis="x", alpha=0.25)
        panels[1].set_xscale("symlog", linthresh=10)
    return picture


def draw_row(axes: Any, row: Row, height: int) -> None:
    """Draw one difference; open diamonds are the sizes that are claimed, and a hollow circle has one seed."""
    assert row.claim
    assert row.pair
    assert row.pair.lead
    lead, colour = row.pair.lead, COLOURS[row.pair.outcome]
    mean, low, high = (in_per_cent(row.claim, number) for number in (lead.mean, lead.low, lead.high))
    axes.plot([low, high], [height, height], color=colour, linewidth=1.4)
    face = "white" if lead.margin is None else colour
    axes.plot([mean], [height], "o", color=colour, markerfacecolor=face, markersize=4)
    sizes = [row.claim.at_least] if row.claim.at_least is not None else []
    sizes += [row.claim.at_most, -row.claim.at_most] if row.claim.at_most is not None else []
    for size in sizes:
        axes.plot([in_per_cent(row.claim, size)], [height], "D", color="black", markerfacecolor="none", markersize=4)
