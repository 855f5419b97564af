"""``lamina list`` and ``lamina show``: the names that an experiment file may use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.cli.base import app, echo, out, table
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
def show(name: Annotated[str, typer.Argument(help="an algorithm, or an experiment file")]) -> None:
    """Show an algorithm's options, with defaults, and its presets; or what an experiment file trains and sends."""
    if name.endswith(".toml"):
        _show_experiment(Path(name))
        return
    cards = read_catalogue()["algorithms"]
    if ":" in name:  # a class of the user's own
        from lamina.algorithms import find
        from lamina.cli.catalogue import describe

        cards[name] = describe(find(name))
    if name not in cards:
        raise unknown("algorithm", name, cards)
    card = cards[name]
    reference = f" ({card['reference']})" if card["reference"] else ""
    echo(f"{card['title']}{reference}; lr {card['lr']} unless given")
    out.print(table(("option", "default", "allowed", "meaning"), card["options"]))
    for preset, values in card["presets"].items():
        echo(f"preset {preset}: {values}")


def _show_experiment(file: Path) -> None:
    """Show how many parameters of an experiment's model are trained, and what a client receives and sends."""
    from lamina.experiment.build import build_algorithm, build_model, load_data
    from lamina.experiment.compare import with_algorithm
    from lamina.experiment.config import load
    from lamina.ledger import wire_cost
    from lamina.objective import Objective, buffer_bytes

    experiment = load(file)
    if "compare" in experiment.model_fields_set:
        names = experiment.compare.algorithms
        algorithms = {name: build_algorithm(with_algorithm(experiment, name)) for name in names}
    else:
        algorithms = {experiment.algorithm.name: build_algorithm(experiment)}
    objective = Objective(build_model(experiment, load_data(experiment).train))
    note = objective.frozen_note() or f"trains and sends all of its {objective.layers.size:,} parameters"
    echo(f"{experiment.model.name} {note}")
    size, statistics = objective.layers.size * objective.dtype.itemsize, buffer_bytes(objective.buffers)
    rows = []
    for name, algorithm in algorithms.items():
        cost = wire_cost(algorithm)
        sent = [f"{(models * size + statistics) / 1e3:,.1f} kB" for models in (cost.down, cost.up)]
        rows.append([name, *sent, f"{cost.client_state * size / 1e3:,.1f} kB"])
    out.print(table(("algorithm", "down", "up", "keeps"), rows, caption="per active client and round"))
