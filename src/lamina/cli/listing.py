"""``lamina list`` and ``lamina show``: the names that an experiment file may use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.base.errors import unknown
from lamina.cli.base import app, echo, out, table

if TYPE_CHECKING:  # imported in the functions that need them, because they import torch
    from lamina.algorithms.contract import Algorithm

HEADINGS = {
    "algorithms": ("name", "title", "down", "up", "keeps", "lr", "reference"),
    "models": ("name", "description", "options"),
    "datasets": ("name", "description"),
    "partitions": ("name", "description", "options"),
    "clocks": ("name", "network"),
    "papers": ("name", "claims"),
}


@app.command(name="list")
def list_(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, partitions, clocks or papers")
    ],
) -> None:
    """List what can be named in an experiment file, or the papers' experiments for `lamina reproduce`."""
    if what not in HEADINGS:
        raise unknown("list", what, HEADINGS)
    if what == "algorithms":
        caption = "down, up, keeps: models (d parameters) per active client and round"
        optional = ("reference", "title", "keeps")
        out.print(table(HEADINGS[what], rows_of(what), no_wrap=("name",), optional=optional, caption=caption))
    else:
        out.print(table(HEADINGS[what], rows_of(what)))


def rows_of(what: str) -> list[list[str]]:
    """Return the rows of a list."""
    from lamina import models
    from lamina.algorithms import BUILT_IN, find
    from lamina.data import partitions
    from lamina.data.readers import sources
    from lamina.data.readers.own import FORMATS
    from lamina.experiment.config import load
    from lamina.experiment.trials.reproduction import papers
    from lamina.rounds import clock

    if what == "algorithms":
        return [_algorithm_row(find(name)) for name in sorted(BUILT_IN)]
    if what == "models":
        return [
            [name, card.description, ", ".join(f"{key}={value}" for key, value in card.options.items())]
            for name, card in models.registry().items()
        ]
    if what == "datasets":
        return [[name, each.description] for name, each in (sources.SOURCES | FORMATS).items()]
    if what == "partitions":
        return [[name, text, ", ".join(_partition_options(name))] for name, text in partitions.describe().items()]
    if what == "clocks":
        presets = clock.PRESETS.items()
        return [[name, ", ".join(f"{key}={value}" for key, value in preset.items())] for name, preset in presets]
    return [[name, "\n".join(claim.text for claim in load(file).claim)] for name, file in papers().items()]


def _algorithm_row(kind: type[Algorithm]) -> list[str]:
    from lamina.rounds.ledger import wire_cost

    cost, card = wire_cost(kind()), kind.card
    sizes = [f"{size:g}" for size in (cost.down, cost.up, cost.client_state)]
    return [card.name, card.title, *sizes, f"{card.lr:g}", card.reference]


def _partition_options(name: str) -> list[str]:
    """Return a partition's options with their defaults, as an experiment file has them."""
    from lamina.data.partitions import PARTITIONS, Reallocate

    if PARTITIONS[name] is Reallocate:
        return ["base=iid", "and the options of the base"]
    fields = dataclasses.fields(PARTITIONS[name])
    return [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields]


@app.command()
def show(name: Annotated[str, typer.Argument(help="an algorithm, an experiment file, or a run's folder")]) -> None:
    """Show an algorithm's options and presets, what an experiment file trains and sends, or what a run has reached."""
    if name.endswith(".toml"):
        _show_experiment(Path(name))
        return
    if Path(name).exists():
        _show_run(Path(name))
        return
    from lamina.algorithms import find

    _show_algorithm(find(name))


def _show_run(folder: Path) -> None:
    """Show what a run trains, how far it is, its last and its best value, and how its model is used."""
    from lamina.experiment.runs.folder import summary
    from lamina.experiment.runs.records import has_no_budget, read_record

    record = read_record(folder)
    history, rounds = record.history, record.config["train"]["rounds"]
    echo(summary(record.config))
    complete = "complete"
    if len(history) < rounds:
        spent = has_no_budget(history, record.config)
        why = "one more round would exceed the privacy budget" if spent else "as train.patience says"
        complete += f": stopped early, {why}"
    state = f"diverged: {record.diverged}" if record.diverged else complete if record.complete else "not complete"
    echo(f"{len(history)} of {rounds} rounds, {state}")
    metric = history.metric
    if metric in history.columns:
        values = [row[metric] for row in history if metric in row]
        echo(f"{metric}: last {values[-1]:.4f}, best {history.best():.4f}")
    if (folder / "model.safetensors").exists():
        echo(f"use its model: lamina predict {folder} new.csv, or lamina.load('{folder}')")


def _show_algorithm(kind: type[Algorithm]) -> None:
    from lamina.algorithms.declaration import allowed, options

    reference = ", ".join(part for part in (kind.card.reference, kind.card.link) if part)
    echo(f"{kind.card.title}{reference and f' ({reference})'}; lr {kind.card.lr:g} unless given")
    rows: list[list[Any]] = [
        [option, str(field.default), allowed(kind, option), field.metadata["doc"]]
        for option, field in options(kind).items()
    ]
    out.print(table(("option", "default", "allowed", "meaning"), rows))
    for preset, values in kind.card.presets.items():
        echo(f"preset {preset}: {', '.join(f'{key} = {value}' for key, value in values.items())}")


def _show_experiment(file: Path) -> None:
    """Show how many parameters are trained, what a client receives and sends, and which engine trains it."""
    from lamina.engines.personal import unpack
    from lamina.experiment.build import build, load_data
    from lamina.experiment.config import load
    from lamina.experiment.trials.compare import with_algorithm
    from lamina.objective.objective import buffer_bytes
    from lamina.rounds.ledger import upload_bytes, wire_cost
    from lamina.rounds.plan import count_exchanges

    experiment = load(file)
    names = [experiment.algorithm.name]
    if "compare" in experiment.model_fields_set:
        names = experiment.compare.algorithms
    splits = load_data(experiment)
    simulations = {name: build(with_algorithm(experiment, name), splits) for name in names}
    objective = simulations[names[0]].objective
    note = objective.frozen_note() or f"trains and sends all of its {objective.layers.size:,} parameters"
    echo(f"{experiment.model.name} {note}")
    size, statistics = objective.dtype.itemsize, buffer_bytes(objective.shared_buffers(objective.buffers))
    rows = []
    for name, simulation in simulations.items():
        cost = wire_cost(simulation.algorithm)
        record = simulation.start()[1]
        private_bytes = upload_bytes(record) - upload_bytes(unpack(record).client)  # the private parts
        down, up = (models * objective.shared_layers.size * size for models in (cost.down, cost.up))
        down += statistics * count_exchanges(simulation.algorithm.needs(1))  # every message down has them
        sizes = [down, up + statistics, cost.client_state * objective.layers.size * size + private_bytes]
        rows.append([name, *(f"{number / 1e3:,.1f} kB" for number in sizes), simulation.engine.name])
    out.print(table(("algorithm", "down", "up", "keeps", "engine"), rows, caption="per active client and round"))
    for name, why in dict.fromkeys((one.engine.name, one.engine.why) for one in simulations.values()):
        echo(f"engine {name} on {simulation.device}: {why}")
