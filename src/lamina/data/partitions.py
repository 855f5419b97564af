"""How the samples are shared among the clients.

A partition is a frozen record with one method, `split`: a pure function of the labels, the number
of clients and a seed that gives every client its sample indices, ascending. Every sample goes to
exactly one client (`Shards` leaves some to nobody) and every client gets at least one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamina import rng
from lamina.data.dataset import Dataset
from lamina.errors import BadInput, nearest, unknown
from lamina.text import plural

Labels = NDArray[np.int64]
Parts = list[NDArray[np.int64]]
Columns = Mapping[str, NDArray[Any]]


@runtime_checkable
class Partition(Protocol):
    """What the rest of lamina asks of a partition."""

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
    """`partition.split` with everything a `Dataset` knows."""
    return partition.split(data.labels, clients, seed, columns=data.columns, samples=len(data))


@dataclass(frozen=True)
class IID:
    """Every client gets a random share; sizes differ by at most one."""

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`."""
        n, clients = _checked_counts("iid", labels, clients, samples)
        order = rng.permutation(rng.key(seed, "partition-iid"), n)
        return [np.sort(part) for part in np.array_split(order, clients)]


@dataclass(frozen=True)
class Dirichlet:
    """Every client has its own mix of classes, drawn from a Dirichlet distribution.

    ``sizes="equal"``: a client draws its class proportions from Dir(alpha, ..., alpha) on balanced classes, in
    general from Dir(alpha * classes * prior), where the prior is the share of each class in the data. It takes
    its equal share of the samples from the class pools, without replacement; a class whose pool is empty drops
    out of its proportions. Hsu et al. 2019 write the same with alpha * prior: their alpha is this one times the
    number of classes. Most codes and papers, FedLADA's among them, mean the alpha used here.

    ``sizes="natural"``: each class is shared over the clients by proportions from Dir(alpha, ..., alpha),
    so that sizes vary too. A client that would get nothing is given one sample of the largest client.
    """

    alpha: float = 0.5
    sizes: Literal["equal", "natural"] = "equal"

    def __post_init__(self) -> None:
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not number or not 1e-4 <= self.alpha <= 1e6:  # beyond these, Dirichlet draws lose their precision
            raise BadInput(f"dirichlet: alpha must be a positive number from 1e-4 to 1e6, found {self.alpha!r}")
        if self.sizes not in ("equal", "natural"):
            raise BadInput(f"dirichlet: sizes must be 'equal' or 'natural', found {self.sizes!r}")

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`."""
        labels = _checked_labels("dirichlet", labels)
        _, clients = _checked_counts("dirichlet", labels, clients, samples)
        _, kinds, pools = np.unique(labels, return_inverse=True, return_counts=True)
        draw = rng.generator(seed, "partition-dirichlet")
        counts = self._equal(draw, pools, clients) if self.sizes == "equal" else self._natural(draw, pools, clients)
        return _deal(kinds, counts, seed)

    def _equal(self, draw: np.random.Generator, pools: Labels, clients: int) -> Labels:
        """[clients, classes] counts whose rows have equal sums (to one) and whose columns empty the pools."""
        n = int(pools.sum())
        shares = np.full(clients, n // clients)
        shares[: n % clients] += 1
        concentrations = self.alpha * len(pools) * pools / n
        proportions = draw.dirichlet(concentrations, size=clients)
        left = pools.copy()
        counts = np.zeros((clients, len(pools)), np.int64)
        for client, share in enumerate(shares):
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
        # The last to be served take what is left: shuffled, so that a client's number says nothing.
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
class Classes:
    """Every client holds exactly k classes; every class has as many holders as any other, to one.

    Which classes go together is random. A class is shared evenly among its holders.
    """

    k: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise BadInput(f"classes: k must be a whole number of at least 1, found {self.k!r}")

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`."""
        labels = _checked_labels("classes", labels)
        _, clients = _checked_counts("classes", labels, clients, samples)
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
        return _deal(kinds, counts, seed)

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
class Shards:
    """Every client gets a few of many equal pieces of the samples sorted by label; the other pieces go to nobody.

    McMahan et al.'s label skew as the Fed-LAMB authors' code has it: 50 clients with 2 of 200 shards each use half of
    the data. A client sees few labels, but a piece may straddle two of them.
    """

    shards: int = 200
    per_client: int = 2

    def __post_init__(self) -> None:
        for name, value in (("shards", self.shards), ("per_client", self.per_client)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"shards: {name} must be a whole number of at least 1, found {value!r}")

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`; samples in no client's shards are left out."""
        labels = _checked_labels("shards", labels)
        n, clients = _checked_counts("shards", labels, clients, samples)
        if self.shards > n:
            raise BadInput(f"shards: {plural(n, 'sample')} cannot be cut into {self.shards} shards; use at most {n}")
        if clients * self.per_client > self.shards:
            raise BadInput(
                f"shards: {plural(clients, 'client')} with {self.per_client} shards each need "
                f"{clients * self.per_client}, but there are {self.shards}; use more shards or fewer clients"
            )
        # What does not divide evenly is dropped before the sort: at the end, it would all be of the last class.
        order = rng.permutation(rng.key(seed, "partition-shards"), n)[: n - n % self.shards]
        pieces = order[_by_kind(labels[order])].reshape(self.shards, -1)
        dealt = rng.permutation(rng.key(seed, "partition-shards-clients"), self.shards)[: clients * self.per_client]
        return [np.sort(pieces[mine].ravel()) for mine in dealt.reshape(clients, self.per_client)]


@dataclass(frozen=True)
class ByColumn:
    """Natural clients: one for every value of a column, such as the writer or the hospital, in sorted order."""

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
            known = ", ".join(columns) or "none"
            raise BadInput(f"by-column: no column '{self.column}'{nearest(self.column, columns)} (columns: {known})")
        try:
            values, owner = np.unique(columns[self.column], return_inverse=True)
        except TypeError as error:
            raise BadInput(f"by-column: column '{self.column}' mixes kinds of values or misses some") from error
        if owner.ndim != 1 or owner.size == 0:
            raise BadInput(f"by-column: column '{self.column}' must hold one value per sample")
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise BadInput(f"by-column: column '{self.column}' misses some values; fill or drop those samples")
        if clients is not None and clients != len(values):
            raise BadInput(
                f"by-column: column '{self.column}' makes {plural(len(values), 'client')}, not {clients}; "
                "leave the number of clients out"
            )
        return _group(owner, len(values))


@dataclass(frozen=True)
class Reallocate:
    """The whole training set is shared anew among the active clients in every round (Fed-LAMB's experiments).

    It splits as `base` does; that a round plan calls it once per round, with the size of the
    cohort and a seed of the round, is what this type says.
    """

    base: IID | Dirichlet | Classes = IID()

    def __post_init__(self) -> None:
        if not isinstance(self.base, IID | Dirichlet | Classes):
            raise BadInput(
                f"reallocate: the base must be iid, dirichlet or classes, found {self.base!r}: "
                "natural clients own their data, and shards leave some out"
            )

    def split(
        self,
        labels: Labels | None,
        clients: int | None,
        seed: int,
        columns: Columns | None = None,
        samples: int | None = None,
    ) -> Parts:
        """See `Partition.split`; `clients` is the size of the round's cohort."""
        return self.base.split(labels, clients, seed, columns, samples)


PARTITIONS: dict[
    str, type[IID] | type[Dirichlet] | type[Classes] | type[Shards] | type[ByColumn] | type[Reallocate]
] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "classes": Classes,
    "shards": Shards,
    "by-column": ByColumn,
    "reallocate": Reallocate,
}


def describe() -> dict[str, str]:
    """One line on every partition, by name."""
    return {name: (cls.__doc__ or "").splitlines()[0] for name, cls in PARTITIONS.items()}


def make(name: str, **options: Any) -> Partition:
    """Make a partition by name.

    The options of ``reallocate`` are its base (by name; iid when left out) and the base's own options.

    >>> make("dirichlet", alpha=0.3)
    Dirichlet(alpha=0.3, sizes='equal')
    >>> make("reallocate", base="classes", k=1)
    Reallocate(base=Classes(k=1))
    """
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    cls = PARTITIONS[name]
    if cls is Reallocate:
        base = options.pop("base", "iid")
        return Reallocate(make(base, **options) if isinstance(base, str) else base)  # type: ignore[arg-type]
    known = [option.name for option in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            has = f"its options: {', '.join(known)}" if known else "it has none"
            raise BadInput(f"partition {name} has no option '{option}'{nearest(option, known)} ({has})")
    if cls is ByColumn and "column" not in options:
        raise BadInput("partition by-column needs the option 'column': which column names the client of a sample")
    return cls(**options)


def label_counts(parts: Parts, labels: Labels, classes: int | None = None) -> Labels:
    """[clients, classes]: how many samples of each class every client holds."""
    classes = int(labels.max()) + 1 if classes is None else classes
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _deal(kinds: Labels, counts: Labels, seed: int) -> Parts:
    """Give client i `counts[i, c]` random samples of class c."""
    owner = np.empty(len(kinds), np.int64)
    # A random order of all samples, then by class: random inside every class.
    order = rng.permutation(rng.key(seed, "partition-deal"), len(kinds))
    order = order[_by_kind(kinds[order])]
    clients = np.broadcast_to(np.arange(len(counts))[:, None], counts.shape)
    owner[order] = np.repeat(clients.T.ravel(), counts.T.ravel())
    return _group(owner, len(counts))


def _group(owner: Labels, clients: int) -> Parts:
    """The samples of every owner, ascending (the sort is stable)."""
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(_by_kind(owner), ends[:-1])


def _by_kind(kinds: Labels) -> Labels:
    """The stable order that sorts small whole numbers; in few bits numpy does so in one pass over each byte."""
    if not len(kinds):
        return np.zeros(0, np.int64)
    from_zero = kinds - kinds.min()
    return np.argsort(from_zero.astype(np.min_scalar_type(int(from_zero.max()))), kind="stable")


def _checked_counts(name: str, labels: Labels | None, clients: int | None, samples: int | None) -> tuple[int, int]:
    n = samples if labels is None else len(labels)
    if n is None:
        raise BadInput(f"{name}: without labels, say how many samples there are (samples=...)")
    if clients is None:
        raise BadInput(f"{name}: say how many clients share the data")
    if isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1:
        raise BadInput(f"{name}: the number of clients must be a whole number of at least 1, found {clients!r}")
    if clients > n:
        raise BadInput(
            f"{name}: {plural(clients, 'client')} cannot share {plural(n, 'sample')}; use at most {plural(n, 'client')}"
        )
    return n, int(clients)


def _checked_labels(name: str, labels: Labels | None) -> Labels:
    if labels is None:
        raise BadInput(f"{name}: regression data have no classes; use iid or by-column")
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise BadInput(f"{name}: labels must be one integer per sample")
    return labels
