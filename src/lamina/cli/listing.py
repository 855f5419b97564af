"""``lamina list`` and ``lamina show``: the names that an experiment file may use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.cli.base import app, out, table, tell
from lamina.errors import unknown

CATALOGUE = Path(__file__).with_name("catalogue.json")
HEADINGS = {
    "algorithms": ("name", "title", "down", "up", "keeps", "lr", "reference"),
    "models": ("name", "description", "options"),
    "datasets": ("name", "description"),
    "partitions": ("name", "description", "options"),
    "papers": ("name", "claims"),
}


def read_catalogue() -> dict[str, Any]:
    """Return the catalogue: a generated file, so that listing its content does not import torch."""
    return dict(json.loads(CATALOGUE.read_text(encoding="utf-8")))


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, partitions or papers")],
) -> None:
    """List what can be named in an experiment file, or the papers' experiments for `lamina reproduce`."""
    if what not in HEADINGS:
        raise unknown("list", what, HEADINGS)
    headings, rows = HEADINGS[what], read_catalogue()[what]
    if what == "algorithms":
        rows = [[name, *(card[heading] for heading in headings[1:])] for name, card in rows.items()]
        caption = "down, up, keeps: models (d parameters) per active client and round"
        optional = ("reference", "title", "keeps")
        out.print(table(headings, rows, no_wrap=("name",), optional=optional, caption=caption))
    else:
        out.print(table(headings, rows))


@app.command()
def show(name: Annotated[str, typer.Argument(help="an algorithm")]) -> None:
    """Show an algorithm's options, with defaults, and its presets."""
    cards = read_catalogue()["algorithms"]
    if ":" in name:  # a class of the user's own
        from lamina.algorithms import find
        from lamina.cli.catalogue import describe

        cards[name] = describe(find(name))
    if name not in cards:
        raise unknown("algorithm", name, cards)
    card = cards[name]
    tell(f"{card['title']} ({card['reference']}); lr {card['lr']} unless given")
    out.print(table(("option", "default", "allowed", "meaning"), card["options"]))
    for preset, values in card["presets"].items():
        tell(f"preset {preset}: {values}")
