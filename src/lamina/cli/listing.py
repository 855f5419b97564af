"""``lamina list`` and ``lamina show``: what can be named in an experiment file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from lamina import algorithms, models
from lamina.algorithms.contract import allowed, options
from lamina.cli.base import app, fit_columns, out, tell
from lamina.cli.reproduce import list_papers
from lamina.data import partitions, sources
from lamina.errors import unknown
from lamina.ledger import wire_cost


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, partitions or papers")],
) -> None:
    """List what can be named in an experiment file, or the papers' experiments for `lamina reproduce`."""
    lists = {
        "algorithms": list_algorithms,
        "models": list_models,
        "datasets": list_datasets,
        "partitions": list_partitions,
        "papers": list_papers,
    }
    if what not in lists:
        raise unknown("list", what, lists)
    lists[what]()


@app.command()
def show(name: Annotated[str, typer.Argument(help="an algorithm")]) -> None:
    """Show an algorithm's options, with defaults, and its presets."""
    cls = algorithms.find(name)
    tell(f"{cls.card.title} ({cls.card.reference}); lr {cls.card.lr:g} unless given")
    made = Table(box=None, pad_edge=False)
    for heading in ("option", "default", "allowed", "meaning"):
        made.add_column(heading, overflow="fold")
    for option, field in options(cls).items():
        made.add_row(option, str(field.default), allowed(cls, option), field.metadata["doc"])
    out.print(made)
    for preset, values in cls.card.presets.items():
        tell(f"preset {preset}: {', '.join(f'{k} = {v}' for k, v in values.items())}")


def list_algorithms() -> None:
    """Name, title, wire cost and paper of every algorithm."""
    out.print(fit_columns(algorithms_table, ("reference", "title", "keeps"), out))


def algorithms_table(left_out: Sequence[str]) -> Table:
    """All algorithms, a line each, without some of the columns."""
    caption = "down, up, keeps: models (d parameters) per active client and round"
    if left_out:
        caption += f"; a wider terminal shows {', '.join(reversed(left_out))}"
    made = Table(box=None, pad_edge=False, caption=caption)
    headings = ("name", "title", "down", "up", "keeps", "lr", "reference")
    for heading in headings:
        if heading not in left_out:
            made.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for name, cls in sorted(algorithms.registry().items()):
        cost, card = wire_cost(cls()), cls.card
        numbers = (f"{number:g}" for number in (cost.down, cost.up, cost.client_state, card.lr))
        cells = (name, card.title, *numbers, card.reference)
        made.add_row(*(escape(cell) for at, cell in zip(headings, cells, strict=True) if at not in left_out))
    return made


def list_models() -> None:
    """Name, description and options of every model."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description", "options"):
        made.add_column(heading, overflow="fold")
    for name, card in models.registry().items():
        made.add_row(name, card.description, ", ".join(f"{k}={v}" for k, v in card.options.items()))
    out.print(made)


def list_datasets() -> None:
    """Name and description of every data set."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description"):
        made.add_column(heading, overflow="fold")
    for name, source in sources.SOURCES.items():
        made.add_row(name, source.description)
    out.print(made)


def list_partitions() -> None:
    """Name, description and options of every partition."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description", "options"):
        made.add_column(heading, overflow="fold")
    for name, description in partitions.describe().items():
        made.add_row(name, description, ", ".join(partition_options(name)))
    out.print(made)


def partition_options(name: str) -> list[str]:
    """A partition's options with their defaults, as they are written in an experiment file."""
    if partitions.PARTITIONS[name] is partitions.Reallocate:
        return ["base=iid", "and the options of the base"]
    fields = dataclasses.fields(partitions.PARTITIONS[name])
    return [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields]
