"""A `torch.optim.Optimizer` as one half of a method: it steps on local gradients, or on the server's mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import BadInput, describe_error
from lamina.objective.layers import Layers

# The names of torch's states in lamina's records.
STATE_NAMES = {"exp_avg": "m", "exp_avg_sq": "v", "sum": "v", "max_exp_avg_sq": "v_hat", "momentum_buffer": "b"}
GRADIENT_SUMS = ("m", "b")  # the states that are weighted sums of gradients


class OptimizerHalf:
    """An optimizer as a local half or a server half.

    As a local half it steps on the gradients of a client, and is created anew in every round, unless the method's local
    training begins from what the client kept. As a server half it steps on the negative mean displacement.
    """

    def __init__(
        self, name: str, create: Callable[..., torch.optim.Optimizer], layers: Layers, half: str, takes_lr: bool
    ) -> None:
        if half == "client":
            raise BadInput(f"{name} is an optimizer, which is a local half or a server half, no whole client")
        self.name, self.create, self.layers, self.half, self.takes_lr = name, create, layers, half, takes_lr

    def __call__(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the model and the optimizer's state after one step."""
        if "second_grad" in values:
            raise BadInput(f"{self.name} is an optimizer, which gets one gradient per step, but the method needs two")
        model, gradient = (
            (values["y"], values["grad"]) if self.half == "local" else (values["x"], -values["delta"])
        )  # the server takes the mean displacement for a descent direction
        optimizer = self._optimizer(values, model)
        parameters = optimizer.param_groups[0]["params"]
        with torch.no_grad():
            for parameter, value, grad in zip(parameters, self._parts(model), self._parts(gradient), strict=True):
                parameter.copy_(value)
                parameter.grad = grad.clone()
        try:
            optimizer.step()
        except Exception as error:
            raise BadInput(f"{self.name} fails: {describe_error(error)}") from error
        return {**self._states(optimizer, parameters), values["_model_name"]: self._flat(parameters)}

    def _optimizer(self, values: Mapping[str, Any], model: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer of this client or of the server; create it first if necessary."""
        state = values["state"]
        is_new_round = self.half == "local" and values["k"] == 1 and values["_restarts"]
        if "optimizer" not in state or is_new_round:
            parameters = [torch.nn.Parameter(part.clone()) for part in self._parts(model)]
            rate = values["lr"] if self.half == "local" else values["server_lr"]
            try:
                state["optimizer"] = self.create(parameters, **({"lr": rate} if self.takes_lr else {}))
            except Exception as error:
                raise BadInput(f"cannot create {self.name}(…): {describe_error(error)}") from error
            if not isinstance(state["optimizer"], torch.optim.Optimizer):
                kind = type(state["optimizer"]).__name__
                raise BadInput(f"{self.name} takes parameters, but creates no torch optimizer: it returns a {kind}")
        optimizer: torch.optim.Optimizer = state["optimizer"]
        return optimizer

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return list(self.layers.unflatten(vector).values())

    def _flat(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def _states(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> dict[str, Tensor]:
        """Return the states that are vectors like the model, under lamina's names."""
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        shapes = [parameter.shape for parameter in parameters]
        vectors = {
            ours: self._flat([state[theirs] for state in states])
            for theirs, ours in STATE_NAMES.items()
            if [getattr(state.get(theirs), "shape", None) for state in states] == shapes
        }
        if self.half == "server":  # the gradients there are negative displacements
            vectors |= {name: -vectors[name] for name in GRADIENT_SUMS if name in vectors}
        return vectors
