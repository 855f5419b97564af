"""Read run folders and work out what a report says about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lamina.base.errors import BadInput
from lamina.base.text import listed, plural, printable
from lamina.experiment.runs.network_time import notes_on_time, with_clock
from lamina.experiment.runs.records import Record, find_records, read_json
from lamina.experiment.trials.trial import Trial
from lamina.report import tables
from lamina.report.curves import folder_name, group, text, without_repeats
from lamina.report.frontier import Frontier, read_frontier
from lamina.report.rates import Response, rates_table, responses
from lamina.rounds.clock import Clock
from lamina.training.metrics import is_percent

Dealt = tuple[str, list[list[int]]]  # how data were split: in words, and samples as [clients][classes]


@dataclass(frozen=True)
class Report:
    """Everything a report shows."""

    title: str
    curves: list[Trial]
    responses: list[Response]
    dealt: list[Dealt]
    targets: list[float]
    baseline: int  # index of the curve that ratios refer to: FedAvg, or else the first
    notes: list[str]  # what a reader should know about the runs
    frontiers: list[Frontier] = field(default_factory=list)  # of the folders that hold one

    @property
    def metric(self) -> str:
        """The column that targets refer to: the first metric of the runs."""
        return tables.metric_of(self.curves)

    def tables(self) -> list[tables.Table]:
        """Return every table that has rows."""
        every = [
            tables.cost_table(self.curves, self.targets, self.baseline),
            tables.results_table(self.curves, self.baseline),
            rates_table(self.responses),
            *tables.config_tables(self.curves),
            *tables.runs_tables(self.curves),
            *(table for frontier in self.frontiers for table in frontier.tables()),
        ]
        return [table for table in every if table.rows]


def build(
    folders: Sequence[Path],
    *,
    targets: Sequence[float] = (),
    title: str | None = None,
    baseline: Path | None = None,
    labels: Sequence[str] = (),
    clock: Clock | None = None,
) -> Report:
    """Return the report of some runs.

    Args:
        folders: Run folders, or folders that contain run folders, at any depth.
        targets: Values of the first metric to reach on the test data; by default chosen from the accuracies.
        title: The heading; by default a description of the data.
        baseline: The folder that holds the runs of the curve to compare others with; by default FedAvg's.
        clock: Adds the time that the runs take on its network, in place of their own clocks'.
        labels: The names of the curves, one for each of the folders; by default what differs between the curves.
    """
    if labels and len(labels) != len(folders):
        raise BadInput(f"{plural(len(labels), 'label')} for {plural(len(folders), 'folder')}: give one each")
    runs, notes = without_repeats(find_records(folders))
    final = [run for run in runs if not run.tuning] or runs  # tuning runs are shown if there are no others
    if clock is not None:
        final = [with_clock(run, clock) for run in final]
    curves = _labelled(final, folders, labels) if labels else group(final)
    metric = tables.metric_of(curves)
    for target in targets:
        if not (0 < target <= 1 if is_percent(metric) else math.isfinite(target)):
            fraction = f"{'an' if metric[0] in 'aeiou' else 'a'} {metric} above 0 and up to 1, for example 0.9"
            raise BadInput(f"--target {target:g}: must be {fraction if is_percent(metric) else 'a finite number'}")
    for run in final:
        rounds = plural(int(run.config["train"]["rounds"]), "round")
        not_finished = f"{len(run.history)} of {rounds}, not finished"
        state = "" if run.complete else run.diverged or not_finished
        if state:
            notes.append(f"{folder_name(run)}: {state}")
    tuned = responses(runs)
    notes += [response.warning for response in tuned if response.warning]
    data = dict.fromkeys(describe_data(run) for run in final)
    if len(data) > 1:
        notes.append("the runs differ in their data: compare only curves of the same data")
    judged = sorted({history.metric for curve in curves for history in curve.histories if len(history)} - {metric})
    if judged:
        notes.append(f"some runs have another first metric ({listed(judged)}), but all are judged by '{metric}' here")
    found = (read_frontier(Path(folder)) for folder in folders)
    frontiers = [frontier for frontier in found if frontier is not None and frontier.points]
    on_time = [] if clock is None else notes_on_time(final)
    notes += dict.fromkeys([*on_time, *(note for frontier in frontiers for note in frontier.notes)])
    firsts = [curve.records[0] for curve in curves]
    dealt = [read_partition(run) for run in firsts if (run.folder / "partition.json").exists()]
    return Report(
        title or " · ".join(list(data)[:3]) + (" …" if len(data) > 3 else ""),
        curves,
        tuned,
        [one for i, one in enumerate(dealt) if one not in dealt[:i]],
        sorted(set(targets)) or tables.default_targets(curves),
        _baseline(curves, baseline),
        notes,
        frontiers,
    )


def _labelled(runs: Sequence[Record], folders: Sequence[Path], labels: Sequence[str]) -> list[Trial]:
    """Return the curves of every folder under its label; if it has several, each also says what differs in it."""
    curves = []
    for folder, label in zip(folders, map(printable, labels), strict=True):
        here = [run for run in runs if run.folder.is_relative_to(folder.resolve())]
        grouped = group(here)
        curves += [replace(one, name=label if len(grouped) == 1 else f"{label}, {one.name}") for one in grouped]
        runs = [run for run in runs if run not in here]
    return curves


def _baseline(curves: Sequence[Trial], folder: Path | None) -> int:
    """Return the index of the curve whose runs are in a folder; without it FedAvg's, or else the first."""
    firsts = [curve.records[0] for curve in curves]
    chosen = (run.folder.parent == folder.resolve() if folder else run.algorithm == "fedavg" for run in firsts)
    return next((index for index, is_chosen in enumerate(chosen) if is_chosen), 0)


def read_partition(run: Record) -> Dealt:
    """Return how the data of a run were split among its clients."""
    path = run.folder / "partition.json"
    try:
        counts = np.array(read_json(path)["class_counts"], np.int64)  # numbers only: the page shows them as they are
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"'{path}' does not hold samples by client and class: delete it, or restore it") from error
    is_example = run.config["data"].get("partition", {}).get("name") == "reallocate"
    every_round = "; split again in every round: this is an example" if is_example else ""
    return f"{describe_data(run)}, seed {run.seed}{every_round}", counts.tolist()


def describe_data(run: Record) -> str:
    """Return the data and their partition in words: ``digits, classes (k=2), 20 clients``."""
    data = run.config["data"]
    partition = {"name": "iid", **data.get("partition", {})}
    name = partition.pop("name")
    options = ", ".join(f"{key}={text(value)}" for key, value in partition.items())
    clients = plural(data.get("clients", "?"), "client")
    return f"{text(data.get('name', '?'))}, {name}{f' ({options})' if options else ''}, {clients}"
