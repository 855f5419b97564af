"""The contract: a federated algorithm is a frozen record of hyper-parameters and seven pure functions.

    init(x)                              -> Server       the server's state before round 1
    client_init(x)                       -> Client       what a client keeps between rounds (often nothing)
    broadcast(server, info)              -> Down         what is sent down
    begin(down, client, info)            -> Local        start of local training
    step(local, down, grad, lr, layers)  -> Local        one local step
    finish(local, down, client, info)    -> Up, Client   what is sent up; the client's new state
    update(server, up, info)             -> Server       the server's step, on the mean of all Ups

Rules that make one definition run in every engine:

- States are NamedTuples whose fields are tensors ``[..., p]`` (or ``[..., 1]`` for one number per
  client), or None for a part an option switches off. The leading axes belong to the engine.
- `Server` and `Down` have a field ``x`` (the model), `Local` a field ``y`` (the local model),
  `Up` a field ``delta`` (y_K - x).
- A field of `Down` or `Up` that is not None is sent: the ledger counts it, Flower ships it.
- The mean of the Ups follows the run's weighting, except for the fields named in `state_changes`.
- No branch on a tensor's value, no in-place write, no ``.item()``. Branching on options is fine.
- A numeric hyper-parameter may be a tensor that broadcasts over the leading axes.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from lamina.errors import BadInput, is_number, nearest, short_repr
from lamina.layers import Layers

Number = float | Tensor


class Info(NamedTuple):
    """What the engine tells an algorithm about the round."""

    round: int  # r, from 1
    lr: Number  # eta_l of this round
    steps: Number = 1.0  # K_i in begin and finish; the mean K over the cohort in update
    participation: Number = 1.0  # |S| / N
    full_gradient: Tensor | None = None  # grad F_i(x) in finish; its mean over the cohort in broadcast (see Needs)
    record_trust_ratios: bool = False  # begin then gives Local a field `ratio`, see Algorithm.trust_ratios


class Needs(NamedTuple):
    """What an algorithm asks of the engine in a round, beyond mini-batch gradients."""

    full_gradient: bool = False  # grad F_i(x) over all local data, given to finish as info.full_gradient
    control_variate: bool = False  # step gets g(y) - g(x) on the same batch; broadcast gets the mean full gradient


class Nothing(NamedTuple):
    """An empty state."""


class Model(NamedTuple):
    """A server that keeps, or a broadcast that carries, nothing but the model."""

    x: Tensor


class LocalModel(NamedTuple):
    """Local training that keeps nothing but the local model."""

    y: Tensor


class Displacement(NamedTuple):
    """An upload of nothing but the local displacement y_K - x."""

    delta: Tensor


class Card(NamedTuple):
    """What the registry knows about an algorithm; feeds the CLI, the docs and the contract tests."""

    name: str
    title: str
    reference: str
    lr: float  # a sensible local learning rate to start from
    paper_cost: int | None  # the paper's own count of the communication, in models per client and round
    presets: Mapping[str, Mapping[str, Any]]


class Algorithm(ABC):
    """Base of all algorithms: the contract, with defaults for what most of them do not need."""

    card: ClassVar[Card]
    state_changes: ClassVar[tuple[str, ...]] = ()
    """The fields of `Up` that are changes of a client's own state, which the server adds up over the rounds.

    Their mean is uniform over the cohort even where clients are weighted by their examples. A federation's server
    compares what every client has added so far: small errors in the same direction would otherwise add up unseen.
    """

    @abstractmethod
    def init(self, x: Tensor) -> Any:
        """Return the server's state before round 1."""

    def client_init(self, x: Tensor) -> Any:
        """Return the state of a client that has not taken part yet."""
        return Nothing()

    @abstractmethod
    def broadcast(self, server: Any, info: Info) -> Any:
        """Return what is sent down in this round."""

    @abstractmethod
    def begin(self, down: Any, client: Any, info: Info) -> Any:
        """Return the local state before the first step."""

    @abstractmethod
    def step(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Any:
        """Return the local state after one step with the gradient at ``local.y``."""

    @abstractmethod
    def finish(self, local: Any, down: Any, client: Any, info: Info) -> tuple[Any, Any]:
        """Return what is sent up, and the client's new state."""

    @abstractmethod
    def update(self, server: Any, up: Any, info: Info) -> Any:
        """Return the server's state after the round, from the mean of what was sent up."""

    def needs(self, round: int) -> Needs:
        """Say what the engine must provide in this round."""
        return Needs()

    def down_versions(self, round: int) -> Mapping[str, int]:
        """Name the Down fields that change only now and then, each with its version in this round.

        A client keeps such a field and is sent it again only when it holds another version.
        """
        return {}

    def inherited_moments(self, down: Any, info: Info) -> Mapping[str, Tensor]:
        """Name the Up fields that are second moments, each with the part of it that comes from the broadcast.

        The rest is what the client added from its own gradients, with ``info.steps`` local steps. A federation's
        server refuses negative second moments, and compares what clients added.
        """
        return {}

    def inherited_step(self, down: Any, info: Info) -> Tensor | None:
        """Return the part of ``delta`` that the broadcast accounts for after K_i local steps, or None for nothing.

        A shared momentum, for example. A federation's server compares what clients add to it: a node that takes the
        common step back would otherwise look like any other.
        """
        return None

    def implied_fields(self, up: Any, down: Any, info: Info) -> Mapping[str, Tensor]:
        """Name the Up fields that follow from the others, each with the value it must have after K_i local steps.

        A federation's server refuses an upload that contradicts itself.
        """
        return {}

    def trust_ratios(self, local: Any, down: Any, layers: Layers) -> Tensor | None:
        """Return the layer-wise trust ratios of the last local step [..., number of layers], or None.

        A layer-wise method whose `begin` is told to record them keeps what every `step` multiplies its update with
        in the field ``ratio`` of its `Local` [..., p]: one value per layer, repeated over the layer.
        """
        ratio = getattr(local, "ratio", None)
        return None if ratio is None else layers.firsts(ratio, getattr(self, "layers", "tensor"))


def hyper(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, open_low: bool = False
) -> Any:
    """Declare a hyper-parameter: its default, one line of meaning with the paper's symbol, its range."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high, "open_low": open_low})


_REGISTRY: dict[str, type[Algorithm]] = {}
A = TypeVar("A", bound=Algorithm)


@dataclass_transform(frozen_default=True)
def algorithm(
    name: str,
    *,
    title: str,
    reference: str,
    lr: float,
    paper_cost: int | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[type[A]], type[A]]:
    """Class decorator: make the class a frozen, validated dataclass and enter it in the registry."""

    def decorate(cls: type[A]) -> type[A]:
        def check(self: Algorithm) -> None:
            _check_options(self)
            if own_check is not None:
                own_check(self)
            for base in type(self).__mro__:  # combinations that a group of options refuses
                if "check" in vars(base):
                    vars(base)["check"](self)

        taken = _REGISTRY.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadInput(f"an algorithm named '{name}' exists already ({taken.__module__}): choose another name")
        own_check = cls.__dict__.get("__post_init__")
        cls.__post_init__ = check  # type: ignore[attr-defined]
        made = dataclasses.dataclass(frozen=True, eq=False)(cls)
        made.card = Card(name, title, reference, lr, paper_cost, presets or {})
        _REGISTRY[name] = made
        for preset in made.card.presets.values():
            made(**preset)  # a preset that does not validate is a bug: find it at import
        return made

    return decorate


def registry() -> Mapping[str, type[Algorithm]]:
    """All registered algorithms by name."""
    return _REGISTRY


def options(cls: type[Algorithm]) -> dict[str, dataclasses.Field[Any]]:
    """The hyper-parameters of an algorithm class by name."""
    return {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


def allowed(cls: type[Algorithm], option: str) -> str:
    """Say in words what an option accepts: ``'l2' or 'decoupled'``, ``a number > 0``."""
    hint = get_type_hints(cls)[option]
    if get_origin(hint) is Literal:
        return " or ".join(repr(v) for v in get_args(hint))
    if hint is bool:
        return "true or false"
    if hint is str:
        return "a text"
    meta = {"low": None, "high": None, "open_low": False, **options(cls)[option].metadata}
    words = "a whole number" if hint is int else "a number"
    if meta["low"] is not None:
        words += f" {'>' if meta['open_low'] else '>='} {meta['low']:g}"
    if meta["high"] is not None:
        words += f"{' and' if meta['low'] is not None else ''} <= {meta['high']:g}"
    return words


def _fits(value: Any, hint: Any, meta: Mapping[str, Any]) -> bool:
    if isinstance(value, Tensor):  # a grid of values: the engine made it
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is bool or hint is str:
        return isinstance(value, hint)
    if not isinstance(value, int if hint is int else (int, float)) or not is_number(value) or math.isnan(value):
        return False
    if isinstance(value, int) and abs(value) >= 2**63:  # torch takes no longer ones
        return False
    low, high = meta.get("low"), meta.get("high")
    too_low = low is not None and (value <= low if meta.get("open_low") else value < low)
    return not too_low and not (high is not None and value > high)


def _check_options(self: Algorithm) -> None:
    cls = type(self)
    hints = get_type_hints(cls)
    for name, field in options(cls).items():
        value = getattr(self, name)
        if not _fits(value, hints[name], field.metadata):
            raise BadInput(f"{cls.__name__}: {name} = {short_repr(value)} is not {allowed(cls, name)}")


def check_option_names(cls: type[Algorithm], given: Mapping[str, Any]) -> None:
    """Refuse an option the algorithm does not have, naming the nearest one it has."""
    known = options(cls)
    for name in given:
        if name not in known:
            raise BadInput(
                f"{cls.card.name} has no option '{name}'{nearest(name, known)} (its options: {', '.join(known)})"
            )


def zeros(x: Tensor) -> Tensor:
    """A zero vector like x."""
    return torch.zeros_like(x)
