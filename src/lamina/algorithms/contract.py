"""The contract: a federated algorithm is a frozen record of options and seven pure functions.

    init(x, layers)                      -> Server       the server's state before round 1; default: the model
    client_init(x, layers)               -> Client       what a client keeps between rounds; default: nothing
    broadcast(server, info)              -> Down         what is sent to the clients; default: the server's state
    begin(down, client, info)            -> Local        the start of local training; default: y = x
    step(local, down, grad, lr, layers)  -> Local        one local step
    finish(local, down, client, info)    -> Up, Client   what is sent back, and the client's new state; default: y_K - x
    update(server, up, info)             -> Server       the server's step, on the mean of all Ups

Only `step` and `update` have no default. `declaration.py` has the decorator that gives an algorithm its name, and the
function that declares an option. Everything else in `Algorithm` has a default that suits most methods.

These rules let one definition run in every engine:

- States are NamedTuples. A field is a tensor ``[..., p]`` (like the model), ``[..., layers]`` (one number per layer) or
  ``[..., 1]`` (one number per client), or None where an option switches it off. The engine owns the leading axes.
- `Server` and `Down` have a field ``x`` (the model), `Local` a field ``y`` (the local model),
  `Up` a field ``delta`` (y_K - x; None if the algorithm sends something else and has a `displacement`).
- Every field of `Down` and `Up` that is not None is sent: the ledger counts it, Flower ships it.
- The mean of the Ups uses the run's weighting, except for the fields named in `state_changes`.
- No branch on a tensor's value, no in-place write, no ``.item()``. Branches on options are fine.
- A numeric option may be a tensor that broadcasts over the leading axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.objective.layers import Grouping, Layers

Number = float | Tensor


class ClientInfo(NamedTuple):
    """What a client knows about the round, in `begin` and `finish`."""

    round: int  # r, from 1
    lr: Number  # eta_l, the local learning rate of this round
    layers: Layers  # where each layer lies in the flat vector
    steps: Number = 1.0  # K_i, the client's number of local steps
    full_gradient: Tensor | None = None  # grad F_i(x), if `needs` asks for it


class ServerInfo(NamedTuple):
    """What the server knows about the round, in `broadcast` and `update`."""

    round: int  # r, from 1
    lr: Number  # eta_l, the local learning rate of this round
    layers: Layers  # where each layer lies in the flat vector
    participation: Number = 1.0  # |S| / N
    mean_steps: Number = 1.0  # the mean K_i of the cohort; in `update` only
    mean_gradient: Tensor | None = None  # the mean of grad F_i(x), if `needs` asks for it; in `broadcast` only
    noise_variance: Number = 0.0  # s^2, of noise on the mean of the field `squares`, to subtract; in `update` only


class Needs(NamedTuple):
    """What an algorithm asks of the engine in a round, besides mini-batch gradients."""

    full_gradient: bool = False  # `finish` gets grad F_i(x), over all of the client's data
    control_variate: bool = False  # `step` gets g(y) - g(x) on the same batch; `broadcast` gets the mean of grad F_i(x)
    second_gradient: bool = False  # `step` also gets the gradient of the same batch at `second_point`, as `second_grad`
    loss: bool = False  # `step` also gets the mean loss of the batch at `local.y` [..., 1], as `loss`: as in round 1


class Nothing(NamedTuple):
    """An empty state."""


class Model(NamedTuple):
    """The state of a server, or a broadcast, that consists of the model alone."""

    x: Tensor


class LocalModel(NamedTuple):
    """The state of local training that consists of the local model alone."""

    y: Tensor


class Displacement(NamedTuple):
    """An upload that consists of the local displacement y_K - x alone."""

    delta: Tensor


class Analysis(NamedTuple):
    """The vectors of a method's convergence theory after a round; the diagnostics measure them."""

    point: Tensor  # z, where the bound takes the gradient of F
    amendment: Tensor | None = None  # g_a, the global direction that clients mix into their steps
    second_moment: Tensor | None = None  # v, by whose root the steps are divided


class Card(NamedTuple):
    """The registry's entry of an algorithm, for the command line, the docs and the contract tests."""

    name: str
    title: str
    reference: str
    link: str  # to the paper
    lr: float  # a local learning rate to start from
    paper_cost: int | None  # the paper's own count of the communication, in models per client and round
    presets: Mapping[str, Mapping[str, Any]]
    grids: Mapping[str, Mapping[str, Sequence[Any]]]  # of papers, by name: values of "lr" and of options to tune over


class Algorithm(ABC):
    """Base class of all algorithms: the seven functions of the contract, then facts that few methods have to state."""

    card: ClassVar[Card]

    def init(self, x: Tensor, layers: Layers) -> Any:
        """Return the server's state before round 1."""
        return Model(x)

    def client_init(self, x: Tensor, layers: Layers) -> Any:
        """Return the state of a client that has not taken part yet."""
        return Nothing()

    def broadcast(self, server: Any, info: ServerInfo) -> Any:
        """Return what is sent to the clients in this round."""
        return server

    def begin(self, down: Any, client: Any, info: ClientInfo) -> Any:
        """Return the local state before the first step."""
        return LocalModel(down.x)

    @abstractmethod
    def step(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Any:
        """Return the local state after one step with the gradient at ``local.y``.

        In rounds whose `needs` ask for a second gradient, `step` is called with one more argument, ``second_grad``, and
        with ``loss`` if they ask for the loss of the batch.
        """

    def finish(self, local: Any, down: Any, client: Any, info: ClientInfo) -> tuple[Any, Any]:
        """Return what is sent to the server, and the client's new state."""
        return Displacement(local.y - down.x), client

    @abstractmethod
    def update(self, server: Any, up: Any, info: ServerInfo) -> Any:
        """Return the server's state after the round, from the mean of the uploads."""

    def check(self) -> None:  # noqa: B027
        """Refuse options that contradict each other. It is called when an algorithm is created."""

    def check_model(self, layers: Layers) -> None:  # noqa: B027
        """Refuse a model that the method cannot train. It is called when a run is set up."""

    # --- facts for the engines ---

    def needs(self, round: int) -> Needs:
        """Return what the engine must provide in this round."""
        return Needs()

    def second_point(self, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Tensor:
        """Return the point ``[..., p]`` of the second gradient, from the state and the gradient at ``local.y``.

        The engine computes both gradients with the same samples, augmentation and dropout masks. Clipping and control
        variates act on both. Buffers such as BatchNorm statistics are updated at ``local.y`` only.
        """
        raise NotImplementedError

    state_changes: ClassVar[tuple[str, ...]] = ()
    """The fields of `Up` that are changes of a client's own state, which the server sums over the rounds.

    Their mean is uniform over the cohort even if the run weights clients by their examples.
    """

    non_negative: ClassVar[tuple[str, ...]] = ()
    """The fields of `Up` that are never negative, such as second moments. A federation's server refuses others."""

    squares: ClassVar[str | None] = None
    """The field of `Up` whose mean `update` squares, if any.

    Noise on the mean makes the square too large by ``info.noise_variance``, which `update` must subtract.
    """

    references: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The fields of `Up` that estimate what a field of `Down` holds as well, such as second moments, and that field.

    A channel whose codec is coarse sends the difference.
    """

    exact_messages: ClassVar[bool] = False
    """Whether the method breaks if the server does not take the mean of the uploads as they were computed.

    Channels, differential privacy and robust means are then refused.
    """

    all_clients: ClassVar[bool | Literal["examples"]] = False
    """Whether the method needs all clients in every round to find the right model: smaller cohorts are warned of.

    "examples": only if the run weights clients by their examples.
    """

    def displacement(self, up: Any) -> Tensor:
        """Return y_K - x from an upload whose field ``delta`` is None, because other fields hold it in another form.

        The engines set ``delta`` to it, to measure how far clients move and what lies between them. `update` gets None.
        """
        raise NotImplementedError

    @property
    def clips_direction(self) -> bool:
        """Whether `step` clips its own direction; the engines then skip `train.clip`, which clips the gradient."""
        return False

    @property
    def grouping(self) -> Grouping:
        """What one layer is in the fields ``[..., layers]``: a tensor, or all tensors of a module."""
        return "tensor"

    # --- facts for the evaluation ---

    def trained_model(self, server: Any) -> Tensor:
        """Return the model that is evaluated and saved, from the server's state; default: ``server.x``.

        Clients train from the broadcast.
        """
        x: Tensor = server.x
        return x

    def client_model(self, x: Tensor, client: Any) -> Tensor:
        """Return the model that a client uses for itself, from the trained one and its state; default: the former."""
        return x

    # --- facts for the ledger ---

    @property
    def cycle(self) -> int:
        """The number of rounds after which the same fields are sent again: more than 1 with lazy synchronisation."""
        return 1

    def down_versions(self, round: int) -> Mapping[str, int]:
        """Return the version in this round of every Down field that does not change in each round.

        A client caches such a field and receives it again only when the version changes.
        """
        return {}

    def paper_models(self, round: int) -> int | None:
        """Return the paper's own count of the communication in this round, in models per client."""
        return self.card.paper_cost

    # --- facts for the report ---

    def trust_ratios(self, local: Any) -> Tensor | None:
        """Return the trust ratio of every layer ``[..., layers]`` in the last local step, or None."""
        return None

    def analysis(self, server: Any, previous: Any) -> Analysis:
        """Return the vectors of the method's theory from the server's states after and before a round."""
        return Analysis(server.x)


def has_second_point(algorithm: Algorithm) -> bool:
    """Return whether the algorithm can ask for a second gradient."""
    return type(algorithm).second_point is not Algorithm.second_point


def has_client_models(algorithm: Algorithm) -> bool:
    """Return whether clients use other models for themselves than the one they see."""
    return type(algorithm).client_model is not Algorithm.client_model


def has_displacement(algorithm: Algorithm) -> bool:
    """Return whether the algorithm sends y_K - x in another form."""
    return type(algorithm).displacement is not Algorithm.displacement


def with_displacement(algorithm: Algorithm, up: Any) -> Any:
    """Return an upload, or rows of uploads, whose ``delta`` is y_K - x although it may not be sent."""
    return up._replace(delta=algorithm.displacement(up)) if has_displacement(algorithm) else up


def as_sent(algorithm: Algorithm, up: Any) -> Any:
    """Return an upload, or the mean of some, without a ``delta`` that is not sent."""
    return up._replace(delta=None) if has_displacement(algorithm) else up


def step_kinds(algorithm: Algorithm) -> list[bool]:
    """Return whether `step` gets a second gradient: in every round, in none, or, by `needs`, in some."""
    if algorithm.needs(1).second_gradient:
        return [True]
    return [False, True] if has_second_point(algorithm) else [False]


def loss_argument(algorithm: Algorithm, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss of a batch [..., 1] as an argument of `step`, if the algorithm asks for it.

    What ``needs(1)`` says about the loss holds for all rounds.
    """
    return {"loss": loss} if algorithm.needs(1).loss else {}


def trial_step(algorithm: Algorithm, local: Any, down: Any, grad: Tensor, info: ClientInfo) -> Any:
    """Return the local state after a step without data: every gradient is `grad`, and its first element the loss."""
    second = {"second_grad": grad} if algorithm.needs(info.round).second_gradient else {}
    return algorithm.step(local, down, grad, info.lr, info.layers, **second, **loss_argument(algorithm, grad[..., :1]))


def zeros(x: Tensor) -> Tensor:
    """Return a zero vector like x."""
    return torch.zeros_like(x)


def per_client(x: Tensor, value: Number = 0.0) -> Tensor:
    """Return one number per client, ``[..., 1]``, for models x of shape ``[..., p]``."""
    return torch.zeros_like(x[..., :1]) + value


def per_layer(x: Tensor, layers: Layers, value: Number = 0.0, by: Grouping = "tensor") -> Tensor:
    """Return one number per layer, ``[..., layers]``, for models x of shape ``[..., p]``."""
    return x.new_zeros(*x.shape[:-1], len(layers.group_sizes(by))) + value
