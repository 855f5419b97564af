"""Learning-rate schedules: the factor on the base rate in every round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from lamina.base.errors import BadInput, is_whole, short_repr
from lamina.base.limits import check_number
from lamina.base.registry import as_object, create_named, explain_options


class Schedule(Protocol):
    """A learning rate per round: a factor on the base rate."""

    def factor(self, round: int) -> float:
        """Return what the base rate is multiplied by in this round (rounds count from 1)."""


@dataclass(frozen=True)
class Constant:
    """The same rate in every round."""

    def factor(self, round: int) -> float:
        """Return 1."""
        return 1.0


CONSTANT = Constant()


@dataclass(frozen=True)
class Exponential:
    """Times `gamma` after every round (FedLADA: 0.998)."""

    gamma: float = 0.998

    def __post_init__(self) -> None:
        check_number("schedule 'exponential': gamma", self.gamma, above=0)

    def factor(self, round: int) -> float:
        """Return gamma^(round - 1)."""
        return float(self.gamma ** (round - 1))


@dataclass(frozen=True)
class Milestones:
    """Times `gamma` from each milestone round on (Fed-LAMB, ResNet-18: divided by 10 at rounds 30 and 70)."""

    at: tuple[int, ...] = (30, 70)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_number("schedule 'milestones': gamma", self.gamma, above=0)
        if not isinstance(self.at, tuple | list) or not all(is_whole(m) for m in self.at):
            raise BadInput(f"schedule 'milestones': at = {short_repr(self.at)} is not a list of whole rounds")

    def factor(self, round: int) -> float:
        """Return gamma^(number of milestones reached)."""
        return float(self.gamma ** sum(m <= round for m in self.at))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to `floor` over `rounds` rounds, and `floor` afterwards."""

    rounds: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_number("schedule 'cosine': rounds", self.rounds, above=0)
        check_number("schedule 'cosine': floor", self.floor, least=0, most=1)

    def factor(self, round: int) -> float:
        """Return floor + (1 - floor) (1 + cos(pi (round - 1) / rounds)) / 2."""
        done = min(1.0, (round - 1) / self.rounds)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


SCHEDULES: dict[str, type[Any]] = {
    "constant": Constant,
    "exponential": Exponential,
    "milestones": Milestones,
    "cosine": Cosine,
}
for _schedule in SCHEDULES.values():
    explain_options(_schedule)


def make_schedule(name: str, **options: Any) -> Schedule:
    """Make a schedule by name.

    >>> [round(make_schedule("milestones", at=(2,)).factor(r), 3) for r in (1, 2, 3)]
    [1.0, 0.1, 0.1]
    """
    schedule: Schedule = create_named("schedule", SCHEDULES, name, options)
    return schedule


def as_schedule(given: Any) -> Schedule:
    """Return a schedule given by name, as a table or as an object."""
    schedule: Schedule = as_object("schedule", given, make_schedule, "factor", "lamina.schedules.Cosine(100)")
    return schedule
