"""The round plan: who trains on what, at which rate, as a pure function of (seed, round).

Every engine consumes the same plan, so every engine produces the same trajectory, every algorithm is compared
on the same clients and batches, and a resumed run continues exactly.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.algorithms.contract import Needs
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.channel.privacy import Noise
from lamina.data.parts import Indices
from lamina.rounds.clients import Clients
from lamina.rounds.clock import Task
from lamina.rounds.settings import TrainSettings

NOBODY: Indices = np.zeros(0, dtype=np.int64)
MOST_REDRAWS = 10_000  # draws of a Bernoulli cohort, which may be empty


@dataclass(frozen=True)
class RoundFacts:
    """What a server knows of a round: its active clients, and how much each of them trains. C = active clients."""

    number: int  # from 1
    lr: float
    participation: float  # |S| / N
    cohort: Indices  # [C] client ids, ascending
    examples: Indices  # [C] the number of samples of every active client, n_i
    steps: Indices  # [C] the number of local steps of every active client, K_i
    share: float  # with differential privacy: the mean over the cohort times this is the mean that is published


@dataclass(frozen=True)
class RoundPlan(RoundFacts):
    """One round of the plan. K = the largest number of steps, B = batch size."""

    samples: Sequence[Indices]  # every active client's data
    index: Indices  # [C, K, B] sample indices; positions at or past `filled` repeat a valid index
    filled: Indices  # [C, K] how many of the B are real; 0: the client has no such step
    streams: Indices  # [C] random streams of the clients in this round, for augmentation, dropout and codecs
    cohort_stream: int  # of all of them, for codecs

    def batch(self, c: int, k: int) -> Indices:
        """Return the sample indices of step k of the c-th active client."""
        return self.index[c, k, : self.filled[c, k]]

    def augment_keys(self, c: int, k: int) -> Indices:
        """Return one random word for every sample of a batch."""
        counters = sample_counters(k + 1, int(self.filled[c, k]))[k]
        return np.asarray(rng.bits(int(self.streams[c]), counters), dtype=np.int64)

    def dropout_stream(self, c: int, k: int) -> Indices:
        """Return the random stream of a batch's dropout masks [1]."""
        return dropout_streams(self.streams[c : c + 1], k + 1)[:, k]


def client_streams(seed: int, number: int, cohort: Indices) -> Indices:
    """Return the random streams of clients in a round."""
    return np.asarray(rng.fork(rng.key(seed, "client", number), cohort), dtype=np.int64)


def cohort_stream(seed: int, number: int) -> int:
    """Return the random stream that all clients of a round share."""
    return rng.key(seed, "channel", number)


def cohort_size(clients: int, participation: float) -> int:
    """Return the number of active clients in a round; under `sampling = "bernoulli"`, about their expected number."""
    return max(1, builtins.round(participation * clients))


def sample_counters(steps: int, width: int) -> Indices:
    """Return a counter for every sample of a client's round [steps, width]; it does not depend on the batch size."""
    return (np.arange(steps, dtype=np.int64)[:, None] << 32) + np.arange(width, dtype=np.int64)


def dropout_streams(streams: Indices, steps: int) -> Indices:
    """Return the random stream of every local step's dropout masks [rows, steps] from the clients' streams [rows]."""
    dropout = rng.fork(streams, -1)  # no sample's counter is negative, so augmentation draws other numbers
    return np.asarray(rng.fork(dropout[:, None], np.arange(steps, dtype=np.int64)), dtype=np.int64)


@dataclass(frozen=True)
class Demand:
    """What the algorithm asks of a client in a round, as it is known before the run."""

    down: int  # bytes, with every field that a client may keep
    up: int
    needs: Callable[[int], Needs] = field(compare=False)  # by round; the members of a population have the same


@dataclass(frozen=True)
class Plan:
    """The clients and the protocol: together with a round's number they determine the round."""

    clients: Clients
    protocol: TrainSettings
    demand: Demand | None = None  # None: the clock, if there is one, waits for all clients

    @property
    def largest_batch(self) -> int:
        """The most samples that a local step has."""
        largest = int(self.clients.parts.sizes.max(initial=1))
        return min(self.protocol.batch_size or largest, largest)

    def cohort(self, round: int) -> Indices:
        """Return the active clients: those that are drawn, without those that the clock does not wait for.

        The time it takes depends on the size of the cohort, not on the number of clients. With `min_separation`, round
        r draws from one of so many groups of clients, number r modulo `min_separation`.
        """
        drawn, clock = self._drawn(round), self.protocol.chooser
        if clock is None:
            return drawn
        asked = len(drawn) if self.protocol.sampling == "bernoulli" else self._size()
        ready = clock.ready(self._task(round, drawn), drawn, self.clients.count, self.protocol.seed)
        return drawn[clock.kept(ready, asked)]

    def _size(self, factor: float = 1.0) -> int:
        """Return the size of an exact cohort, or of one that is so many times as large."""
        return math.ceil(cohort_size(self.clients.count, self.protocol.participation) * factor)

    def _drawn(self, round: int) -> Indices:
        """Return so many clients as `exact` sampling takes, or each with an independent probability."""
        group, n = self._group(round)
        if self.protocol.sampling == "exact":
            factor = 1.0 if self.protocol.clock is None else self.protocol.clock.over_select
            drawn = rng.sample(self._stream("cohort", round), n, min(n, self._size(factor)))
        else:
            tosses = (self._toss(round, attempt) for attempt in range(MOST_REDRAWS))
            drawn = next((each for each in tosses if len(each)), NOBODY)  # an empty cohort is drawn again
            if not len(drawn):
                fraction = self.protocol.participation
                raise BadInput(f"participation = {fraction:g} of {plural(n, 'client')} draws no client: raise it")
            cap = self.protocol.cohort_cap
            if cap is not None and len(drawn) > cap:
                drawn = drawn[rng.sample(self._stream("cap", round), len(drawn), cap)]
        return drawn if group is None else group[drawn]

    @property
    def expected_size(self) -> float:
        """The number of active clients that the settings lead one to expect; under `cohort_cap`, without the cap."""
        exact = self.protocol.sampling == "exact"
        return self._size() if exact else self.protocol.participation * self.clients.count

    def chooses_nobody(self, round: int) -> bool:
        """Return whether the coins of a round choose nobody, so that its cohort is of a second draw.

        Differential privacy counts on independent coins: the uploads of such a round must not count.
        """
        return self.protocol.sampling == "bernoulli" and not len(self._toss(round, 0))

    def _toss(self, round: int, attempt: int) -> Indices:
        """Return which of the clients that a round draws from have a coin that shows heads."""
        group, n = self._group(round)
        fraction = self.protocol.participation
        probability = fraction if group is None else min(1.0, fraction * self.clients.count / n)
        return rng.coins(self._stream("cohort", round, attempt), n, probability)

    def _group(self, round: int) -> tuple[Indices | None, int]:
        """Return the clients that a round draws from (None: all) and their number."""
        if self._groups is None:
            return None, self.clients.count
        group = self._groups[round % len(self._groups)]
        return group, len(group)

    def _stream(self, purpose: str, *counters: int) -> int:
        """Return the random stream of a choice of clients: it follows from the seed, or from a private run's secret."""
        noise = self._secret
        return rng.key(self.protocol.seed, purpose, *counters) if noise is None else noise.stream(purpose, *counters)

    @property
    def _secret(self) -> Noise | None:
        """What the cohorts follow from if nobody may know them: everybody may have the seed."""
        privacy = self.protocol.privacy
        return privacy.noise if privacy is not None and privacy.secret_cohorts else None

    @functools.cached_property
    def _groups(self) -> list[Indices] | None:
        """The clients in so many random groups of equal size (± 1) that a client's rounds are far enough apart."""
        separation, count, fraction = self.protocol.min_separation, self.clients.count, self.protocol.participation
        if separation is None:
            return None
        size, smallest = cohort_size(count, fraction), count // separation
        if size > smallest:
            raise BadInput(
                f"participation = {fraction:g} of {plural(count, 'client')} needs {size} in a round, but "
                f"min_separation = {separation} leaves {smallest} to draw from: lower one of them"
            )
        order = rng.permutation(self._stream("separation"), count)
        return [np.sort(order[first::separation]) for first in range(separation)]

    def _task(self, round: int, cohort: Indices) -> Task:
        """Return what a round asks of these clients, as the clock sees it before the run."""
        assert self.demand is not None
        sizes, steps = self.amounts(cohort)
        each = np.ones(len(cohort))
        needs = self.demand.needs(round)
        gradients = count_gradients(self.protocol, needs, sizes, steps)
        return Task(gradients, self.demand.down * each, self.demand.up * each, count_exchanges(needs))

    def amounts(self, cohort: Indices) -> tuple[Indices | None, Indices]:
        """Return n_i and K_i of clients [C]; n_i is None if it is not known here but K_i does not depend on it."""
        protocol = self.protocol
        if len(self.clients.parts):
            sizes = self.clients.parts.sizes[cohort]
            return sizes, protocol.steps(sizes)
        if protocol.local_steps is None and protocol.batch_size is not None:
            raise BadInput(
                "clock: how many steps a client takes is not known before the round, because its samples are dealt "
                "anew or lie on a node: give local_steps, or a clock without deadline and over_select"
            )
        return None, protocol.steps(np.ones(len(cohort), dtype=np.int64))

    def check_clock(self) -> None:
        """Refuse a clock for another number of clients, or with a deadline that no client could ever meet."""
        clock, count, seed = self.protocol.clock, self.clients.count, self.protocol.seed
        if clock is None:
            return
        nothing, nobody = np.zeros(0), np.zeros(0, dtype=np.int64)
        clock.ready(Task(nothing, nothing, nothing), nobody, count, seed)
        if clock.deadline is not None:
            alone, everyone = dataclasses.replace(clock, server_link=None), np.arange(count)
            least = alone.ready(self._task(1, everyone), everyone, count, seed).min()
            if least > clock.deadline:
                raise BadInput(
                    f"clock.deadline = {clock.deadline:g} s: even the fastest client needs {least:.3g} s: raise it"
                )

    def same_rounds(self, other: Plan) -> bool:
        """Return whether all rounds of two plans are the same, except for their learning rates."""
        same_protocol = self.protocol.same_rounds(other.protocol) and self.demand == other.demand
        same_protocol = same_protocol and self._secret == other._secret
        return same_protocol and self.clients.same_as(other.clients)

    def round(self, number: int) -> RoundPlan:
        """Return the plan of round `number`, counted from 1."""
        cohort = self.cohort(number)
        return self.round_of(number, cohort, self.clients.samples(number, cohort))

    def published(self, number: int, active: int) -> dict[str, float]:
        """Return a round's `participation` and `share`, which differential privacy keeps from telling |S|."""
        if self.protocol.privacy is None:
            return {"participation": active / self.clients.count, "share": 1.0}
        share = 0.0 if self.chooses_nobody(number) else active / self.expected_size
        return {"participation": self.expected_size / self.clients.count, "share": share}

    def round_of(self, number: int, cohort: Indices, samples: Sequence[Indices]) -> RoundPlan:
        """Return the plan of a round for these clients and their samples.

        What a client does depends on its own number and samples alone: a client that knows only itself gets the same
        batches as in a plan of the whole cohort.
        """
        sizes = np.array([len(s) for s in samples], dtype=np.int64)
        largest = int(sizes.max())
        width = min(self.protocol.batch_size or largest, largest)  # B; None and huge batch sizes mean the whole client
        per_epoch, steps = self.protocol.steps_per_epoch(sizes), self.protocol.steps(sizes)  # [C] each
        most_steps = int(steps.max())  # K
        passes = int((-(-steps // per_epoch)).max())  # over a client's samples, the last of them perhaps not complete

        # A fresh order of every client's samples for every pass [C, passes, largest]: random keys are sorted. Positions
        # that a smaller client does not have come last, because their keys exceed the 53 bits of the random ones.
        streams = rng.fork(rng.key(self.protocol.seed, "batches", number), cohort)[:, None, None]
        streams = rng.fork(streams, np.arange(passes, dtype=np.int64)[None, :, None])
        positions = np.arange(largest, dtype=np.int64)
        keys = rng.bits(streams, positions)
        order = rng.order(np.where(positions < sizes[:, None, None], keys, (1 << 53) + positions))

        # Step k of client c takes the positions [start, start + B) in the order of pass k // per_epoch.
        c, k = np.arange(len(cohort))[:, None, None], np.arange(most_steps, dtype=np.int64)[None, :]
        start = (k % per_epoch[:, None]) * width
        filled = np.where(k < steps[:, None], np.clip(sizes[:, None] - start, 0, width), 0)
        which_pass = np.minimum(k // per_epoch[:, None], passes - 1)[..., None]
        at = np.minimum(start[..., None] + np.arange(width), sizes[:, None, None] - 1)
        padded = np.zeros((len(cohort), largest), dtype=np.int64)
        for row, ids in zip(padded, samples, strict=True):
            row[: len(ids)] = ids
        index = padded[c, order[c, which_pass, at]]

        return RoundPlan(
            number=number,
            lr=self.protocol.rate(number),
            **self.published(number, len(cohort)),
            cohort=cohort,
            examples=sizes,
            steps=steps,
            samples=samples,
            index=index,
            filled=filled,
            streams=client_streams(self.protocol.seed, number, cohort),
            cohort_stream=cohort_stream(self.protocol.seed, number),
        )


def count_gradients(
    protocol: TrainSettings, needs: Needs, sizes: NDArray[Any] | None, steps: NDArray[Any]
) -> NDArray[Any]:
    """Return how many mini-batch gradients clients with n_i samples and K_i steps compute in a round [C].

    A gradient over all data counts as one pass over them. A control variate takes each gradient at a second point too.
    """
    per_step = (1 + needs.second_gradient) * (1 + needs.control_variate)
    if not (needs.full_gradient or needs.control_variate):
        return steps * per_step
    if sizes is None:
        raise BadInput(
            "clock: the algorithm takes gradients over all of a client's data, and how many samples a client has is "
            "not known here"
        )
    return steps * per_step + protocol.steps_per_epoch(sizes)


def count_exchanges(needs: Needs) -> int:
    """Return how many messages of the server a client answers in a round."""
    return 1 + needs.control_variate
