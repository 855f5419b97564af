"""Objects that Python passes to an experiment in place of names, and what a run's config.json stores about them."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from lamina.contents import function_digest
from lamina.data.dataset import Splits
from lamina.data.partitions import Partition
from lamina.inputs import create_model
from lamina.losses import as_loss
from lamina.metrics import METRICS, Metric, description
from lamina.models.registry import Factory
from lamina.protocol import function_name
from lamina.storage.identity import content_digest, dataset_digest, structure_digest
from lamina.training import Training


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
    _model_digests: dict[str, str] = field(default_factory=dict)  # by the model's options

    @property
    def is_empty(self) -> bool:
        """Return whether every part of the experiment is named."""
        return all(one is None for one in (self.data, self.model, self.partition, self.metrics)) and not self.settings

    def describe(self, config: dict[str, Any], simulation: Training) -> None:
        """Add digests of the objects to a run's configuration."""
        if self.data is not None:
            config["data"]["content"] = self._data_digest(config["data"]["partition"].get("column"))
        if self.model is not None:
            options = {key: value for key, value in config["model"].items() if key != "name"}
            key = json.dumps(options, default=str)
            if key not in self._model_digests:
                self._model_digests[key] = self._model_digest(simulation, options)
            config["model"]["content"] = self._model_digests[key]
        if self.partition is not None:
            config["data"]["partition"]["content"] = function_digest(self.partition)[:16]
        for key, value in self.settings.items():
            if key not in ("schedule", "aggregation"):  # which have a section of their own
                config["train"][key] = function_name(value)
                config["train"][f"{key}_content"] = code_digest(value)

    def _data_digest(self, column: str | None) -> str:
        """Return a digest of the given data, before any are held out, and of the column that names the clients."""
        assert self.data is not None
        digests = [None if data is None else dataset_digest(data) for data in self.data]
        if column is not None:
            values = np.asarray(self.data.train.columns[column]).astype(str).tolist()
            digests.append(hashlib.sha256("\0".join(values).encode()).hexdigest())
        return _digest(digests)

    def _model_digest(self, simulation: Training, options: Mapping[str, Any]) -> str:
        """Return a digest of the layers and the initial weights; of a function, of the weights for one fixed seed."""
        objective = simulation.objective
        facts = [structure_digest(objective)]
        if isinstance(self.model, nn.Module):
            facts += [content_digest(tensor.cpu()) for tensor in (objective.start, *objective.buffers.values())]
        elif self.model is not None:
            module = create_model(self.model, simulation.train_data, seed=0, **options)
            facts += [content_digest(tensor) for tensor in module.state_dict().values()]
        return _digest(facts)


def describe_code(config: dict[str, Any], simulation: Training) -> None:
    """Add digests of the user's code that a file names ("module:name") or a metric runs, to a run's configuration."""
    if ":" in config["train"]["loss"]:
        config["train"]["loss_content"] = code_digest(as_loss(config["train"]["loss"]))
    if ":" in config["model"]["name"]:
        config["model"]["content"] = structure_digest(simulation.objective)
    own = [metric for metric in simulation.metrics if metric.name not in METRICS]
    if own:
        functions = (function for metric in own for function in (metric.function, metric.keep))
        # a change of lamina's functions makes no other run
        users = [code_digest(one) for one in functions if getattr(one, "__module__", "") != Metric.__module__]
        config["train"]["metrics_code"] = _digest([description(own), users])


def code_digest(function: Any) -> str:
    """Return a digest of what a function or callable does and of the values that it holds."""
    return _digest([function_digest(function), code_facts(function)])


def code_facts(function: Any) -> list[Any]:
    """Return what a Python function or its code does, as JSON can hold it; empty for other callables."""
    code = function if isinstance(function, types.CodeType) else getattr(function, "__code__", None)
    if code is None:
        return []
    constants = [code_facts(value) if isinstance(value, types.CodeType) else repr(value) for value in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
