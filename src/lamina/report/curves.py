"""Group runs that differ only in their seed into curves, named by what differs between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lamina.base.text import printable
from lamina.channel.channel import as_channel
from lamina.experiment.runs.records import Record, flatten
from lamina.experiment.trials.settings import short_names
from lamina.experiment.trials.trial import Trial
from lamina.storage.identity import json_digest

SEED = "train.seed"
NOISE = "privacy.noise_id"  # follows from the seed
RATE = "train.lr"
CODEC = "channel.codec"
EPSILON, MULTIPLIER = "privacy.epsilon", "privacy.noise_multiplier"
Flat = dict[str, Any]
LONGEST_LABEL = 70  # characters; longer ones name no more than tells the curves apart
# the keys that a label names first
WELL_KNOWN = ("data.name", "model.name", "train.lr", "data.partition", "channel.", "privacy.epsilon")
DIGESTS = ("values", "content", "digest")  # the ends of keys that say nothing to a reader


def group(runs: Iterable[Record], ignored: Callable[[Record], set[str]] = lambda run: {SEED, NOISE}) -> list[Trial]:
    """Return the curves of some runs, as trials with their label as name: runs of one configuration, one per seed.

    `ignored` returns the keys of a run that separate no curves.
    """
    members: dict[str, list[Record]] = {}
    for run in runs:
        members.setdefault(_key(run, ignored(run)), []).append(run)
    ordered = sorted(members.values(), key=lambda same: _place_in_comparison(same[0]))
    titles = [printable(same[0].title) for same in ordered]
    labels = _labels(titles, [identity(same[0], ignored(same[0])) for same in ordered])
    for place in [place for place, label in enumerate(labels) if labels.count(label) > 1]:
        labels[place] += f" ({folder_name(ordered[place][0])})"
    return [
        Trial(label, {}, sorted(same, key=lambda run: run.seed), len(same))
        for label, same in zip(labels, ordered, strict=True)
    ]


def without_repeats(runs: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Return the longest of repeated runs, which would count twice in every mean, and a line for each one left out."""
    runs = list(runs)
    kept: dict[str, Record] = {}
    lines = []
    for run in sorted(runs, key=lambda run: -len(run.history)):
        first = kept.setdefault(_key(run, set()), run)
        if first is not run:
            lines.append(f"{folder_name(run)} repeats {folder_name(first)}: left out")
    kept_folders = {run.folder for run in kept.values()}
    return [run for run in runs if run.folder in kept_folders], lines


def differing(flats: list[Flat]) -> list[str]:
    """Return the keys that some lack or that have different values, in order of appearance."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in keys if any(key not in flat or flat[key] != flats[0].get(key) for flat in flats)]


def text(value: Any) -> str:
    """Return a value of a configuration as text."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return printable(value) if isinstance(value, str) else json.dumps(value)


def folder_name(run: Record) -> str:
    """Return the last two parts of a run's path, ``fedavg/seed0`` in a comparison."""
    return printable("/".join(run.folder.parts[-2:]))


def sections(run: Record) -> dict[str, Any]:
    """Return the sections of a run's configuration, without versions and other values beside them."""
    return {key: value for key, value in run.config.items() if isinstance(value, Mapping) and key != "code"}


def _key(run: Record, ignored: set[str]) -> str:
    return json.dumps([run.tuning, identity(run, ignored)], sort_keys=True)


def identity(run: Record, ignored: set[str]) -> Flat:
    """Return the settings that define an experiment: not where it ran, nor what it was compared with."""

    def matters(key: str) -> bool:
        where = key.startswith(("run.", "compare.")) and key != "run.precision"
        return not where and key != "data.dir" and key not in ignored

    flat = {key: value for key, value in flatten(sections(run)).items() if matters(key)}
    if "data_digest" in run.config and not run.on_validation_data:  # other seeds hold out other samples
        flat["data.digest"] = run.config["data_digest"]
    if run.config.get("loss_values"):
        flat["train.loss_digest"] = json_digest([run.config["loss_values"], run.config.get("code")])
    elif run.config.get("loss_digest"):  # of an earlier version
        flat["train.loss_digest"] = run.config["loss_digest"]
    return flat


def _place_in_comparison(run: Record) -> int:
    section = run.config.get("compare", {})
    order = [algorithm_of(section, label) for label in section.get("algorithms", [])]
    return order.index(run.algorithm) if run.algorithm in order else len(order)


def algorithm_of(section: Mapping[str, Any], label: str) -> str:
    """Return the algorithm that the `compare` section of a run's configuration has under a label."""
    name: str = section.get("options", {}).get(label, {}).get("name", label)
    return name


def _labels(titles: list[str], identities: list[Flat]) -> list[str]:
    """Return the algorithm's title and what differs; its options are compared within the same algorithm only.

    If that makes a long line, as of different experiments, only the keys that tell curves apart are named, those that
    readers know first. Digests are never shown, so that curves may have the same label.
    """
    name = "algorithm.name"
    differ = [key for key in differing(identities) if not key.endswith(DIGESTS)]
    siblings = [[other for other in identities if other.get(name) == flat.get(name)] for flat in identities]
    options = [[key for key in differing(same) if key.startswith("algorithm.")] for same in siblings]
    general = [key for key in differ if not key.startswith("algorithm.")]
    curves = list(zip(titles, identities, options, strict=True))
    labels = [_label(title, flat, [*general, *own]) for title, flat, own in curves]
    if max(map(len, labels), default=0) <= LONGEST_LABEL:
        return labels
    kept: list[str] = []
    labels = list(titles)
    candidates = [key for key in differ if not key.startswith("algorithm.") or any(key in own for own in options)]
    for added in sorted(candidates, key=lambda key: (_is_list(key, identities), not key.startswith(WELL_KNOWN))):
        keys = [key for key in candidates if key in {*kept, added}]
        longer = [_label(title, flat, keys) for title, flat, _ in curves]
        if len(set(longer)) > len(set(labels)):
            kept, labels = keys, longer
    return labels


def _label(title: str, flat: Flat, keys: list[str]) -> str:
    """Return a title with the values of some keys, without those that the run lacks, as options of another model."""
    if EPSILON in flat and flat[EPSILON] is None:  # the noise was given in place of a budget
        keys = list(dict.fromkeys(MULTIPLIER if key == EPSILON else key for key in keys))
    names = dict(zip(keys, short_names(keys), strict=True))
    shown = [key for key in flat if key in names]
    return ", ".join([title, *(_in_label(key, names[key], flat[key]) for key in shown)])


def _in_label(key: str, name: str, value: Any) -> str:
    """Return a setting as a label says it."""
    if key == CODEC:
        return as_channel(value).label
    if key == "channel.feedback":
        return "feedback" if value else "no feedback"
    return text(value) if key.endswith(".name") else f"{name} {text(value)}"


def _is_list(key: str, identities: list[Flat]) -> bool:
    return key != CODEC and any(isinstance(flat.get(key), list) for flat in identities)
