"""Objects that Python passes to an experiment in place of names, and what a run's config.json stores about them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lamina.data.dataset import Splits
from lamina.data.partitions import Partition
from lamina.models.registry import Factory
from lamina.objective.batch import map_batch
from lamina.objective.fingerprint import code_digests, is_laminas, value_digest
from lamina.objective.losses import as_loss
from lamina.rounds.settings import function_name
from lamina.storage.identity import (
    content_digest,
    held_values,
    json_digest,
    parts_with_code,
    splits_digest,
    structure_digest,
)
from lamina.training.inputs import create_model
from lamina.training.metrics import METRICS, Metric, description
from lamina.training.training import Training


@dataclass(frozen=True, eq=False)
class Objects:
    """Objects of an experiment, by reference; what is None is named in its section instead.

    A run's folder describes each by its name and a digest of its content, so that a run with other data, another model
    or another loss is refused as another run.
    """

    data: Splits | None = None
    model: nn.Module | Factory | None = None  # a module, or a function that returns a new one
    partition: Partition | None = None
    metrics: Sequence[Metric] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the protocol: schedule, aggregation, loss, …
    _model_digests: dict[str, str] = field(default_factory=dict)  # by the model's options; a digest takes a new model

    @property
    def is_empty(self) -> bool:
        """Return whether every part of the experiment is named."""
        return all(one is None for one in (self.data, self.model, self.partition, self.metrics)) and not self.settings

    def describe(self, config: dict[str, Any], simulation: Training, partition: Partition) -> None:
        """Add digests of the objects to a run's configuration; those of the data are before any are held out."""
        if self.data is not None:
            masks = [map_batch(content_digest, part.mask) for part in self.data if part and part.mask is not None]
            digest = splits_digest(*self.data, partition)
            config["data"]["content"] = json_digest([digest, masks]) if masks else digest
        if self.model is not None:
            options = {key: value for key, value in config["model"].items() if key != "name"}
            key = json.dumps(options, default=str)
            if key not in self._model_digests:
                self._model_digests[key] = self._model_digest(simulation, options)
            config["model"]["values"] = self._model_digests[key]
        if self.partition is not None:
            config["data"]["partition"]["values"] = value_digest(self.partition)
        if "loss" in self.settings:
            config["train"]["loss"] = function_name(self.settings["loss"])
        if "augmentation" in self.settings:
            config["data"]["augment"] = function_name(self.settings["augmentation"])

    def _model_digest(self, simulation: Training, options: Mapping[str, Any]) -> str:
        """Return a digest of the layers and the initial weights; of a function, of the weights for one fixed seed."""
        objective = simulation.objective
        facts = [structure_digest(objective)]
        if isinstance(self.model, nn.Module):
            facts += [content_digest(tensor.cpu()) for tensor in (objective.start, *objective.buffers.values())]
        elif self.model is not None:
            module = create_model(self.model, simulation.train_data, seed=0, **options)
            facts += [content_digest(tensor) for tensor in module.state_dict().values()]
        return json_digest(facts)


def describe_code(config: dict[str, Any], simulation: Training, objects: Objects) -> None:
    """Add digests of the user's code and of the values that it holds; the seed does not count."""
    algorithm, objective, protocol = simulation.algorithm, simulation.objective, simulation.protocol
    config |= held_values(algorithm, as_loss(protocol.loss), protocol)
    parts = [*parts_with_code(algorithm, objective.module, protocol), objects.model, objects.partition]
    module, is_function, _ = config["model"]["name"].partition(":")
    if is_function:
        shapes = {name: list(shape) for name, shape in objective.layers.shapes.items()}
        config["model_values"] = json_digest([objective.attributes, shapes])
        parts.append(sys.modules.get(module))
    metrics = [metric for metric in simulation.metrics if metric.name not in METRICS]
    if metrics:
        functions = [function for metric in metrics for function in (metric.function, metric.keep)]
        users = [function for function in functions if not is_laminas(function)]
        config["metrics_values"] = json_digest([description(metrics), list(map(value_digest, users))])
        parts += users
    config["code"] = code_digests(parts)
