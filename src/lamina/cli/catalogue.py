"""Write catalogue.json, which `lamina list` and `lamina show` print: ``python -m lamina.cli.catalogue``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lamina import models
from lamina.algorithms import BUILT_IN, Algorithm, find, options
from lamina.algorithms.contract import allowed
from lamina.data import partitions, sources
from lamina.data.own import FORMATS
from lamina.experiment.config import load
from lamina.experiment.reproduction import papers
from lamina.ledger import wire_cost


def build() -> dict[str, Any]:
    """Return what lamina offers; every value is text, as it is printed."""
    return {
        "algorithms": {name: describe(find(name)) for name in sorted(BUILT_IN)},
        "models": [
            [name, card.description, ", ".join(f"{key}={value}" for key, value in card.options.items())]
            for name, card in models.registry().items()
        ],
        "datasets": [[name, each.description] for name, each in (sources.SOURCES | FORMATS).items()],
        "partitions": [
            [name, description, ", ".join(_partition_options(name))]
            for name, description in partitions.describe().items()
        ],
        "papers": [[name, "\n".join(claim.text for claim in load(file).claim)] for name, file in papers().items()],
    }


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """Return an algorithm's card, costs, options and presets."""
    cost, card = wire_cost(cls()), cls.card
    return {
        "title": card.title,
        "down": f"{cost.down:g}",
        "up": f"{cost.up:g}",
        "keeps": f"{cost.client_state:g}",
        "lr": f"{card.lr:g}",
        "reference": card.reference,
        "options": [
            [option, str(field.default), allowed(cls, option), field.metadata["doc"]]
            for option, field in options(cls).items()
        ],
        "presets": {
            preset: ", ".join(f"{key} = {value}" for key, value in values.items())
            for preset, values in card.presets.items()
        },
    }


def _partition_options(name: str) -> list[str]:
    """Return a partition's options with their defaults, as an experiment file has them."""
    if partitions.PARTITIONS[name] is partitions.Reallocate:
        return ["base=iid", "and the options of the base"]
    fields = dataclasses.fields(partitions.PARTITIONS[name])
    return [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields]


if __name__ == "__main__":
    file = Path(__file__).with_suffix(".json")
    file.write_text(json.dumps(build(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
