"""``lamina time``: how long finished runs would have taken on a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.base.errors import BadInput
from lamina.cli.base import Runs, app, interruptible, out, table

if TYPE_CHECKING:
    from lamina.rounds.clock import Clock

CLOCKS = "lan, fibre, home, 4g, mixed, or an experiment file that has one; may be repeated; default: the runs' own"
TARGET = "value of the metric to reach on the test data; default: the highest that some run stays at"


@app.command()
@interruptible("nothing is written")
def time(
    folders: Runs,
    clocks: Annotated[list[str] | None, typer.Option("--clock", help=CLOCKS)] = None,
    step_seconds: Annotated[
        float | None, typer.Option("--step-seconds", help="seconds of a local step, in place of the clocks' own")
    ] = None,
    target: Annotated[float | None, typer.Option("--target", help=TARGET)] = None,
) -> None:
    """Print how long runs take on a network, in all and to a target: from their folders, without training."""
    from lamina.experiment.runs.network_time import notes_on_time, with_clock
    from lamina.experiment.runs.records import find_records
    from lamina.report.curves import group, without_repeats
    from lamina.report.tables import default_targets, times_table

    if step_seconds is not None and not clocks:
        raise BadInput("--step-seconds changes a clock: give one, --clock 4g")
    chosen: dict[str, Clock | None] = {name: read_clock(name, step_seconds) for name in clocks or ()}
    chosen = chosen or {"its own": None}
    every, notes = without_repeats(record for record in find_records(folders) if len(record.history))
    records = [record for record in every if not record.tuning] or every
    if not records:
        raise BadInput(f"no finished round in {', '.join(map(str, folders))}")
    timed = {name: group([with_clock(record, clock) for record in records]) for name, clock in chosen.items()}
    targets = default_targets(next(iter(timed.values()))) if target is None else [target]
    shown = times_table(timed, targets[-1] if targets else None)
    for name, clock in chosen.items():
        if clock is not None and not (clock.step_seconds or clock.flops_per_second):
            notes.append(f"{name} counts transfers alone: give --step-seconds")
    notes += notes_on_time(records)
    out.print(table(shown.head, shown.rows, right=shown.head[2:], caption="; ".join(notes)))


def read_clock(given: str, step_seconds: float | None = None) -> Clock:
    """Return a clock by its name, or that of an experiment file."""
    from lamina.rounds.clock import make_clock

    options: dict[str, Any] = {"name": given}
    if given.endswith(".toml"):
        from lamina.experiment.config import load

        section = load(Path(given)).clock
        if section is None:
            raise BadInput(f"'{given}' has no [clock]")
        options = section.table()
    if step_seconds is not None:
        options |= {"step_seconds": step_seconds, "flops_per_second": None}
    return make_clock(**options)
