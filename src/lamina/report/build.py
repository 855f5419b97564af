"""Read run folders and work out what a report says about them, and how their data were split."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.base.errors import BadInput, LaminaError
from lamina.base.text import listed, plural
from lamina.data.partitions import Reallocate, label_counts, split_dataset
from lamina.data.parts import Labels, Parts
from lamina.data.readers import sources
from lamina.experiment.build import build_partition, count_clients
from lamina.experiment.config import parse
from lamina.experiment.runs.records import Record, find_records
from lamina.experiment.trials.trials import Trial
from lamina.report import tables
from lamina.report.curves import folder_name, group, text, without_repeats
from lamina.report.rates import Response, rates_table, responses
from lamina.storage.identity import splits_digest
from lamina.training.metrics import is_percent


@dataclass(frozen=True)
class Dealt:
    """The samples of every client."""

    title: str
    parts: Parts
    labels: Labels | None

    @property
    def counts(self) -> list[list[int]]:
        """Samples as [clients][classes], or a single column of sizes if there are no classes."""
        if self.labels is None:
            return [[len(part)] for part in self.parts]
        return label_counts(self.parts, self.labels).tolist()  # type: ignore[no-any-return]


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

    @property
    def metric(self) -> str:
        """The column that targets refer to: the first metric of the runs."""
        return tables.metric_of(self.curves)

    def tables(self) -> list[tables.Table]:
        """Return every table that has rows."""
        every = [
            tables.cost_table(self.curves, self.targets, self.baseline),
            tables.results_table(self.curves),
            rates_table(self.responses),
            *tables.config_tables(self.curves),
            *tables.runs_tables(self.curves),
        ]
        return [table for table in every if table.rows]


def build(
    folders: Sequence[Path],
    *,
    targets: Sequence[float] = (),
    title: str | None = None,
    read_data: bool = False,
) -> Report:
    """Return the report of some runs.

    Args:
        folders: Run folders, or folders that contain run folders, at any depth.
        targets: Values of the first metric to reach on the test data; by default chosen from the accuracies.
        title: The heading; by default a description of the data.
        read_data: Read the data of the runs, to show how they were split. Their configurations say which files are
            opened, so the folders must be from somebody you trust.
    """
    runs, notes = without_repeats(find_records(folders))
    final = [run for run in runs if not run.tuning] or runs  # tuning runs are shown if there are no others
    curves = group(final)
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
        notes.append("the runs differ in their data: compare only curves with the same")
    judged = sorted({history.metric for curve in curves for history in curve.histories if len(history)} - {metric})
    if judged:
        notes.append(f"some runs have another first metric ({listed(judged)}), but all are judged by '{metric}' here")
    dealt, missing = deal_again(curves) if read_data else ([], [])
    return Report(
        title or " · ".join(list(data)[:3]) + (" …" if len(data) > 3 else ""),
        curves,
        tuned,
        dealt,
        sorted(set(targets)) or tables.default_targets(curves),
        next((index for index, curve in enumerate(curves) if curve.records[0].algorithm == "fedavg"), 0),
        notes + missing,
    )


# --- the partition, recomputed from a run's configuration -------------------------------------------------------------


def deal_again(curves: Sequence[Trial]) -> tuple[list[Dealt], list[str]]:
    """Return the distinct partitions of the curves' first seeds, and a line for each that cannot be recomputed."""
    distinct: dict[str, Record] = {}
    for run in (curve.records[0] for curve in curves):
        data = {key: value for key, value in run.config.get("data", {}).items() if key != "dir"}
        distinct.setdefault(json.dumps([data, run.seed], sort_keys=True, default=str), run)
    dealt, lines = [], []
    for run in distinct.values():
        try:
            dealt.append(_deal(run))
        except LaminaError as error:
            lines.append(f"the partition of {describe_data(run)} is not shown: {error}")
    return dealt, lines


def _deal(run: Record) -> Dealt:
    data = run.config["data"]
    if "name" not in data:
        raise BadInput("the configuration names no data")
    if "content" in data or "content" in data.get("partition", {}):
        raise BadInput("the data or the partition were passed from Python as objects")
    if ":" in str(data["name"]):
        raise BadInput(f"a report does not run your function {data['name']}")
    needed = {key: value for key, value in data.items() if key != "validation" and not key.startswith("augment")}
    experiment = parse({"data": needed, "train": {"seed": run.seed}}, source=folder_name(run))
    partition = build_partition(experiment)
    section = experiment.data
    train, test = sources.load(  # a report uses no network
        section.name, section.dir, hub=False, client=section.client, **section.options()
    )
    digest = run.config.get("data_digest")
    if digest is not None and not run.on_validation_data and digest != splits_digest(train, test, partition):
        raise BadInput("the data have changed since the run")
    parts = split_dataset(partition, train, count_clients(experiment), run.seed)
    every_round = "; split again in every round: this is an example" if isinstance(partition, Reallocate) else ""
    return Dealt(f"{describe_data(run)}, seed {run.seed}{every_round}", parts, train.labels)


def describe_data(run: Record) -> str:
    """Return the data and their partition in words: ``digits, classes (k=2), 20 clients``."""
    data = run.config["data"]
    partition = {"name": "iid", **data.get("partition", {})}
    name = partition.pop("name")
    options = ", ".join(f"{key}={text(value)}" for key, value in partition.items())
    clients = plural(data.get("clients", "?"), "client")
    return f"{text(data.get('name', '?'))}, {name}{f' ({options})' if options else ''}, {clients}"
