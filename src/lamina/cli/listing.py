"""``lamina list`` and ``lamina show``: the names that an experiment file may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from lamina import algorithms, models
from lamina.algorithms.contract import allowed, options
from lamina.cli.base import app, fit_columns, out, plain_table, tell
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
    rows = [
        (option, str(field.default), allowed(cls, option), field.metadata["doc"])
        for option, field in options(cls).items()
    ]
    out.print(plain_table(("option", "default", "allowed", "meaning"), rows))
    for preset, values in cls.card.presets.items():
        tell(f"preset {preset}: {', '.join(f'{k} = {v}' for k, v in values.items())}")


def list_algorithms() -> None:
    """Print name, title, wire cost and paper of every algorithm."""
    rows = []
    for name, cls in sorted(algorithms.registry().items()):
        cost, card = wire_cost(cls()), cls.card
        numbers = [f"{number:g}" for number in (cost.down, cost.up, cost.client_state, card.lr)]
        rows.append([name, card.title, *numbers, card.reference])

    def table(left_out: Sequence[str]) -> Table:
        headings = ("name", "title", "down", "up", "keeps", "lr", "reference")
        caption = "down, up, keeps: models (d parameters) per active client and round"
        if left_out:
            caption += f"; a wider terminal shows {', '.join(reversed(left_out))}"
        return plain_table(headings, rows, left_out=left_out, no_wrap=("name",), caption=caption)

    out.print(fit_columns(table, ("reference", "title", "keeps"), out))


def list_models() -> None:
    """Print name, description and options of every model."""
    rows = [
        (name, card.description, ", ".join(f"{k}={v}" for k, v in card.options.items()))
        for name, card in models.registry().items()
    ]
    out.print(plain_table(("name", "description", "options"), rows))


def list_datasets() -> None:
    """Print name and description of every data set."""
    rows = [(name, source.description) for name, source in sources.SOURCES.items()]
    out.print(plain_table(("name", "description"), rows))


def list_partitions() -> None:
    """Print name, description and options of every partition."""
    rows = [
        (name, description, ", ".join(partition_options(name))) for name, description in partitions.describe().items()
    ]
    out.print(plain_table(("name", "description", "options"), rows))


def partition_options(name: str) -> list[str]:
    """Return a partition's options with their defaults, as an experiment file has them."""
    if partitions.PARTITIONS[name] is partitions.Reallocate:
        return ["base=iid", "and the options of the base"]
    fields = dataclasses.fields(partitions.PARTITIONS[name])
    return [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields]
