"""Partitions: how the samples are shared among the clients.

A partition is a frozen record with one method, `split`: a pure function of the labels, the number of clients and a seed
that returns every client's sample indices, ascending. Every sample goes to exactly one client (`Shards` leaves some
out, and `Dirichlet` with `refill` repeats others) and every client gets at least one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamina.base import rng
from lamina.base.errors import BadInput, nearest
from lamina.base.limits import MOST_CLIENTS, check_count, check_number
from lamina.base.registry import as_object, create_named, explain_options, refuse_unknown_options
from lamina.base.text import plural
from lamina.data.dataset import Dataset
from lamina.data.parts import Indices, Labels, Parts, stable_order

Columns = Mapping[str, NDArray[Any]]


@runtime_checkable
class Partition(Protocol):
    """The interface of a partition."""

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """Share the samples.

        Args:
            labels: One class per sample; None for regression.
            clients: How many clients; None when the data name them (`ByColumn`).
            seed: The same seed gives the same parts.
            columns: Further facts per sample (`Dataset.columns`).
            samples: How many samples there are, when `labels` is None.
        """
        ...


def split_dataset(partition: Partition, data: Dataset, clients: int | None, seed: int) -> Parts:
    """Split a `Dataset`, with its labels and columns."""
    return partition.split(data.labels, clients, seed, columns=data.columns, samples=len(data))


def columns_read(partition: Partition, data: Dataset) -> list[str]:
    """Return the columns that decide how a partition splits data: of a user's own partition, all of them."""
    if isinstance(partition, ByColumn):
        return [partition.column]
    return [] if type(partition) in PARTITIONS.values() else sorted(data.columns)


class _Dealt:
    """Base of the partitions among a given number of clients: `split` checks its arguments for `_deal`."""

    name: ClassVar[str]
    needs_labels: ClassVar[bool] = True

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """Share the samples; see `Partition.split`."""
        if self.needs_labels and (labels is None or np.ndim(labels) != 1 or np.asarray(labels).dtype.kind not in "iu"):
            raise BadInput(
                f"{self.name} needs one class per sample, which regression data, maps and several targets lack; use "
                "iid, a column or lists of indices, or give one-hot labels as class numbers, y.argmax(1)"
            )
        labels = np.zeros(samples or 0, np.int64) if labels is None else np.asarray(labels)
        clients = check_count(f"{self.name}: clients", clients, MOST_CLIENTS)
        if clients > len(labels):
            raise BadInput(
                f"{self.name}: {plural(clients, 'client')} cannot share {plural(len(labels), 'sample')}; "
                f"use at most {plural(len(labels), 'client')}"
            )
        return self._deal(labels, clients, seed)

    def _deal(self, labels: Labels, clients: int, seed: int) -> Parts:
        raise NotImplementedError


@dataclass(frozen=True)
class IID(_Dealt):
    """Every client gets a random share; sizes differ by at most one."""

    name = "iid"
    needs_labels = False

    def _deal(self, labels: Labels, clients: int, seed: int) -> Parts:
        order = rng.permutation(rng.key(seed, "partition-iid"), len(labels))
        owners = np.empty_like(order)
        owners[order] = np.repeat(np.arange(clients), _equal_shares(len(labels), clients))
        return Parts.by_owner(owners, clients)


@dataclass(frozen=True)
class Dirichlet(_Dealt):
    """Every client has its own mix of classes, drawn from a Dirichlet distribution.

    ``sizes="equal"``: a client draws its class proportions from Dir(alpha, ..., alpha) on balanced classes, in
    general from Dir(alpha * classes * prior), where the prior is the share of each class in the data. It takes
    its equal share of the samples from the class pools, without replacement; a class whose pool is empty drops
    out of its proportions. Hsu et al. 2019 write the same with alpha * prior: their alpha is this one times the
    number of classes. Most codes and papers, FedLADA's among them, mean the alpha used here.

    ``sizes="natural"``: each class is shared over the clients by proportions from Dir(alpha, ..., alpha),
    so that sizes vary too. A client that would get nothing is given one sample of the largest client.

    ``refill=True`` changes the equal sizes: samples are dealt one by one to a random client that has room, each of a
    class drawn from the client's own proportions. A class pool that runs out starts again from its full list, so some
    samples are used twice and others never. FedLADA's first author splits the data like this.
    """

    name = "dirichlet"
    alpha: float = 0.5
    sizes: Literal["equal", "natural"] = "equal"
    refill: bool = False

    def __post_init__(self) -> None:
        # beyond these bounds, Dirichlet draws lose their precision
        check_number("dirichlet: alpha", self.alpha, least=1e-4, most=1e6)
        if self.sizes not in ("equal", "natural"):
            raise BadInput(f"dirichlet: sizes must be 'equal' or 'natural', found {self.sizes!r}")
        if not isinstance(self.refill, bool):
            raise BadInput(f"dirichlet: refill must be true or false, found {self.refill!r}")
        if self.refill and self.sizes != "equal":
            raise BadInput("dirichlet: refill deals clients of equal size: remove sizes = 'natural'")

    def _deal(self, labels: Labels, clients: int, seed: int) -> Parts:
        _, kinds, pools = np.unique(labels, return_inverse=True, return_counts=True)
        draw = rng.generator(seed, "partition-dirichlet")
        if self.refill:
            return self._refilled(draw, kinds, pools, clients, seed)
        counts = self._equal(draw, pools, clients) if self.sizes == "equal" else self._natural(draw, pools, clients)
        return _deal_by_class(kinds, counts, seed)

    def _concentrations(self, pools: Labels) -> NDArray[np.float64]:
        return self.alpha * len(pools) * pools / int(pools.sum())

    def _refilled(self, draw: np.random.Generator, kinds: Labels, pools: Labels, clients: int, seed: int) -> Parts:
        """Deal the samples one by one; see `refill`."""
        n, classes = len(kinds), len(pools)
        shares, turns = _equal_shares(n, clients), n
        dealt = np.zeros(0, bool)
        while dealt.sum() < n:  # turns of full clients are skipped
            turns *= 2
            client = rng.bits(rng.key(seed, "partition-turns"), np.arange(turns, dtype=np.int64)) % clients
            dealt = _occurrences(client) < shares[client]
        client = client[dealt]
        # The cumulative proportions of client i lie in (i, i + 1], so that one search finds the classes of all draws.
        number = np.arange(clients)[:, None]
        ends = np.minimum(
            number + np.cumsum(draw.dirichlet(self._concentrations(pools), size=clients), axis=1), number + 1
        )
        ends[:, -1] = number[:, 0] + 1
        drawn = client + rng.uniform(rng.key(seed, "partition-draws"), n)
        kind = np.searchsorted(ends.ravel(), drawn, side="right") - client * classes
        kind = np.minimum(kind, classes - 1)
        order = _shuffled_by_class(kinds, seed)
        samples = order[(np.cumsum(pools) - pools)[kind] + _occurrences(kind) % pools[kind]]
        by_client = np.lexsort((samples, client))
        return Parts(samples[by_client], np.concatenate([[0], np.cumsum(shares)]), may_repeat=True)

    def _equal(self, draw: np.random.Generator, pools: Labels, clients: int) -> Labels:
        """[clients, classes] counts whose rows have equal sums (to one) and whose columns empty the pools."""
        n, concentrations = int(pools.sum()), self._concentrations(pools)
        proportions = draw.dirichlet(concentrations, size=clients)
        left = pools.copy()
        counts = np.zeros((clients, len(pools)), np.int64)
        for client, share in enumerate(_equal_shares(n, clients)):
            while share > 0:
                # Drawing all at once and redrawing what a pool could not give has the law of
                # drawing sample after sample from the proportions over the non-empty pools.
                wanted = np.where(left > 0, proportions[client], 0.0)
                if wanted.sum() < 1e-12:
                    # Too little to renormalise in floating point. Renormalised Dirichlet proportions are
                    # Dirichlet again, whatever their sum was, so drawing them afresh is exact.
                    wanted[left > 0] = draw.dirichlet(concentrations[left > 0])
                    proportions[client] = wanted
                taken = np.minimum(draw.multinomial(share, wanted / wanted.sum()), left)
                counts[client] += taken
                left -= taken
                share -= taken.sum()
        # The last clients take what is left: shuffled, so that a client's number says nothing.
        return counts[draw.permutation(clients)]

    def _natural(self, draw: np.random.Generator, pools: Labels, clients: int) -> Labels:
        """[clients, classes] counts: column c splits pool c by its own Dirichlet proportions."""
        proportions = draw.dirichlet(np.full(clients, self.alpha), size=len(pools))
        ends = np.rint(np.cumsum(proportions, axis=1) * pools[:, None]).astype(np.int64)
        ends[:, -1] = pools
        counts: Labels = np.diff(ends, axis=1, prepend=0).T
        sizes = counts.sum(axis=1)
        for empty in np.flatnonzero(sizes == 0):
            rich = int(np.argmax(sizes))
            kind = int(np.argmax(counts[rich]))
            counts[rich, kind] -= 1
            counts[empty, kind] += 1
            sizes[rich] -= 1
            sizes[empty] += 1
        return counts


@dataclass(frozen=True)
class Classes(_Dealt):
    """Every client holds exactly k classes; every class has as many holders as any other, to one.

    Which classes go together is random. A class is shared evenly among its holders.
    """

    name = "classes"
    k: int = 2

    def __post_init__(self) -> None:
        check_count("classes: k", self.k)

    def _deal(self, labels: Labels, clients: int, seed: int) -> Parts:
        values, kinds, pools = np.unique(labels, return_inverse=True, return_counts=True)
        if self.k > len(values):
            raise BadInput(
                f"classes: k = {plural(self.k, 'class', 'classes')} per client, but the data have only {len(values)}"
            )
        if clients * self.k < len(values):
            raise BadInput(
                f"classes: {plural(clients, 'client')} with {plural(self.k, 'class', 'classes')} each cannot hold all "
                f"{len(values)} classes; use at least {plural(-(-len(values) // self.k), 'client')} or a larger k"
            )
        holds = self._holders(seed, clients, len(values))
        holders = holds.sum(axis=0)
        short = np.flatnonzero(pools < holders)
        if len(short):
            kind = int(short[0])
            raise BadInput(
                f"classes: class {values[kind]} has {plural(pools[kind], 'sample')} for "
                f"{plural(holders[kind], 'client')}; use fewer clients or a smaller k"
            )
        # A holder's turn (0, 1, ...) among those of its class decides who gets the remainder.
        turn = np.cumsum(holds, axis=0) - 1
        counts = holds * (pools // holders + (turn < pools % holders))
        # Remainders and classes with fewer holders fall to the first: shuffled, a client's number says nothing.
        counts = counts[rng.permutation(rng.key(seed, "partition-clients"), clients)]
        return _deal_by_class(kinds, counts, seed)

    def _holders(self, seed: int, clients: int, classes: int) -> NDArray[np.int64]:
        """[clients, classes] of 0 and 1: each client takes the k classes with fewest holders so far, ties at random."""
        holds = np.zeros((clients, classes), np.int64)
        so_far = np.zeros(classes, np.int64)
        ties = rng.uniform(rng.key(seed, "partition-classes"), clients * classes).reshape(clients, classes)
        for client in range(clients):
            chosen = np.argsort(so_far + ties[client])[: self.k]
            holds[client, chosen] = 1
            so_far[chosen] += 1
        return holds


@dataclass(frozen=True)
class Shards(_Dealt):
    """Every client gets a few of many equal pieces of the samples sorted by label; the other pieces go to nobody.

    McMahan et al.'s label skew as the Fed-LAMB authors' code has it: 50 clients with 2 of 200 shards each use half of
    the data. A client sees few labels, but a piece may straddle two of them.
    """

    name = "shards"
    shards: int = 200
    per_client: int = 2

    def __post_init__(self) -> None:
        check_count("shards: shards", self.shards)
        check_count("shards: per_client", self.per_client)

    def _deal(self, labels: Labels, clients: int, seed: int) -> Parts:
        n = len(labels)
        if self.shards > n:
            raise BadInput(f"shards: {plural(n, 'sample')} cannot be cut into {self.shards} shards; use at most {n}")
        if clients * self.per_client > self.shards:
            raise BadInput(
                f"shards: {plural(clients, 'client')} with {self.per_client} shards each need "
                f"{clients * self.per_client}, but there are {self.shards}; use more shards or fewer clients"
            )
        # What does not divide evenly is dropped before the sort: at the end, it would all be of the last class.
        order = rng.permutation(rng.key(seed, "partition-shards"), n)[: n - n % self.shards]
        pieces = order[stable_order(labels[order])].reshape(self.shards, -1)
        dealt = rng.permutation(rng.key(seed, "partition-shards-clients"), self.shards)[: clients * self.per_client]
        return Parts.of([np.sort(pieces[shards].ravel()) for shards in dealt.reshape(clients, self.per_client)])


@dataclass(frozen=True)
class ByColumn:
    """Natural clients: one for every value of a column, such as the writer or the hospital, in sorted order."""

    name: ClassVar[str] = "by-column"
    column: str

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise BadInput(f"by-column: give the name of a column, found {self.column!r}")

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`; the seed plays no part."""
        columns = columns or {}
        if self.column not in columns:
            names = ", ".join(columns) or "none"
            raise BadInput(f"by-column: no column '{self.column}'{nearest(self.column, columns)} (columns: {names})")
        try:
            values, owner = np.unique(columns[self.column], return_inverse=True)
        except TypeError as error:
            raise BadInput(
                f"by-column: column '{self.column}' mixes kinds of values or misses some ({error}); make them all text "
                "or all numbers, and fill or drop the samples that miss one"
            ) from error
        if owner.ndim != 1 or owner.size == 0:
            raise BadInput(f"by-column: column '{self.column}' must hold one value per sample")
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise BadInput(f"by-column: column '{self.column}' misses some values; fill or drop those samples")
        if clients is not None and clients != len(values):
            raise BadInput(
                f"by-column: column '{self.column}' makes {plural(len(values), 'client')}, not {clients}; "
                "leave the number of clients out"
            )
        return Parts.by_owner(owner, len(values))


@dataclass(frozen=True)
class Reallocate:
    """The whole training set is split again among the active clients in every round (Fed-LAMB's experiments).

    It splits as `base` does; the type tells the round plan to call it in every round, with the size of the cohort and
    a seed of the round.
    """

    name: ClassVar[str] = "reallocate"
    base: IID | Dirichlet | Classes = IID()

    def __post_init__(self) -> None:
        if not isinstance(self.base, IID | Dirichlet | Classes):
            raise BadInput(
                f"reallocate: the base must be iid, dirichlet or classes, found {self.base!r}: "
                "natural clients own their data, and shards leave some out"
            )
        if isinstance(self.base, Dirichlet) and self.base.refill:
            raise BadInput("reallocate: every round splits all samples, but refill leaves some out: set refill = false")

    def split(self, *args: Any, **options: Any) -> Parts:
        """Split as the base does; `clients` is the size of the round's cohort."""
        return self.base.split(*args, **options)


PARTITIONS: dict[str, type[Any]] = {
    partition.name: partition for partition in (IID, Dirichlet, Classes, Shards, ByColumn, Reallocate)
}
for _partition in PARTITIONS.values():
    explain_options(_partition)


def describe() -> dict[str, str]:
    """Return a one-line description of every partition, by name."""
    return {name: (cls.__doc__ or "").splitlines()[0] for name, cls in PARTITIONS.items()}


def make(name: str, **options: Any) -> Partition:
    """Make a partition by name.

    The options of ``reallocate`` are its base (by name; iid when left out) and the base's own options.

    >>> make("dirichlet", alpha=0.3)
    Dirichlet(alpha=0.3, sizes='equal', refill=False)
    >>> make("reallocate", base="classes", k=1)
    Reallocate(base=Classes(k=1))
    """
    if name == "reallocate":
        base = options.pop("base", "iid")
        if isinstance(base, str) and base in PARTITIONS:
            known = [field.name for field in fields(PARTITIONS[base])]
            refuse_unknown_options("partition 'reallocate'", options, ["base", *known])
        return Reallocate(make(base, **options) if isinstance(base, str) else base)  # type: ignore[arg-type]
    partition: Partition = create_named("partition", PARTITIONS, name, options)
    return partition


def as_partition(given: Any) -> Partition:
    """Return a partition given by name, as a table or as an object."""
    partition: Partition = as_object("partition", given, make, "split", "lamina.data.Dirichlet(0.3)")
    return partition


def label_counts(parts: Sequence[Indices], labels: Labels, classes: int | None = None) -> Labels:
    """Return [clients, classes]: how many samples of each class every client holds."""
    classes = int(labels.max()) + 1 if classes is None else classes
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _deal_by_class(kinds: Labels, counts: Labels, seed: int) -> Parts:
    """Give client i `counts[i, c]` random samples of class c."""
    owner = np.empty(len(kinds), np.int64)
    order = _shuffled_by_class(kinds, seed)
    clients = np.broadcast_to(np.arange(len(counts))[:, None], counts.shape)
    owner[order] = np.repeat(clients.T.ravel(), counts.T.ravel())
    return Parts.by_owner(owner, len(counts))


def _shuffled_by_class(kinds: Labels, seed: int) -> Indices:
    """Return all samples class after class, in random order inside every class."""
    order = rng.permutation(rng.key(seed, "partition-deal"), len(kinds))
    return order[stable_order(kinds[order])]


def _occurrences(values: Labels) -> Indices:
    """Return for every value how often it occurs before.

    >>> _occurrences(np.array([2, 0, 2, 2]))
    array([0, 0, 1, 2])
    """
    order, counts = stable_order(values), np.bincount(values)
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - (np.cumsum(counts) - counts)[values[order]]
    return before


def _equal_shares(n: int, clients: int) -> Indices:
    """Return the sizes [clients] of n samples in shares that differ by at most one."""
    return n // clients + (np.arange(clients) < n % clients)
