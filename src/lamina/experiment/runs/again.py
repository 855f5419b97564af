"""The experiment that a run's ``config.json`` describes, to run it again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.experiment.config import Experiment, parse, parse_override
from lamina.experiment.runs.records import names_in, read_config, setting_differences
from lamina.experiment.toml import Tree, set_keys
from lamina.objective.losses import LOSSES
from lamina.rounds.aggregation import AGGREGATIONS
from lamina.rounds.schedules import SCHEDULES
from lamina.storage.files import as_json
from lamina.storage.identity import code_changes
from lamina.training.metrics import METRICS

OF_ONE_MACHINE = ("out", "threads", "ranks", "accept_changed_code")  # keys of [run] that are chosen anew


def load_again(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a run's ``config.json``, with ``section.key=value`` overrides applied.

    It has every setting as it was used, except for what belongs to one machine: threads, and which GPU.
    """
    if path.name != "config.json":
        raise BadInput(f"'{path}' is neither an experiment file (TOML) nor the config.json of a run")
    config = read_config(path.parent)
    if "federation" in config:
        raise BadInput(f"'{path.parent}' is a federation: run its experiment file again with `lamina flower up`")
    objects = _objects_in(config)
    if objects:
        raise BadInput(
            f"the run '{path.parent}' was started from Python with objects that no file holds ({listed(objects)}): run "
            "that script again, with another out="
        )
    tree: Tree = {name: as_in_a_file(config[name]) for name in Experiment.model_fields if name in config}
    tree["run"] = {key: value for key, value in tree["run"].items() if key not in OF_ONE_MACHINE}
    if str(tree["run"].get("device", "")).startswith("cuda"):
        tree["run"]["device"] = "auto"
    if "local_steps" in tree["train"]:
        tree["train"].pop("epochs", None)
    if tree["data"]["partition"]["name"] == "by-column":
        tree["data"].pop("clients", None)  # the column names them
    return parse(set_keys(tree, dict(map(parse_override, overrides))), source=str(path))


def folder_of_again(path: Path, *, overwrite: bool) -> Path:
    """Return the default folder of a run again, beside that of the run.

    One that holds a run is refused unless it may be replaced: to resume it, the user must name it.
    """
    folder = path.parent.resolve()
    again = Path(os.path.relpath(folder.with_name(f"{folder.name}-again")))
    if names_in(again) and not overwrite:
        raise BadInput(
            f"the folder '{again}' exists: resume the run in it with --out {again}, replace it with --overwrite, or "
            "choose another folder with --out"
        )
    return again


def changes_since(path: Path, config: Mapping[str, Any]) -> str:
    """Return in a line what a run again has else than the run: settings, data or the user's code; empty if nothing."""
    before, config = read_config(path.parent), as_json(config)
    return "; ".join(filter(None, [setting_differences(before, config), code_changes(before, config)]))


def _objects_in(config: Mapping[str, Any]) -> list[str]:
    """Return which parts of a run were objects without a name that a file could give."""
    data, train = config["data"], config["train"]
    facts = {
        "its data": "content" in data,
        "its model": "values" in config["model"],
        "its partition": "values" in data.get("partition", {}),
        "its loss": train["loss"] not in LOSSES and ":" not in train["loss"],
        "its augmentation": isinstance(data.get("augment"), str) and ":" not in data["augment"],
        "its schedule": train["schedule"]["name"] not in SCHEDULES,
        "its aggregation": train["aggregation"]["name"] not in AGGREGATIONS,
        "its metrics": any(name not in METRICS and ":" not in name for name in train.get("metrics") or ()),
    }
    return [what for what, is_object in facts.items() if is_object]


def as_in_a_file(value: Any) -> Any:
    """Return nested tables without keys that are unset, and with infinite numbers, which JSON lacks."""
    if not isinstance(value, Mapping):
        return float(value) if value in ("inf", "-inf") else value
    return {key: as_in_a_file(inner) for key, inner in value.items() if inner is not None}
