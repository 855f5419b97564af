"""Write a report as one HTML page that needs no network and no server."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina import __version__
from lamina.base.errors import missing_extra
from lamina.base.text import html_table as plain_table
from lamina.base.text import plural
from lamina.experiment.trials.trial import Trial
from lamina.report.build import Report
from lamina.report.figures import (
    MOST_ROUNDS_DRAWN,
    axes_of,
    axis_title,
    by_round,
    frontier_figure,
    image_of,
    mean_spent,
    metrics_of,
    spent,
    thinned,
)
from lamina.report.frontier import Frontier
from lamina.report.rates import drawn_scores
from lamina.report.tables import CLOCK, Table, metric_of, unit_of_bytes
from lamina.training.history import History
from lamina.training.metrics import is_percent, smaller_is_better, with_unit

FRONTIER_WORDS = (
    "Frontier: no other row is as accurate for as few bytes and as small an ε. Faint points: another one of their "
    "method is more accurate for less. Costs to a target: until all seeds stay there."
)
GENERATOR = '<meta name="generator" content="lamina report">'  # marks a page as ours, which may be replaced


def html(report: Report) -> str:
    """Return the page."""
    tables = {table.name: html_table(table) for table in report.tables()}
    count = sum(len(curve.records) for curve in report.curves)
    notes = "".join(f"<li>{escape(line)}</li>" for line in report.notes)
    return Template(_read("page.html")).substitute(
        generator=GENERATOR,
        title=escape(report.title),
        summary=f"{plural(len(report.curves), 'curve')} from {plural(count, 'run')} · lamina {escape(__version__)}",
        notes=f'<aside id="notes"><h2>Worth knowing</h2><ul>{notes}</ul></aside>' if notes else "",
        frontiers="".join(map(frontier_section, report.frontiers)),
        judged=f"Test {with_unit(report.metric)}",
        results=tables["results"],
        rates=tables.get("learning-rates", ""),
        differs=tables.get("configuration", "<p>Nothing differs.</p>"),
        common=tables.get("common-configuration", ""),
        runs=tables["runs"],
        environment=tables.get("environment", ""),
        style=_read("page.css"),
        data=embed(page_data(report)),
        plotly=plotly_js(),
        script=_read("page.js"),
    )


def page_data(report: Report) -> dict[str, Any]:
    """Return the data that page.js draws."""
    metrics, unit = metrics_of(report.curves), unit_of_bytes(report.curves)
    return {
        "curves": [_curve(curve, [one.column for one in metrics], report) for curve in report.curves],
        "metrics": [metric._asdict() for metric in metrics],
        "axes": {axis: axis_title(axis, unit.name) for axis in axes_of(report.curves)},
        "unit": unit._asdict(),
        "judged": {
            "metric": report.metric,
            "percent": is_percent(report.metric),
            "smaller_is_better": smaller_is_better(report.metric),
        },
        "targets": report.targets,
        "baseline": report.baseline,
        "responses": [
            {
                "label": response.label,
                "on": response.on,
                "metric": response.metric,
                "heading": with_unit(response.metric),
                "percent": is_percent(response.metric),
                "chosen": response.chosen,
                "tried": [
                    {"lr": rate, "final": _numbers(drawn_scores(trial)), "failed": trial.remark, "others": trial.name}
                    for rate, trial in response.tried
                ],
            }
            for response in report.responses
        ],
        "partitions": [{"title": title, "counts": counts} for title, counts in report.dealt],
    }


def plotly_js() -> str:
    """Return plotly's JavaScript."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_extra("plotly", "report", "lamina report") from error
    return str(get_plotlyjs())


def embed(data: Any) -> str:
    """Return JSON for a script element: no text in it can end the element or open a comment."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def html_table(table: Table) -> str:
    """Return a table with every cell escaped; page.js adds its buttons."""
    return f'<div class="table" data-name="{table.name}">{plain_table(table.head, table.rows)}</div>'


def frontier_section(frontier: Frontier) -> str:
    """Return the section of a frontier: its figure, its tables and which point is the fastest."""
    image = base64.b64encode(image_of(frontier_figure(frontier), "png")).decode()
    picture = f'<img src="data:image/png;base64,{image}" alt="Accuracy against cost" style="width: 100%">'
    tables = "".join(map(html_table, frontier.tables()))
    words = f'<p class="small">{escape(FRONTIER_WORDS)}</p>'
    return f'<section id="frontier"><h2>Frontier</h2>{picture}{tables}{words}</section>'


def _curve(curve: Trial, columns: Sequence[str], report: Report) -> dict[str, Any]:
    histories = [history for history in curve.histories if len(history)]
    costs = axes_of(report.curves)[1:]
    summary = {
        "label": curve.name,
        "limit": max((len(history) for history in curve.histories), default=0),
        "steps": [_steps(run.history if run.diverged is None else History(), report.metric) for run in curve.records],
        "touches": [_touches(history, report.metric) for history in curve.histories],
    }
    if not histories:
        return {**summary, "seeds": [], "rounds": [], "columns": {}, **{axis: [] for axis in costs}, "mean": {}}
    in_all = max(len(history) for history in histories)
    kept = np.arange(in_all)
    if in_all > MOST_ROUNDS_DRAWN:  # the page stays small
        evaluated = np.flatnonzero(~np.isnan(by_round(histories, metric_of([curve]))).all(axis=0))
        kept = thinned(evaluated if len(evaluated) else kept)
    return {
        **summary,
        "seeds": [run.seed for run in curve.records if len(run.history)],
        "thinned": f"{len(kept)} of {plural(in_all, 'round')}" if len(kept) < in_all else "",
        "rounds": (kept + 1).tolist(),
        "columns": {column: [_numbers(row) for row in by_round(histories, column)[:, kept]] for column in columns},
        **{axis: [_numbers(row) for row in spent(histories, axis)[:, kept]] for axis in costs},
        "mean": {axis: _numbers(mean_spent(histories, axis)[kept]) for axis in costs},
    }


def _steps(history: History, metric: str) -> list[list[float | None]]:
    """Return round, level, bytes and both seconds wherever the kept level improves: the cost of staying at a target."""
    levels = history.kept_level(metric, optional=True)
    places = _improvements(levels)
    down, up, seconds = (history.array(name, optional=True) for name in ("bytes_down", "bytes_up", "seconds"))
    with np.errstate(over="ignore"):
        costs = [np.nan_to_num(np.nancumsum(cost)) for cost in (down + up, seconds)]  # JSON has no infinity
    if "seconds" not in history.columns:  # a private run with secret cohorts has none
        costs[1] = np.full_like(costs[0], np.nan)
    if CLOCK in history.columns:
        costs.append(history.array(CLOCK))
    rounds = history.array("round", optional=True)[places].astype(int).tolist()
    return [list(step) for step in zip(rounds, *(_or_none(column[places]) for column in (levels, *costs)), strict=True)]


def _or_none(values: NDArray[np.float64]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _touches(history: History, metric: str) -> list[list[float]]:
    """Return round and value wherever the metric has a new best value: the first touch of any target."""
    values = history.array(metric, optional=True)
    places = _improvements(np.fmin.accumulate(values) if smaller_is_better(metric) else np.fmax.accumulate(values))
    rounds = history.array("round", optional=True)[places].astype(int).tolist()
    return [list(step) for step in zip(rounds, values[places].tolist(), strict=True)]


def _improvements(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the places where values that only improve change; some may be NaN."""
    _, firsts = np.unique(values, return_index=True)
    return np.sort(firsts[~np.isnan(values[firsts])])


def _numbers(values: Sequence[float] | NDArray[np.float64]) -> list[float | None]:
    """Return numbers with six digits; JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _read(name: str) -> str:
    return resources.files("lamina.report").joinpath(name).read_text(encoding="utf-8")
