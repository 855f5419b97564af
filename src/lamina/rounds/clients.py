"""Which samples each client holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lamina.base import rng
from lamina.base.errors import BadInput, is_number, is_whole, nearest, short_repr
from lamina.base.limits import MOST_CLIENTS, check_count, check_number
from lamina.base.text import listed, plural
from lamina.data.dataset import Dataset
from lamina.data.partitions import ByColumn, Partition, Reallocate, as_partition, split_dataset
from lamina.data.parts import Indices, Parts
from lamina.objective.fingerprint import alike

log = logging.getLogger(__name__)

DEFAULT_CLIENTS = 10
Heldout = float | Sequence[int] | Sequence[str]  # a fraction of the clients, their numbers or their names
NO_PARTS = Parts.of([])


class Reallocation(NamedTuple):
    """How every round splits the data set among its active clients."""

    partition: Partition
    labels: Indices | None
    seed: int
    samples: int


class Clients:
    """The samples of every client: fixed parts, or a new split among the active clients in every round."""

    column: NDArray[Any] | None = None  # if a column names the clients, its values by sample
    column_name: str | None = None

    def __init__(self, parts: Sequence[Any], samples: int) -> None:
        self.parts = _checked_parts(parts, samples)
        self.count = len(self.parts)
        self.reallocation: Reallocation | None = None

    @classmethod
    def elsewhere(cls, count: int) -> Clients:
        """Return clients whose samples are on other machines, so that only their number is known."""
        self = cls.__new__(cls)
        self.parts, self.count, self.reallocation = NO_PARTS, check_count("clients", count, MOST_CLIENTS), None
        return self

    def samples(self, round: int, cohort: Indices) -> Sequence[Indices]:
        """Return the sample indices of every active client in a round."""
        if self.reallocation is None:
            return [self.parts[i] for i in cohort]
        partition, labels, seed, samples = self.reallocation
        try:
            return partition.split(labels, len(cohort), rng.key(seed, "reallocate", round), samples=samples)
        except BadInput as error:
            raise BadInput(
                f"round {round} has {plural(len(cohort), 'active client')} to share the data: {error}"
            ) from error

    def same_as(self, other: Clients) -> bool:
        """Return whether both give every client the same samples in every round."""
        return self.count == other.count and self.parts == other.parts and alike(self.reallocation, other.reallocation)


def _checked_parts(parts: Sequence[Any], samples: int) -> Parts:
    """Return the parts after checking that they are not empty and share no sample, unless samples may repeat."""
    if not isinstance(parts, Parts):
        parts = Parts.of([_as_indices(client, part, samples) for client, part in enumerate(parts)])
    if not len(parts):
        raise BadInput("a federation needs at least one client")
    if not parts.sizes.all():
        client = int(np.argmin(parts.sizes))
        raise BadInput(f"client {client} has no samples: give every client at least one, or use fewer clients")
    outside = np.flatnonzero((parts.samples < 0) | (parts.samples >= samples))
    if len(outside):
        client, sample = parts.owners(outside)[0], parts.samples[outside[0]]
        raise BadInput(f"client {client} is given sample {sample}, but the data have {plural(samples, 'sample')}")
    counts = np.bincount(parts.samples)
    if counts.max() > 1 and not parts.may_repeat:  # usually a mistake in the lists, and the sample would count twice
        sample = int(np.argmax(counts > 1))
        one, other = parts.owners(np.flatnonzero(parts.samples == sample))[:2]
        whom = f"client {one} twice" if one == other else f"clients {one} and {other}"
        raise BadInput(
            f"sample {sample} is given to {whom}: give every sample to one client, or repeat it in the data on purpose"
        )
    return parts


def _as_indices(client: int, part: Any, samples: int) -> Indices:
    """Return one client's samples as indices; a boolean mask over all samples is accepted too."""
    array = np.asarray(list(part) if isinstance(part, range | set) else part)
    if array.dtype == bool:
        if array.shape != (samples,):
            raise BadInput(f"client {client}'s mask has shape {array.shape}, not ({samples},): one entry per sample")
        array = np.flatnonzero(array)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise BadInput(
            f"client {client} needs a list of whole sample numbers, not {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64).ravel()


def refuse_odd_clients(clients: Any) -> None:
    """Refuse clients that are neither a number nor lists of samples; say how a column names them."""
    if isinstance(clients, str | bool | float | dict):
        hint = f"; for a client per value of a column, give partition=lamina.data.ByColumn({clients!r})"
        raise BadInput(
            f"clients = {clients!r} is neither a whole number nor one list of samples per client"
            + (hint if isinstance(clients, str) else "")
        )


def deal(data: Dataset, clients: int | Sequence[Any] | None, partition: Any, seed: int) -> Clients:
    """Split a data set among clients: by a partition, or by lists of sample indices."""
    refuse_odd_clients(clients)
    if data.client_column is not None and partition is None:
        if clients is not None:
            raise BadInput(
                f"the data name the client of every sample (column '{data.client_column}'): leave clients out, or give "
                "a partition, which deals all samples again"
            )
        partition = ByColumn(data.client_column)
    if clients is not None and not is_whole(clients):
        if partition is not None:
            raise BadInput("partition deals samples to a number of clients, and clients are lists: give one of them")
        return Clients(cast(Sequence[Any], clients), samples=len(data))
    if clients is None and partition is None and data.columns:
        column = next(iter(data.columns))
        log.warning(
            "samples are dealt to %d clients at random; for one client per value of '%s', give "
            "partition=lamina.data.ByColumn('%s')", DEFAULT_CLIENTS, column, column,
        )  # fmt: skip
    partition = as_partition("iid" if partition is None else partition)
    if isinstance(partition, ByColumn):
        expected = None if clients is None else check_count("clients", clients, MOST_CLIENTS)
        dealt = Clients(split_dataset(partition, data, expected, seed), samples=len(data))
        dealt.column, dealt.column_name = np.asarray(data.columns[partition.column]), partition.column
        return dealt
    count = check_count("clients", DEFAULT_CLIENTS if clients is None else clients, MOST_CLIENTS)
    if isinstance(partition, Reallocate):
        dealt = Clients.elsewhere(count)  # no client keeps samples
        dealt.reallocation = Reallocation(partition, data.labels, seed, len(data))
        return dealt
    return Clients(split_dataset(partition, data, count, seed), samples=len(data))


# --- samples that no client trains on ---------------------------------------------------------------------------------


class Reserved(NamedTuple):
    """Clients that train, and the samples to evaluate on that none of them trains on."""

    training: Clients
    heldout: Parts  # of the clients that never train
    local_tests: Parts  # of every training client that has more than one sample
    tested: Sequence[int] = ()  # the numbers of these clients
    names: Sequence[Any] = ()  # of the training clients: values of the client column, else their numbers as dealt

    @property
    def dealt(self) -> int:
        """The number of clients before some were held out."""
        return self.training.count + len(self.heldout)


def reserve(clients: Clients, heldout: Heldout | None, local_test: float | None, seed: int) -> Reserved:
    """Take clients and samples out of training.

    Args:
        clients: all clients; those that train are numbered again from 0, in the same order.
        heldout: the clients that never train: a fraction of them, their numbers, or their names in the client column.
        local_test: the fraction of every other client's samples that it is evaluated on, and does not train on.
        seed: the source of the choice.
    """
    names = _names_of(clients)
    if heldout is None and local_test is None:
        return Reserved(clients, NO_PARTS, NO_PARTS, names=names)
    if clients.reallocation is not None:
        raise BadInput("held-out clients and local test splits need clients that keep their data, not 'reallocate'")
    if clients.parts.may_repeat:
        raise BadInput("held-out clients and local test splits need clients that share no sample: set refill = false")
    out = _heldout_clients(clients, heldout, seed)
    parts = list(clients.parts)
    training, tests, tested = [part for client, part in enumerate(parts) if client not in out], [], []
    if local_test is not None:
        check_number("local_test", local_test, above=0, below=1)
        for i, part in enumerate(training):
            held = min(max(1, round(local_test * len(part))), len(part) - 1)
            if held:  # a client with a single sample trains on it
                order = rng.permutation(rng.key(seed, "local_test", i), len(part))
                training[i], test = (part[np.sort(order[side])] for side in (slice(held, None), slice(held)))
                tests.append(test)
                tested.append(i)
        if not tests:
            raise BadInput("local_test needs clients with more than one sample")
    samples = int(clients.parts.samples.max()) + 1
    heldout_parts = Parts.of([parts[client] for client in sorted(out)])
    names = [name for client, name in enumerate(names) if client not in out] if out else names
    return Reserved(Clients(training, samples), heldout_parts, Parts.of(tests), tested, names)


def _names_of(clients: Clients) -> Sequence[Any]:
    """Return the clients' names, whole numbers or texts: the values of the client column, or their numbers."""
    if clients.column is None:
        return range(clients.count)
    values = clients.column[clients.parts.samples[clients.parts.bounds[:-1]]].tolist()
    return [value if isinstance(value, int) else str(value) for value in values]


def client_number(client: Any, names: Sequence[Any]) -> int:
    """Return the number, in training, of a client given by its name; 3 and "3" are the same.

    >>> client_number("north", ["east", "north"]), client_number(7, [5, 7])
    (1, 1)
    """
    if client in names and not isinstance(client, bool):
        return names.index(client)
    numbers = {str(name): number for number, name in enumerate(names)}
    if isinstance(client, bool) or str(client) not in numbers:
        is_range = list(names) == list(range(len(names)))
        known = f"0 to {len(names) - 1}" if is_range else listed([repr(name) for name in names], most=20)
        raise BadInput(f"there is no client {client!r}{nearest(str(client), numbers)} (clients that train: {known})")
    return numbers[str(client)]


def _heldout_clients(clients: Clients, heldout: Heldout | None, seed: int) -> set[int]:
    count = clients.count
    if heldout is None:
        return set()
    if is_number(heldout) and not is_whole(heldout):
        check_number("heldout_clients", heldout, above=0, below=1)
        chosen = rng.sample(rng.key(seed, "heldout_clients"), count, max(1, round(cast(float, heldout) * count)))
        out = set(chosen.tolist())
    else:
        is_list = isinstance(heldout, Iterable) and not isinstance(heldout, str | Mapping)
        numbers: list[Any] = list(heldout) if is_list else []  # type: ignore[arg-type]
        if numbers and all(isinstance(name, str) for name in numbers):
            numbers = _numbers_of(clients, numbers)
        if not numbers or not all(is_whole(number) for number in numbers):
            raise BadInput(
                f"heldout_clients = {short_repr(heldout)}: must be a fraction above 0 and below 1, or a list of "
                "clients' numbers ([3, 7]) or of values of the client column"
            )
        out = {int(number) for number in numbers}
        if not 0 <= min(out) <= max(out) < count:
            raise BadInput(f"heldout_clients = {numbers}: the clients are numbered 0 to {count - 1}")
    if len(out) >= count:
        raise BadInput(f"heldout_clients holds out all {plural(count, 'client')}: leave at least one to train")
    return out


def _numbers_of(clients: Clients, names: Sequence[str]) -> list[int]:
    """Return the numbers of clients that a column names."""
    if clients.column is None:
        raise BadInput(f"heldout_clients = {short_repr(names)}: no column names the clients; give numbers, such as [0]")
    numbers = {str(clients.column[clients.parts[client][0]]): client for client in range(clients.count)}
    for name in names:
        if name not in numbers:
            known = listed(list(numbers), most=20)
            raise BadInput(f"heldout_clients: there is no client '{name}'{nearest(name, numbers)} (clients: {known})")
    return [numbers[name] for name in names]
