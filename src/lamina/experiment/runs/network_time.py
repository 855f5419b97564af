"""The time of a finished run on a network, from its folder alone: plan from the settings, bytes from the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamina import algorithms
from lamina.base.errors import BadInput
from lamina.data.parts import Indices, Parts
from lamina.data.samples import sample_like
from lamina.experiment.runs.again import as_in_a_file
from lamina.experiment.runs.model_file import build_loss, build_model
from lamina.experiment.runs.records import Record, read_json
from lamina.objective.objective import Objective
from lamina.rounds.clients import Clients, reserve
from lamina.rounds.clock import Clock, as_clock
from lamina.rounds.plan import Demand, Plan
from lamina.rounds.settings import TrainSettings
from lamina.rounds.timeline import Timeline
from lamina.training.history import History
from lamina.training.timing import count_flops

PLANNED = (  # keys of [train] that plan a round
    "participation", "sampling", "cohort_cap", "min_separation", "batch_size", "local_steps", "seed",
)  # fmt: skip


OTHER_COHORTS = "private runs with secret cohorts: the time of other cohorts, which the seed draws in the same way"


def notes_on_time(records: Iterable[Record]) -> list[str]:
    """Return what a reader of the runs' times on a network should know."""
    return [OTHER_COHORTS] if any(map(_has_other_cohorts, records)) else []


def _has_other_cohorts(record: Record) -> bool:
    """Return whether the cohorts of a run are secret, so that its time is that of cohorts drawn in the same way."""
    return bool(record.config.get("privacy")) and "seconds" not in record.history.columns


def with_clock(record: Record, clock: Clock | None = None) -> Record:
    """Return a run with the column ``clock_seconds`` of a clock; None: of its own, which it must have."""
    try:
        clock_of_run = as_clock(record.config.get("clock"))
        if clock is not None and clock.chooses:
            raise BadInput("the cohorts of a finished run are fixed: take deadline and over_select out of the clock")
        if clock is None:
            if clock_of_run is None:
                raise BadInput("the run has no clock: give one, --clock 4g")
            is_hidden = "privacy" in record.config and "clock_seconds" not in record.history.columns
            if not is_hidden:
                if len(record.history):
                    record.history.array("clock_seconds")  # refuses a history without it
                return record
            clock = clock_of_run
        return dataclasses.replace(record, history=_timed(record, clock, clock_of_run))
    except BadInput as error:
        raise BadInput(f"'{record.folder}': {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"'{record.folder}': config.json or a round lacks what a clock needs: {error!r}") from error


def _timed(record: Record, clock: Clock, own: Clock | None) -> History:
    """Return the rounds of a run with their seconds on a clock."""
    rows, options = record.history, as_in_a_file(record.config["algorithm"])
    options.pop("preset", None)  # its values are among the options
    algorithm = algorithms.create(**options)
    clients, has_sizes = _clients(record)
    train = record.config["train"]
    settings = {key: train[key] for key in PLANNED if train.get(key) is not None}
    if train.get("local_steps") is None:
        settings["epochs"] = train.get("epochs")
    plan = Plan(clients, TrainSettings.of(algorithm, {**settings, "clock": own}))
    if len(rows):  # in the first round, clients receive all that they may keep
        down, up = (int(rows[0][name] / rows[0]["clients"]) for name in ("bytes_down", "bytes_up"))
        plan = dataclasses.replace(plan, demand=Demand(down, up, algorithm.needs))
    if clock.flops_per_second is not None:
        clock = clock.with_flops(_count_flops(record, plan))
    took_part = _took_part(record.folder)
    timeline, timed = Timeline(clock, plan.protocol, algorithm, clients.count), History(metric=rows.metric)
    for row in rows:
        number = int(row["round"])
        cohort = took_part[number] if number in took_part else plan.cohort(number)
        sent = row
        if plan.protocol.sampling == "bernoulli" and "privacy" in record.config:  # rows are of the expected cohort
            ratio = len(cohort) / row["clients"]
            sent = {**row, **{name: row[name] * ratio for name in ("bytes_down", "bytes_up")}}
        elif len(cohort) != row["clients"]:
            raise BadInput(
                f"round {number} had {row['clients']:g} clients, and its config.json plans {len(cohort)}: it was "
                "planned otherwise"
            )
        sizes, steps = _amounts(plan, cohort, row, has_sizes)
        timed.append({**row, "clock_seconds": timeline.add(sent, cohort, sizes, steps)})
    return timed


def _count_flops(record: Record, plan: Plan) -> int:
    """Return the FLOPs of a mini-batch's gradient, with the model of a run's folder and samples of zeros."""
    path = record.folder / "model.json"
    batch = plan.largest_batch if len(plan.clients.parts) else plan.protocol.batch_size
    if batch is None or not path.exists():
        what = "what the model is" if batch else "how large a batch is"
        raise BadInput(f"clock.flops_per_second: the folder does not say {what}: give step_seconds")
    facts = read_json(path)
    like = sample_like(facts["samples"])
    objective = Objective(build_model(facts["model"], like), build_loss(facts["loss"]))
    return count_flops(objective, like.subset([0] * batch), batch)


def _amounts(plan: Plan, cohort: Indices, row: Mapping[str, Any], has_sizes: bool) -> tuple[Any, Any]:
    """Return n_i and K_i of a round's clients.

    If the folder does not say them, each client has the mean number of steps, and the samples that they stand for.
    """
    protocol = plan.protocol
    if has_sizes:
        sizes, steps = plan.amounts(cohort)
        if steps.sum() == row.get("steps", steps.sum()):
            return sizes, steps
    # a run with differential privacy has no column of steps, but `local_steps`
    total = row["steps"] if "steps" in row else (protocol.local_steps or 0) * len(cohort)
    steps = np.full(len(cohort), total / len(cohort))
    if protocol.local_steps is not None:
        return None, steps
    return steps / (protocol.epochs or 1) * (protocol.batch_size or 1), steps


def _clients(record: Record) -> tuple[Clients, bool]:
    """Return the clients that train, and whether their numbers of samples are known."""
    data, path = record.config["data"], record.folder / "partition.json"
    keeps_data = data["partition"]["name"] != "reallocate"
    counts = read_json(path)["class_counts"] if path.exists() and keeps_data else None
    heldout, local_test = data.get("heldout_clients"), data.get("local_test")
    if isinstance(heldout, list) and isinstance(heldout[0], str):  # which numbers these have is not in the folder
        return Clients.elsewhere(int(data["clients"]) - len(heldout)), False
    if counts is None and heldout is None:
        return Clients.elsewhere(int(data["clients"])), False
    sizes = [2] * int(data["clients"]) if counts is None else [sum(row) for row in counts]
    samples = sum(sizes)
    dealt = Clients(Parts(np.arange(samples), np.concatenate([[0], np.cumsum(sizes)])), samples)
    return reserve(dealt, heldout, local_test, record.seed).training, counts is not None


def _took_part(folder: Path) -> dict[int, Indices]:
    """Return the clients of every round of a federation; of a simulation, nothing."""
    path, cohorts = folder / "federation.jsonl", {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill has cut off
            entry = json.loads(line)
            if entry["complete"]:
                cohorts[int(entry["round"])] = np.array([each["client"] for each in entry["took_part"]], np.int64)
    return cohorts
