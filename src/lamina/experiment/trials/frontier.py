"""Train every method with several codecs and levels of privacy: a comparison with an entry for each combination.

Codecs and levels of privacy are not combined with each other: each codec is trained without noise, and each level of
privacy with the codec of ``[channel]``. Clocks train nothing, because the time on a network follows from finished runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lamina.base.errors import BadInput
from lamina.channel.channel import Channel, as_channel
from lamina.experiment.build import build
from lamina.experiment.config import Experiment, FrontierSection
from lamina.experiment.trials.compare import Comparison, with_algorithm

SET_BY_FRONTIER = ("channel", "privacy")  # keys of [compare.options]


class Entry(NamedTuple):
    """One combination: a method of ``[compare]``, and what it is trained with."""

    method: str
    channel: Channel
    epsilon: float | None = None  # None: the privacy of the file, if any

    @property
    def label(self) -> str:
        """Return its name in the comparison, which names its folder.

        >>> Entry("fedavg", as_channel("sign")).label, Entry("fedavg", as_channel("none"), 8.0).label
        ('fedavg with sign', 'fedavg with epsilon 8')
        """
        parts = [] if self.channel == Channel() else self.channel.label.split(", ")
        parts += [] if self.epsilon is None else [f"epsilon {self.epsilon:g}"]
        return self.method + (f" with {' and '.join(parts)}" if parts else "")


def section_of(experiment: Experiment) -> FrontierSection:
    """Return the `[frontier]` section, which the file must have."""
    if experiment.frontier is None:
        raise BadInput('the file has no [frontier]: add one, with channels = ["none", "qsgd"] for example')
    return experiment.frontier


def entries_of(experiment: Experiment) -> list[Entry]:
    """Return the combinations of an experiment with a `[frontier]`, method by method."""
    section, default = section_of(experiment), as_channel(experiment.channel.model_dump())
    channels = [default] if section.channels is None else list(map(as_channel, section.channels))
    return [
        entry
        for method in experiment.compare.algorithms
        for entry in (
            *(Entry(method, channel) for channel in channels),
            *(Entry(method, default, epsilon) for epsilon in section.epsilons or ()),
        )
    ]


def as_comparison(experiment: Experiment) -> Experiment:
    """Return the comparison that trains a frontier: every entry has the options and the grid of its method."""
    section, spec, privacy = section_of(experiment), experiment.compare, experiment.privacy
    if section.epsilons is not None:
        if privacy is None:
            raise BadInput("frontier.epsilons needs [privacy] with bound and delta: add it")
        for key in ("epsilon", "noise_multiplier"):
            if getattr(privacy, key) is not None:
                raise BadInput(f"frontier.epsilons and privacy.{key} both say how much noise there is: take one out")
    for method in spec.algorithms:
        for key in SET_BY_FRONTIER:
            if key in spec.options.get(method, {}):
                raise BadInput(f"compare.options.{method}.{key}: a frontier sets it for all methods: take it out")
    entries = entries_of(experiment)
    changed = {
        "algorithms": [entry.label for entry in entries],
        "options": {entry.label: _options(experiment, entry) for entry in entries},
        "grid": {entry.label: spec.grid[entry.method] for entry in entries if entry.method in spec.grid},
    }
    return experiment.changed(compare=changed)


def _options(experiment: Experiment, entry: Entry) -> dict[str, Any]:
    """Return the table of `[compare.options]` for an entry."""
    spec = experiment.compare
    options = {
        **spec.options.get(entry.method, {}),
        "name": spec.algorithm_of(entry.method),
        "channel": entry.channel.record() or "none",
    }
    if section_of(experiment).epsilons is None:
        return options
    if entry.epsilon is None:
        return {**options, "privacy": "none"}
    # Tuning runs may be shorter, and must have the noise of the final runs.
    rounds = experiment.privacy and experiment.privacy.rounds
    return {**options, "privacy": {"epsilon": entry.epsilon, "rounds": rounds or experiment.train.rounds}}


class FrontierRuns(Comparison):
    """The runs of a frontier in a folder, whose config.json says which entry each of them belongs to."""

    def __init__(self, experiment: Experiment, folder: Path, **options: Any) -> None:
        section, entries = section_of(experiment), entries_of(experiment)
        super().__init__(as_comparison(experiment), folder, **options)
        for entry in entries:  # refuses what an algorithm cannot do before anything runs
            build(with_algorithm(self.experiment, entry.label), self._loaded)
        self._config["frontier"] = {
            "metric": self.metric,
            "clocks": section.clocks,
            "step_seconds": section.step_seconds,
            "entries": {entry.label: {"method": entry.method, "channel": entry.channel.label} for entry in entries},
        }
