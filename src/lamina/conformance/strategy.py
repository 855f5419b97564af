"""A Flower strategy as the server half of a method: it configures a round and aggregates the replies, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import BadInput, describe_error
from lamina.objective.layers import Layers

STATE_NAMES = {"m_t": "m", "v_t": "v", "momentum_vector": "b"}  # of Flower's strategies, in lamina's records


def is_strategy(value: Any) -> bool:
    """Return whether an object is a strategy of Flower's message API, or its class."""
    return all(callable(getattr(value, name, None)) for name in ("configure_train", "aggregate_train"))


def is_old_strategy(value: Any) -> bool:
    """Return whether an object is a strategy of Flower's older client API, or its class."""
    return all(callable(getattr(value, name, None)) for name in ("configure_fit", "aggregate_fit"))


class StrategyHalf:
    """A strategy as a server half: all clients take part in its rounds."""

    def __init__(self, strategy: Any, layers: Layers) -> None:
        self.strategy, self.layers = strategy, layers

    def __call__(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the model and the strategy's state after a round."""
        name = type(self.strategy).__name__
        from lamina.flower.internals import offline_task

        try:
            with offline_task():
                arrays = self._run_round(values, name)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(f"{name} fails: {describe_error(error)}") from error
        if arrays is None:
            raise BadInput(f"{name} returns no arrays from aggregate_train for {len(values['deltas'])} replies")
        return {**self._states(), "x": self._vector({key: array.numpy() for key, array in arrays.items()})}

    def _run_round(self, values: Mapping[str, Any], name: str) -> Any:
        """Return the arrays that the strategy aggregates from the models of a round's clients."""
        from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

        models = values["x"] + values["deltas"]  # of all clients
        grid: Any = _Nodes(range(1, len(models) + 1))
        messages = list(
            self.strategy.configure_train(values["round"], self._record(values["x"]), ConfigRecord({}), grid)
        )
        nodes = sorted(message.metadata.dst_node_id for message in messages)
        if nodes != list(grid.get_node_ids()):
            raise BadInput(f"{name} trains {len(nodes)} of {len(models)} clients: set fraction_train=1.0")
        key = getattr(self.strategy, "weighted_by_key", "num-examples")
        replies = []
        for message, model, examples in zip(
            sorted(messages, key=lambda message: message.metadata.dst_node_id), models, values["examples"], strict=True
        ):
            content = RecordDict({"arrays": self._record(model), "metrics": MetricRecord({key: float(examples)})})
            replies.append(Message(content, reply_to=message))
        return self.strategy.aggregate_train(values["round"], replies)[0]

    def _record(self, vector: Tensor) -> Any:
        from flwr.app import Array, ArrayRecord

        parts = self.layers.unflatten(vector).items()
        return ArrayRecord({name: Array(part.numpy().copy()) for name, part in parts})

    def _vector(self, arrays: Mapping[str, Any]) -> Tensor:
        return self.layers.flatten({name: torch.as_tensor(arrays[name]) for name in self.layers.names})

    def _states(self) -> dict[str, Tensor]:
        """Return the attributes that are arrays like the model, under lamina's names."""
        states = {}
        for theirs, ours in STATE_NAMES.items():
            value = getattr(self.strategy, theirs, None)
            if isinstance(value, list) and len(value) == len(self.layers.names):
                value = dict(zip(self.layers.names, value, strict=True))
            if isinstance(value, Mapping) and set(value) == set(self.layers.names):
                states[ours] = self._vector(value)
        if "b" in states:
            states["b"] = -states["b"]  # Flower sums gradients, lamina sums displacements
        return states


class _Nodes:
    """The part of a Flower grid that strategies use: the ids of its nodes."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = list(ids)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return self._ids
