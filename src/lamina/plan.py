"""The round plan: who trains on what, at which rate, as a pure function of (seed, round).

Every engine consumes the same plan, so every engine produces the same trajectory, every algorithm is compared
on the same clients and batches, and a resumed run continues exactly.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lamina import rng
from lamina.data.partitions import Partition
from lamina.errors import BadInput, is_number, is_whole, nearest, short_repr, unknown
from lamina.limits import MOST, MOST_BATCH, MOST_CLIENTS, check_count, check_memory, check_seed
from lamina.text import plural

Indices = NDArray[np.int64]

MOST_REDRAWS = 10_000  # of an empty Bernoulli cohort
PLAN_COPIES = 2.5  # of a round's orders and batches, in memory at once while it is planned: measured


class Clients:
    """Who holds which samples: fixed lists, or dealt anew to the active clients in every round (`Reallocate`)."""

    def __init__(self, parts: Sequence[Any], samples: int) -> None:
        self.parts = [_as_indices(i, part, samples) for i, part in enumerate(parts)]
        self.count = len(self.parts)
        self.moving: tuple[Partition, Indices | None, int, int] | None = None
        if not self.parts:
            raise BadInput("a federation needs at least one client")
        _refuse_shared_samples(self.parts, samples)

    @classmethod
    def reallocated(cls, partition: Partition, labels: Indices | None, count: int, seed: int, samples: int) -> Clients:
        """Clients that own nothing: in every round the whole data set is split over the active ones."""
        if count < 1:
            raise BadInput("a federation needs at least one client")
        self = cls.__new__(cls)
        self.parts, self.count = [], check_count("clients", count, MOST_CLIENTS)
        self.moving = (partition, labels, seed, samples)
        return self

    @classmethod
    def elsewhere(cls, count: int) -> Clients:
        """Clients whose samples lie on machines of their own: here only their number is known."""
        self = cls.__new__(cls)
        self.parts, self.count, self.moving = [], check_count("clients", count, MOST_CLIENTS), None
        return self

    def samples(self, round: int, cohort: Indices) -> list[Indices]:
        """The sample indices of every active client in a round."""
        if self.moving is None:
            return [self.parts[i] for i in cohort]
        partition, labels, seed, samples = self.moving
        try:
            return partition.split(labels, len(cohort), rng.key(seed, "reallocate", round), samples=samples)
        except BadInput as error:
            raise BadInput(
                f"round {round} has {plural(len(cohort), 'active client')} to share the data: {error}"
            ) from error

    def same_as(self, other: Clients) -> bool:
        """Whether all get the same samples in every round."""
        if (self.moving is None) != (other.moving is None) or self.count != other.count:
            return False
        if self.moving is None or other.moving is None:
            return len(self.parts) == len(other.parts) and all(map(np.array_equal, self.parts, other.parts))
        (partition, labels, *rest), (others, their_labels, *their_rest) = self.moving, other.moving
        return partition == others and rest == their_rest and np.array_equal(labels, their_labels)  # type: ignore[arg-type]


def _as_indices(client: int, part: Any, samples: int) -> Indices:
    """One client's samples as indices; a boolean mask over all samples is fine too."""
    array = np.asarray(list(part) if isinstance(part, range | set) else part)
    if array.dtype == bool:
        if array.shape != (samples,):
            raise BadInput(f"client {client}'s mask has shape {array.shape}, not ({samples},): one entry per sample")
        array = np.flatnonzero(array)
    if array.size == 0:
        raise BadInput(f"client {client} has no samples: give every client at least one, or use fewer clients")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise BadInput(
            f"client {client} needs a list of whole sample numbers, not {array.dtype} of shape {array.shape}"
        )
    bad = array[(array < 0) | (array >= samples)]
    if len(bad):
        raise BadInput(f"client {client} is given sample {bad[0]}, but the data have {plural(samples, 'sample')}")
    return array.astype(np.int64)


def _refuse_shared_samples(parts: Sequence[Indices], samples: int) -> None:
    """Refuse a sample that is given out twice: usually a mistake in the lists, and it would count twice."""
    taken = np.concatenate(parts)
    counts = np.bincount(taken, minlength=samples)
    if counts.max() <= 1:
        return
    sample = int(np.argmax(counts > 1))
    owners = [client for client, part in enumerate(parts) for _ in range(int((part == sample).sum()))]
    whom = f"client {owners[0]} twice" if owners[0] == owners[1] else f"clients {owners[0]} and {owners[1]}"
    raise BadInput(
        f"sample {sample} is given to {whom}: give every sample to one client, or repeat it in the data on purpose"
    )


# --- learning rates ---------------------------------------------------------------------------------------------


class Schedule(Protocol):
    """A learning rate per round: a factor on the base rate."""

    def factor(self, round: int) -> float:
        """Return what the base rate is multiplied by in this round (rounds count from 1)."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate in every round."""

    def factor(self, round: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Exponential:
    """Times `gamma` after every round (FedLADA: 0.998)."""

    gamma: float = 0.998

    def __post_init__(self) -> None:
        _check_numbers(self, gamma=self.gamma)

    def factor(self, round: int) -> float:
        """gamma^(round - 1)."""
        return float(self.gamma ** (round - 1))


@dataclass(frozen=True)
class Milestones:
    """Times `gamma` from each milestone round on (Fed-LAMB, ResNet-18: divided by 10 at rounds 30 and 70)."""

    at: tuple[int, ...] = (30, 70)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _check_numbers(self, gamma=self.gamma)
        if not isinstance(self.at, tuple | list) or not all(is_whole(m) for m in self.at):
            raise BadInput(f"schedule 'milestones': at = {short_repr(self.at)} is not a list of whole rounds")

    def factor(self, round: int) -> float:
        """gamma^(number of milestones reached)."""
        return float(self.gamma ** sum(m <= round for m in self.at))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to `floor` over `rounds` rounds, and `floor` afterwards."""

    rounds: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, rounds=self.rounds)
        if not is_number(self.floor) or not 0 <= self.floor <= 1:
            raise BadInput(f"schedule 'cosine': floor = {self.floor!r} is not a fraction in [0, 1]")

    def factor(self, round: int) -> float:
        """floor + (1 - floor) (1 + cos(pi (round - 1) / rounds)) / 2."""
        done = min(1.0, (round - 1) / self.rounds)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


def _check_numbers(schedule: Schedule, **values: Any) -> None:
    """Refuse anything but positive finite numbers."""
    for name, value in values.items():
        if not is_number(value) or not math.isfinite(value) or value <= 0:
            raise BadInput(
                f"schedule '{type(schedule).__name__.lower()}': {name} = {short_repr(value)} is not a number > 0"
            )


SCHEDULES: dict[str, type[Any]] = {
    "constant": Constant,
    "exponential": Exponential,
    "milestones": Milestones,
    "cosine": Cosine,
}


def make_schedule(name: str, **options: Any) -> Schedule:
    """Make a schedule by name.

    >>> [round(make_schedule("milestones", at=(2,)).factor(r), 3) for r in (1, 2, 3)]
    [1.0, 0.1, 0.1]
    """
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    known = [field.name for field in dataclasses.fields(SCHEDULES[name])]
    for option in options:
        if option not in known:
            raise BadInput(f"schedule '{name}' has no option '{option}'{nearest(option, known)}")
    if name == "cosine" and "rounds" not in options:
        raise BadInput("schedule 'cosine' needs rounds >= 1, the round at which it ends")
    made: Schedule = SCHEDULES[name](**options)
    return made


# --- the plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One round of the plan. C = active clients, K = the largest number of steps, B = batch size."""

    number: int  # from 1
    lr: float
    participation: float  # |S| / N
    cohort: Indices  # [C] client ids, ascending
    samples: list[Indices]  # every active client's data
    index: Indices  # [C, K, B] sample indices; positions at or past `filled` repeat a valid index
    filled: Indices  # [C, K] how many of the B are real; 0: the client has no such step
    streams: Indices  # [C] random streams of the clients in this round, for augmentation and dropout

    @functools.cached_property
    def steps(self) -> Indices:
        """K_i, [C]."""
        return np.asarray((self.filled > 0).sum(axis=1), dtype=np.int64)

    @functools.cached_property
    def examples(self) -> Indices:
        """n_i, [C]."""
        return np.array([len(s) for s in self.samples], dtype=np.int64)

    def batch(self, c: int, k: int) -> Indices:
        """The sample indices of step k of the c-th active client."""
        return self.index[c, k, : self.filled[c, k]]

    def augment_keys(self, c: int, k: int) -> Indices:
        """One random word for every sample of a batch."""
        counters = sample_counters(k + 1, int(self.filled[c, k]))[k]
        return np.asarray(rng.bits(int(self.streams[c]), counters), dtype=np.int64)


def sample_counters(steps: int, width: int) -> Indices:
    """[steps, width]: a number for every place in a client's round, whatever the width of the batch."""
    return (np.arange(steps, dtype=np.int64)[:, None] << 32) + np.arange(width, dtype=np.int64)


def dropout_streams(streams: Indices, steps: int) -> Indices:
    """[rows, steps]: the random stream of every local step's dropout masks, from the clients' streams [rows]."""
    own = rng.fork(streams, -1)  # no sample's counter is negative, so augmentation draws other numbers
    return np.asarray(rng.fork(own[:, None], np.arange(steps, dtype=np.int64)), dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """The settings that, with (seed, round), determine a round."""

    clients: Clients
    lr: float
    schedule: Schedule = Constant()
    participation: float = 1.0  # C: the fraction of clients active in a round
    sampling: Literal["exact", "bernoulli"] = "exact"
    batch_size: int | None = 32  # None: all of a client's samples
    epochs: int | None = None  # None: 1, unless there are local_steps
    local_steps: int | None = None  # fixes K for all clients instead of epochs
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("participation", "lr"):
            if not is_number(getattr(self, name)):
                raise BadInput(f"{name} = {short_repr(getattr(self, name))} is not a number")
        check_seed(self.seed)
        if not 0 < self.participation <= 1:
            raise BadInput(f"participation = {self.participation} is not a fraction in (0, 1]")
        if self.sampling not in ("exact", "bernoulli"):
            raise unknown("sampling", self.sampling, ("exact", "bernoulli"))
        for name in ("batch_size", "epochs", "local_steps"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, MOST_BATCH if name == "batch_size" else MOST)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise BadInput(f"lr = {self.lr} is not a positive number")
        if self.epochs is not None and self.local_steps is not None:
            raise BadInput(
                f"epochs = {self.epochs} and local_steps = {self.local_steps} both say how long a client trains: "
                "give one of them"
            )

    def cohort(self, round: int) -> Indices:
        """The active clients: exactly max(1, round(C N)) of them, or an independent coin for each."""
        n = self.clients.count
        if self.sampling == "exact":
            size = max(1, builtins.round(self.participation * n))
            order = rng.permutation(rng.key(self.seed, "cohort", round), n)
            return np.sort(order[:size])
        for attempt in range(MOST_REDRAWS):  # an empty draw is thrown again
            active = rng.uniform(rng.key(self.seed, "cohort", round, attempt), n) < self.participation
            if active.any():
                return np.flatnonzero(active).astype(np.int64)
        raise BadInput(f"participation = {self.participation:g} of {plural(n, 'client')} draws nobody: raise it")

    def rate(self, number: int) -> float:
        """The learning rate of a round."""
        try:
            lr = self.lr * self.schedule.factor(number)
        except OverflowError:  # a power beyond the range of a float
            lr = math.inf
        if not (math.isfinite(lr) and lr > 0):
            raise BadInput(f"round {number}: the schedule {self.schedule} gives the learning rate {lr:g}, not one > 0")
        return lr

    def steps(self, sizes: Indices) -> Indices:
        """K_i of clients with so many samples."""
        if self.local_steps is not None:
            return np.full_like(sizes, self.local_steps)
        return self._steps_per_epoch(sizes) * (1 if self.epochs is None else self.epochs)

    def _steps_per_epoch(self, sizes: Indices) -> Indices:
        """Batches in one pass over so many samples; the last short one is kept."""
        return np.ones_like(sizes) if self.batch_size is None else -(-sizes // self.batch_size)

    def same_rounds(self, other: Plan) -> bool:
        """Whether all rounds are the same, but for the rate."""
        own, theirs = (replace(plan, clients=self.clients, lr=1.0, schedule=Constant()) for plan in (self, other))
        return own == theirs and self.clients.same_as(other.clients)

    def round(self, number: int) -> Round:
        """The plan of round `number` (from 1)."""
        cohort = self.cohort(number)
        return self.round_of(number, cohort, self.clients.samples(number, cohort))

    def round_of(self, number: int, cohort: Indices, samples: list[Indices]) -> Round:
        """The plan of a round for these clients and their samples.

        What a client does depends on its own number and samples alone: a client that knows only itself gets the same
        batches as in a plan of the whole cohort.
        """
        sizes = np.array([len(s) for s in samples], dtype=np.int64)
        lr = self.rate(number)
        # a huge batch size means the whole client, not huge arrays
        width = int(sizes.max()) if self.batch_size is None else min(self.batch_size, int(sizes.max()))
        per_epoch, steps = self._steps_per_epoch(sizes), self.steps(sizes)
        passes = int((-(-steps // per_epoch)).max())
        numbers = len(cohort) * (passes * int(sizes.max()) + int(steps.max()) * width)
        check_memory(
            f"round {number} of {plural(len(cohort), 'client')}, up to {plural(int(steps.max()), 'local step')} of "
            f"{plural(width, 'sample')},",
            int(PLAN_COPIES * numbers * np.dtype(np.int64).itemsize),
            "lower local_steps, epochs or participation",
        )

        # [C, passes, n]: every client's samples in a fresh order for every pass
        order_streams = rng.fork(rng.key(self.seed, "batches", number), cohort)[:, None, None]
        order_streams = rng.fork(order_streams, np.arange(passes, dtype=np.int64)[None, :, None])
        positions = np.arange(sizes.max(), dtype=np.int64)
        keys = rng.bits(order_streams, positions)
        beyond = positions >= sizes[:, None, None]  # the last in any order: larger than any of 53 bits
        order = rng.order(np.where(beyond, (1 << 53) + positions, keys))

        # step k of client c takes positions [start, start + B) of pass k // per_epoch
        k = np.arange(steps.max(), dtype=np.int64)[None, :]
        start = (k % per_epoch[:, None]) * width  # no client has more samples than `width` unless that is batch_size
        filled = np.where(k < steps[:, None], np.clip(sizes[:, None] - start, 0, width), 0)
        at = np.minimum(start[..., None] + np.arange(width), sizes[:, None, None] - 1)
        c = np.arange(len(cohort))[:, None, None]
        padded = np.zeros((len(cohort), int(sizes.max())), dtype=np.int64)
        for row, ids in zip(padded, samples, strict=True):
            row[: len(ids)] = ids
        which_pass = np.minimum(k // per_epoch[:, None], passes - 1)[..., None]
        index = padded[c, order[c, which_pass, at]]

        return Round(
            number=number,
            lr=lr,
            participation=len(cohort) / self.clients.count,
            cohort=cohort,
            samples=samples,
            index=index,
            filled=filled,
            streams=np.asarray(rng.fork(rng.key(self.seed, "client", number), cohort), dtype=np.int64),
        )
