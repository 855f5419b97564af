"""``model.json``: how a run's model is built, what its samples look like, and how its outputs are read.

With the weights beside it, it is all that `lamina.load` needs. Functions and classes of the user's are named by
``module:name`` and imported; nothing of them is stored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lamina import algorithms
from lamina.algorithms.contract import Algorithm
from lamina.base.errors import BadInput
from lamina.data.dataset import Dataset
from lamina.experiment.config import Experiment
from lamina.models import layers, registry
from lamina.models.registry import Factory
from lamina.objective import losses
from lamina.objective.fingerprint import attributes_digest
from lamina.objective.losses import LOSSES, Loss, PerBatch
from lamina.objective.objective import Objective
from lamina.training.inputs import create_model
from lamina.training.metrics import METRICS, Metric
from lamina.training.training import Training

log = logging.getLogger(__name__)

LOSS_CLASSES = {
    "CrossEntropy": ("weight", "label_smoothing", "class_axis"),
    "BinaryCrossEntropy": ("positive_weight",),
}  # by their names in `lamina.losses`, with their arguments

GIVE_LOSS = "give it, run.evaluate(data, loss=…)"


class MissingCode(BadInput):
    """The user's own code that a run was trained with cannot be imported, or not called as it was."""


def describe_model(simulation: Training, experiment: Experiment) -> dict[str, Any]:
    """Return the content of ``model.json`` for a run of an experiment."""
    model = {"name": experiment.model.name, "options": experiment.model.options()}
    names = list(simulation.reserved.names)
    return describe_parts(
        simulation.objective,
        simulation.algorithm,
        loss=simulation.protocol.loss,
        metrics=simulation.metrics,
        samples=simulation.samples,
        clients=len(names) if names == list(range(len(names))) else names,
        model=model,
        given=experiment.objects.model,
    )


def describe_parts(
    objective: Objective,
    algorithm: Algorithm,
    *,
    loss: str | Loss,
    metrics: Sequence[Metric],
    samples: Mapping[str, Any],
    clients: int | list[Any],
    model: dict[str, Any],
    given: Any,
) -> dict[str, Any]:
    """Return the content of ``model.json``.

    Args:
        objective: the model.
        algorithm: the algorithm.
        loss: the loss, or its name.
        metrics: the metrics.
        samples: what `describe_samples` says of the data.
        clients: the number of clients that train, or their names.
        model: the model's name and options.
        given: the module, or the function that makes it, if it has no such name.
    """
    if isinstance(given, functools.partial):
        model = {"name": code_name(given.func), "options": dict(given.keywords)}
    elif given is not None:
        model = {"name": code_name(type(given) if isinstance(given, nn.Module) else given), "options": {}}
    if given is not None or ":" in model["name"]:
        # layers of torch need none of the user's code
        model |= {"layers": layers.describe(objective.module), "attributes": objective.attributes}
        model["is_class"] = isinstance(given, nn.Module)
    own_metrics = [metric for metric in metrics if metric.name not in METRICS]
    name = algorithm.card.name
    return {
        "model": model | {"frozen": sorted(objective.frozen)},
        "samples": samples,
        "loss": _describe_loss(loss),
        "own_metrics": {metric.name: code_name(metric.function) for metric in own_metrics},
        "algorithm": name if name in algorithms.BUILT_IN else code_name(type(algorithm)),
        "clients": clients,
    }


def code_name(thing: Any) -> str:
    """Return the ``module:name`` that a function or class, or the class of an object, is imported by."""
    thing = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{thing.__module__}:{thing.__qualname__}"


def build_model(facts: Mapping[str, Any], like: Dataset, given: Any = None) -> nn.Module:
    """Return the module of a run with other weights.

    Args:
        facts: the "model" of ``model.json``.
        like: a sample of the training data.
        given: the module, or the function that makes it, if the user has given it.
    """
    name, options, described = facts["name"], facts["options"], facts.get("layers")
    if isinstance(given, nn.Module):
        return given
    if given is None and described is not None:
        return layers.build(described)
    if given is None and name in registry():
        return create_model(name, like, seed=0, **options)
    try:
        factory: Factory | str = name if given is None else given
        module = create_model(factory, like, seed=0, **options)
    except BadInput as error:
        if given is not None:
            raise
        is_elsewhere = "module '__main__' has no attribute" in str(error) and "<" not in name  # not a lambda
        why = "it is in the script that trained it, and this process runs another one" if is_elsewhere else str(error)
        raise _missing(name, why) from error
    if given is None and attributes_digest(module) != facts["attributes"]:
        if facts["is_class"]:  # called without the arguments it had
            raise _missing(name, "the class was called with arguments, which no folder stores")
        log.warning("the model '%s' has other settings than when it was trained: its code, or torch, has changed", name)
    return module


def _missing(name: str, why: str) -> MissingCode:
    return MissingCode(
        f"the run's model is your own '{name}', and it cannot be made from the folder ({why}): give it, "
        "lamina.load(folder, model=…), as a module or a function that returns one"
    )


def _describe_loss(loss: str | Loss) -> dict[str, Any]:
    """Return a loss by name, with the values of lamina's own classes."""
    if isinstance(loss, str):
        return {"name": loss}
    if isinstance(loss, PerBatch):
        return _describe_loss(loss.function) | {"per_batch": True}
    for name, function in LOSSES.items():
        if loss is function:
            return {"name": name}
    for name, arguments in LOSS_CLASSES.items():
        if type(loss) is getattr(losses, name):
            values = {argument: getattr(loss, argument) for argument in arguments}
            return {"name": name} | {k: v.tolist() if hasattr(v, "tolist") else v for k, v in values.items()}
    return {"name": code_name(loss)}


def build_loss(facts: Mapping[str, Any]) -> Loss:
    """Return the loss of a run; raise `MissingCode` for one that cannot be imported."""
    if facts.get("per_batch"):
        inner = build_loss({key: value for key, value in facts.items() if key != "per_batch"})
        return inner if isinstance(inner, PerBatch) else losses.per_batch(inner)  # already one if it was decorated
    name, values = facts["name"], {key: value for key, value in facts.items() if key != "name"}
    if name in LOSS_CLASSES:
        loss: Loss = getattr(losses, name)(**values)
        return loss
    try:
        loss = losses.as_loss(name)
    except BadInput as error:
        raise MissingCode(f"the run's loss is your own '{name}': {error}; {GIVE_LOSS}") from error
    if isinstance(loss, type):
        raise MissingCode(
            f"the run's loss is an object of your class '{name}', whose values no folder stores: {GIVE_LOSS}"
        )
    return loss
