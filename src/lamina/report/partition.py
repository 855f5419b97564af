"""Recompute the partition of a run from its configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina.data import sources
from lamina.data.partitions import Labels, Parts, Reallocate, label_counts, split_dataset
from lamina.errors import LaminaError
from lamina.experiment.build import build_partition, count_clients
from lamina.experiment.config import parse
from lamina.experiment.records import Record
from lamina.report.curves import Curve, folder_name, text
from lamina.text import plural


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


def deal_again(curves: Sequence[Curve]) -> tuple[list[Dealt], list[str]]:
    """Return the distinct partitions of the curves' first seeds, and a line for each that cannot be recomputed."""
    distinct: dict[str, Record] = {}
    for run in (curve.runs[0] for curve in curves):
        data = {key: value for key, value in run.config.get("data", {}).items() if key != "dir"}
        distinct.setdefault(json.dumps([data, run.seed], sort_keys=True, default=str), run)
    dealt, lines = [], []
    for run in distinct.values():
        try:
            dealt.append(_deal(run))
        except LaminaError as error:
            lines.append(f"the partition of {describe(run)} is not shown: {error}")
    return dealt, lines


def _deal(run: Record) -> Dealt:
    data = run.config["data"]
    needed = {key: data[key] for key in ("name", "dir", "clients", "partition") if key in data}
    experiment = parse({"data": needed, "train": {"seed": run.seed}}, source=folder_name(run))
    partition = build_partition(experiment)
    train = sources.load(experiment.data.name, experiment.data.dir, hub=False).train  # a report uses no network
    parts = split_dataset(partition, train, count_clients(experiment), run.seed)
    every_round = "; dealt anew in every round, this is an example" if isinstance(partition, Reallocate) else ""
    return Dealt(f"{describe(run)}, seed {run.seed}{every_round}", parts, train.labels)


def describe(run: Record) -> str:
    """Return the data and their partition in words: ``digits, classes (k=2), 20 clients``."""
    data = run.config.get("data", {})
    partition = describe_partition(**{"name": "iid", **data.get("partition", {})})
    return f"{text(data.get('name', '?'))}, {partition}, {plural(data.get('clients', '?'), 'client')}"


def describe_partition(name: str, **options: Any) -> str:
    """Return a partition and its options in words: ``classes (k=2)``."""
    settings = ", ".join(f"{key}={text(value)}" for key, value in options.items())
    return f"{name} ({settings})" if settings else name
