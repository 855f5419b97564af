"""`conform`: compare an algorithm with another implementation of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn

from lamina.algorithms.contract import Algorithm
from lamina.base import rng
from lamina.base.errors import BadInput, describe_error, short_repr
from lamina.base.limits import check_count, check_number
from lamina.base.registry import import_named
from lamina.conformance.federation import Federation
from lamina.conformance.feed import ModelGradients, RandomGradients, Source
from lamina.conformance.function import TITLES, Half
from lamina.conformance.target import find_target
from lamina.conformance.verdict import Conformance
from lamina.models.registry import Factory
from lamina.objective.losses import Loss
from lamina.rounds.aggregation import Aggregation, as_aggregation
from lamina.rounds.settings import Weighting
from lamina.training.inputs import as_algorithm


def conform(
    algorithm: Algorithm | str | Mapping[str, Any],
    theirs: Any,
    *,
    half: Half | None = None,
    options: Mapping[str, Any] | None = None,
    lr: float | None = None,
    steps: int = 50,
    local_steps: int = 10,
    clients: int = 3,
    aggregation: Any = "mean",
    weighting: Weighting = "clients",
    model: nn.Module | Factory | str | None = None,
    data: Any = None,
    loss: str | Loss | None = None,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> Conformance:
    """Compare an algorithm with another implementation of a half of it, step by step, in float64.

    >>> import lamina
    >>> def step(y, grad, lr, x):
    ...     return y - lr * (grad + 0.1 * (y - x))
    >>> print(lamina.conform("fedprox", step).verdict)
    the same to 1e-12 over 50 steps (5 rounds)

    Args:
        algorithm: an algorithm, the name of one, or a table {"name": "fedadam", "beta1": 0.8}.
        theirs: the other implementation, or its name "module:thing": a class of torch optimizers or a function that
            creates one from `params`; a Flower strategy, its class or a function that creates one; or a function. Its
            parameters say which half it is: (y, grad, …) a local step, (x, delta, …) a step of the server,
            (model, batches, …) the training of a client.
        half: "local" or "server" for an optimizer; default: "local" if clients keep more than the model during a round,
            or the server has nothing but the model; otherwise "server".
        options: keyword arguments for the other implementation; an object that exists already takes none.
        lr: the local learning rate; default: the algorithm's card.
        steps: how many steps to compare: local ones of each client, or rounds of the server.
        local_steps: of a client in a round.
        clients: how many take part in each round.
        aggregation: how our server combines the uploads, as in `Simulation`.
        weighting: "clients" or "examples"; client i then has i * 10 examples.
        model: for a whole client, the model to train, as in `Simulation`; default: a small network.
        data: for a whole client, the training data of all clients, as in `Simulation`, such as a pair (x, y), given
            with the model; default: random ones.
        loss: for a whole client, as in `Simulation`.
        tolerance: the largest difference that counts as none, relative to the largest entry of a quantity.
        seed: of the gradients, the model, the data and the process-wide random generators.
    """
    if half not in (None, *get_args(Half)):
        raise BadInput(f"half = {short_repr(half)} is none of {', '.join(get_args(Half))}")
    if weighting not in get_args(Weighting):
        raise BadInput(f"weighting = {short_repr(weighting)} is none of {', '.join(get_args(Weighting))}")
    for name, count in {"steps": steps, "local_steps": local_steps, "clients": clients}.items():
        check_count(name, count)
    check_count("seed", seed, least=0)
    if not isinstance(options, Mapping | None):
        raise BadInput(f"options = {short_repr(options)} is not a dict of keyword arguments")
    check_number("tolerance", tolerance, above=0)
    algorithm = as_algorithm(algorithm)
    lr = check_number("lr", algorithm.card.lr if lr is None else lr, above=0)
    random = RandomGradients(seed)
    target = find_target(theirs, algorithm, half, options or {}, random.layers)
    source: Source = random
    if target.half == "client":
        source = ModelGradients(model, data, loss, clients=clients, seed=seed)
    elif unused := [name for name, each in (("model", model), ("data", data), ("loss", loss)) if each is not None]:
        raise BadInput(f"{unused[0]} is for a whole client, but {target.description} is {TITLES[target.half]}")
    algorithm.check_model(source.layers)
    combine = _find_aggregation(aggregation)
    federation = Federation(algorithm, target, source, lr, steps, local_steps, clients, combine, weighting, tolerance)
    with rng.forked(torch.device("cpu"), seed=rng.torch_seed(seed, "conformance")):  # theirs may draw from them
        return federation.run()


def _find_aggregation(given: Any) -> Aggregation:
    """Return our aggregation, also one of the user's by ``module:Class`` or ``module:object``."""
    if isinstance(given, str) and ":" in given:
        aggregation = import_named("aggregation", given)
        try:
            return as_aggregation(aggregation() if isinstance(aggregation, type) else aggregation)
        except TypeError as error:
            raise BadInput(f"cannot create the aggregation {given}(): {describe_error(error)}") from error
    return as_aggregation(given)
