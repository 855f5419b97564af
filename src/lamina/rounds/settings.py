"""The protocol record: every setting of training besides the model, the data and the algorithm.

Simulations, federations, experiment files, checkpoints and the tasks of Flower nodes all use this one record. To add a
setting: add a field here and its type to `TrainArguments`, use it, and describe it in the arguments of
`lamina.Simulation`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.declaration import option_places, options
from lamina.base.errors import BadInput, nearest, short_repr, unknown
from lamina.base.limits import MOST, MOST_BATCH, MOST_CLIENTS, check_count, check_number, check_seed
from lamina.base.registry import field_values
from lamina.channel.channel import OPEN, Channel, as_channel
from lamina.channel.codecs import Codec
from lamina.channel.privacy import Privacy, as_privacy
from lamina.data.feed import Augment, OwnAugmentation
from lamina.objective.fingerprint import value_digest
from lamina.objective.layers import Layers
from lamina.objective.losses import Loss, as_loss, instance_of_loss
from lamina.rounds.aggregation import MEAN, Aggregation, Mean, as_aggregation, name_of
from lamina.rounds.clock import Clock, as_clock
from lamina.rounds.schedules import CONSTANT, Schedule, as_schedule

log = logging.getLogger(__name__)

Sampling = Literal["exact", "bernoulli"]
Weighting = Literal["clients", "examples"]

# What a field declares about its setting. Without any of these a setting is sent to clients, makes another plan, and
# must be the same in all members of a population.
SERVER_ONLY = {"server_only": True}  # a client does not need it: the server acts on it, or each node has its own
UNPLANNED = {"unplanned": True}  # cohorts and batches do not depend on it
PER_MEMBER = {"per_member": True}  # members of a population may differ in it (the loss is compared with the model)
PROBED_ROUNDS = 100  # whose rates tell two user-defined schedules apart


class TrainArguments(TypedDict, total=False):
    """The settings of a protocol as keyword arguments; objects may be given by name."""

    lr: float | None
    schedule: Schedule | str
    participation: float
    sampling: Sampling
    cohort_cap: int | None
    min_separation: int | None
    batch_size: int | None
    epochs: int | None
    local_steps: int | None
    clip: float | None
    weighting: Weighting
    aggregation: Aggregation | str
    channel: Channel | Codec | str | Mapping[str, Any] | Sequence[Any] | None
    privacy: Privacy | Mapping[str, Any] | None
    loss: str | Loss
    augmentation: Augment | OwnAugmentation | str | None
    private: Sequence[str]
    clock: Clock | str | Mapping[str, Any] | None
    seed: int


@dataclass(frozen=True)
class TrainSettings:
    """The settings of training. See `lamina.Simulation` for what each of them means.

    The bounds are in pydantic's words, for the settings that the `[train]` section takes over as they are.
    """

    lr: float = field(metadata=UNPLANNED | PER_MEMBER)
    schedule: Schedule = field(default=CONSTANT, metadata=SERVER_ONLY | UNPLANNED | PER_MEMBER)
    participation: float = field(default=1.0, metadata=SERVER_ONLY | PER_MEMBER)
    sampling: Sampling = field(default="exact", metadata=SERVER_ONLY | PER_MEMBER)
    cohort_cap: int | None = field(default=None, metadata=SERVER_ONLY | PER_MEMBER | {"bounds": {"ge": 1}})
    min_separation: int | None = field(default=None, metadata=SERVER_ONLY | PER_MEMBER | {"bounds": {"ge": 1}})
    batch_size: int | None = 32  # None: all of a client's samples
    epochs: int | None = field(default=None, metadata=PER_MEMBER)  # None: 1, unless local_steps is given
    local_steps: int | None = field(default=None, metadata=PER_MEMBER | {"bounds": {"ge": 1, "le": MOST}})
    clip: float | None = field(default=None, metadata=UNPLANNED | PER_MEMBER | {"bounds": {"gt": 0}})
    weighting: Weighting = field(default="clients", metadata=SERVER_ONLY | UNPLANNED | PER_MEMBER)
    aggregation: Aggregation = field(default=MEAN, metadata=SERVER_ONLY | UNPLANNED)
    channel: Channel = field(default=OPEN, metadata=UNPLANNED)
    privacy: Privacy | None = field(default=None, metadata=SERVER_ONLY | UNPLANNED)
    loss: str | Loss = field(default="cross_entropy", metadata=SERVER_ONLY | UNPLANNED | PER_MEMBER)
    augmentation: Augment | OwnAugmentation | str | None = field(default=None, metadata=UNPLANNED)
    private: Sequence[str] = field(default=(), metadata=SERVER_ONLY | UNPLANNED)  # a node has its own
    clock: Clock | None = field(default=None, metadata=SERVER_ONLY | PER_MEMBER)
    seed: int = field(default=0, metadata=PER_MEMBER)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_number("lr", self.lr, above=0)
        check_number("participation", self.participation, above=0, most=1)
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        counts = {"batch_size": MOST_BATCH, "epochs": MOST, "local_steps": MOST}
        counts |= {"cohort_cap": MOST_CLIENTS, "min_separation": MOST_CLIENTS}
        for name, most in counts.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), most)
        for name, choices in (("sampling", get_args(Sampling)), ("weighting", get_args(Weighting))):
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        if self.cohort_cap is not None and self.sampling == "exact":
            raise BadInput(
                f'cohort_cap = {self.cohort_cap} needs sampling = "bernoulli": exact cohorts all have the same size'
            )
        if isinstance(self.loss, type):
            raise BadInput(f"loss is the class {self.loss.__name__}: {instance_of_loss(self.loss)}")
        if not callable(as_loss(self.loss)):
            raise BadInput(f"loss = {short_repr(self.loss)} is neither a name nor a function of (outputs, targets)")
        refuse_no_augmentation(self.augmentation)
        is_list = isinstance(self.private, Sequence) and not isinstance(self.private, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in self.private):
            raise BadInput(
                f"private = {short_repr(self.private)}: give a list of patterns of names, such as ['head.*']"
            )
        if self.clock is not None and self.clock.over_select > 1 and self.sampling != "exact":
            raise BadInput("clock.over_select draws more clients than a round needs: that needs sampling = 'exact'")
        if self.epochs is not None and self.local_steps is not None:
            raise BadInput(
                f"epochs = {self.epochs} and local_steps = {self.local_steps} both say how long a client trains: "
                "give one of them"
            )

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        settings: Mapping[str, Any],
        others: Iterable[str] = (),
        places: Mapping[str, str] | None = None,
    ) -> TrainSettings:
        """Return the protocol with these settings; the default learning rate is the algorithm's.

        `others` are arguments beside the settings, which a mistyped name may mean, and `places` has hints for names
        that belong elsewhere.
        """
        names, kind = cls.names(), type(algorithm).__name__
        for name in settings:
            if name not in names:
                of_algorithm = {
                    each: f": give it to the algorithm, lamina.{kind}({each}=…)" for each in options(type(algorithm))
                }
                of_clock = {each.name: f": give it to the clock, clock={{'{each.name}': …}}" for each in fields(Clock)}
                hint = nearest(name, [*names, *others], option_places() | of_clock | of_algorithm | dict(places or {}))
                hint = hint or "; help(lamina.Simulation) lists them"
                raise BadInput(f"there is no setting '{name}'{hint}")
        # numbers of numpy become numbers of Python, which config.json can hold
        given = {name: each.item() if isinstance(each, np.generic) else each for name, each in settings.items()}
        if isinstance(given.get("batch_size"), str) and given["batch_size"] == "full":  # as in a file
            given["batch_size"] = None
        if given.get("lr") is None:
            given["lr"] = algorithm.card.lr
        if "schedule" in given:
            given["schedule"] = as_schedule(given["schedule"])
        if isinstance(given.get("private", ()), list | None):
            given["private"] = tuple(given.get("private") or ())
        if "aggregation" in given:
            given["aggregation"] = as_aggregation(given["aggregation"])
        given["channel"] = as_channel(given.get("channel"))
        given["privacy"] = as_privacy(given.get("privacy"))
        given["clock"] = as_clock(given.get("clock"))
        return cls(**given)

    def check(self, algorithm: Algorithm, layers: Layers) -> None:
        """Refuse settings that break an algorithm, and warn of cohorts with which it does not find the right model."""
        self.channel.check(algorithm, layers)
        title = algorithm.card.title
        if algorithm.exact_messages:
            changed = {
                "channel": self.channel != OPEN,
                "privacy": self.privacy is not None,
                "aggregation": not isinstance(self.aggregation, Mean),
            }
            for name in (name for name, is_changed in changed.items() if is_changed):
                raise BadInput(f"{name}: {title} needs the mean of the uploads as they were computed: leave {name} out")
        if needs_all_clients(algorithm, self.weighting) and (self.participation < 1 or self.chooser is not None):
            log.warning(smaller_cohort(algorithm, "participation = 1"))

    @classmethod
    def names(cls, without: Mapping[str, bool] | None = None) -> list[str]:
        """Return the names of the settings, of those that do not declare `without`, such as `SERVER_ONLY`."""
        return [each.name for each in fields(cls) if without is None or not without.items() <= each.metadata.items()]

    @property
    def by_examples(self) -> bool:
        """Whether clients are weighted by their number of examples."""
        return self.weighting == "examples"

    def rate(self, number: int) -> float:
        """Return the learning rate of a round."""
        try:
            lr = self.lr * self.schedule.factor(number)
        except OverflowError:  # a power beyond the range of a float
            lr = math.inf
        if not (math.isfinite(lr) and lr > 0):
            raise BadInput(
                f"round {number}: the schedule {self.schedule} gives the learning rate {lr:g}, not one > 0: "
                "change it, or train fewer rounds"
            )
        return lr

    def steps(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return K_i, the number of local steps, of clients by their numbers of samples."""
        if self.local_steps is not None:
            return np.full_like(sizes, self.local_steps)
        return self.steps_per_epoch(sizes) * (self.epochs or 1)

    def steps_per_epoch(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of batches in one pass over the samples, with the last short one."""
        return np.ones_like(sizes) if self.batch_size is None else -(-sizes // self.batch_size)

    @property
    def chooser(self) -> Clock | None:
        """The clock, if clients may not be asked because of it; one that only measures makes no other rounds."""
        return self.clock if self.clock is not None and self.clock.chooses else None

    def same_rounds(self, other: TrainSettings) -> bool:
        """Return whether both draw the same cohorts and batches in every round."""
        planned = [*(name for name in self.names(UNPLANNED) if name != "clock"), "chooser"]
        return all(getattr(self, name) == getattr(other, name) for name in planned)

    def local_record(self, number: int) -> dict[str, Any]:
        """Return the settings that a client needs in one round, as JSON can hold them; see `from_local_record`."""
        record = self.record() | {"lr": self.rate(number), "batch_size": self.batch_size}
        return {name: value for name, value in record.items() if name in self.names(SERVER_ONLY)}

    @classmethod
    def from_local_record(cls, record: Mapping[str, Any]) -> TrainSettings:
        """Return the protocol of one client in one round; `BadInput` if the record is not one."""
        expected = cls.names(SERVER_ONLY)
        if not isinstance(record, dict) or record.keys() != set(expected):
            raise BadInput(f"the settings of a client are {', '.join(sorted(expected))}")
        augmentation = record["augmentation"]
        if augmentation is not None and not isinstance(augmentation, str):  # the name of the user's own: see `Node`
            if not isinstance(augmentation, dict) or augmentation.keys() != {each.name for each in fields(Augment)}:
                raise BadInput(f"augmentation = {short_repr(augmentation)} has other settings")
            augmentation = Augment(**augmentation)
        return cls(**{**record, "augmentation": augmentation, "channel": as_channel(record["channel"])})

    def _augmentation_record(self) -> dict[str, Any] | str | None:
        if is_own_augmentation(self.augmentation):
            return own_name(self.augmentation)
        return None if self.augmentation is None else field_values(self.augmentation)

    def record(self) -> dict[str, Any]:
        """Return the settings as an experiment file writes them: names, numbers and tables."""
        return field_values(self) | {
            "schedule": as_table(self.schedule, schedule_name(self.schedule)),
            "batch_size": "full" if self.batch_size is None else self.batch_size,
            "epochs": (self.epochs or 1) if self.local_steps is None else None,
            "aggregation": as_table(self.aggregation, name_of(self.aggregation)),
            "channel": self.channel.record(),
            "privacy": None if self.privacy is None else self.privacy.record(),
            "loss": own_name(self.loss),
            "augmentation": self._augmentation_record(),
            "private": list(self.private) or None,
            "clock": None if self.clock is None else self.clock.record(),
        }


def needs_all_clients(algorithm: Algorithm, weighting: str) -> bool:
    """Return whether an algorithm needs all clients in every round, if clients are weighted in this way."""
    return algorithm.all_clients is True or algorithm.all_clients == weighting


def smaller_cohort(algorithm: Algorithm, advice: str) -> str:
    """Return the warning that an algorithm needs all clients and a cohort is smaller, and what to set instead."""
    weighted = "" if algorithm.all_clients is True else f' with weighting = "{algorithm.all_clients}"'
    return (
        f"{algorithm.card.title}{weighted} needs all clients in every round: with smaller cohorts it diverges, or "
        f"converges to a model that depends on who took part when: set {advice}"
    )


def is_own_augmentation(augmentation: Any) -> bool:
    """Return whether an augmentation is a function of the user's, or the name of one."""
    return not (augmentation is None or isinstance(augmentation, Augment))


def refuse_no_augmentation(given: Any) -> None:
    """Refuse an augmentation that cannot be called."""
    if isinstance(given, type) or not (given is None or isinstance(given, str) or callable(given)):
        value = f"the class {given.__name__}" if isinstance(given, type) else short_repr(given)
        raise BadInput(
            f"augmentation is {value}, which changes no samples: give lamina.data.Augment(pad=4), or a "
            "function of (batch, generator)"
        )


def schedule_name(schedule: Schedule) -> str:
    """Return a schedule's name; a user-defined one that is not a dataclass is also identified by its first rates."""
    name = type(schedule).__name__.lower()
    if dataclasses.is_dataclass(schedule):
        return name
    return f"{name} {value_digest([float(schedule.factor(number)) for number in range(1, PROBED_ROUNDS + 1)])}"


def as_table(value: Any, name: str) -> dict[str, Any]:
    """Return the table of an experiment file that names an object and gives its options."""
    return {"name": name} | field_values(value)


def own_name(given: Any) -> str:
    """Return the name of a user's function that is given by itself or as "module:function"."""
    return given if isinstance(given, str) else function_name(given)


def function_name(function: Any) -> str:
    """Return the name of a user's function or callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
