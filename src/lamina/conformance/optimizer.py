"""A `torch.optim.Optimizer` as one half of a method: it steps on local gradients, or on the server's mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import BadInput, describe_error
from lamina.objective.layers import Layers

# What the states of torch's optimizers are called in lamina's records.
STATE_NAMES = {"exp_avg": "m", "exp_avg_sq": "v", "sum": "v", "max_exp_avg_sq": "v_hat", "momentum_buffer": "b"}
SIGNED = ("m", "b")  # the states that are sums of gradients


class OptimizerHalf:
    """Steps of an optimizer.

    As a local half it steps on the gradients of a client, and is created anew in every round, unless the method's
    clients keep a state between rounds. As a server half it steps on the negative mean displacement.
    """

    def __init__(
        self, name: str, create: Callable[..., torch.optim.Optimizer], layers: Layers, half: str, takes_lr: bool
    ) -> None:
        if half == "client":
            raise BadInput(f"{name} is an optimizer, which is a local half or a server half, no whole client")
        self.name, self.create, self.layers, self.half, self.takes_lr = name, create, layers, half, takes_lr

    def __call__(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the model and the optimizer's state after one step."""
        if "second_grad" in given:
            raise BadInput(f"{self.name} is an optimizer, which gets one gradient per step, but the method needs two")
        model, gradient = (
            (given["y"], given["grad"]) if self.half == "local" else (given["x"], -given["delta"])
        )  # the server takes the mean displacement for a descent direction
        optimizer = self._optimizer(given, model)
        parameters = optimizer.param_groups[0]["params"]
        with torch.no_grad():
            for parameter, value, grad in zip(parameters, self._parts(model), self._parts(gradient), strict=True):
                parameter.copy_(value)
                parameter.grad = grad.clone()
        try:
            optimizer.step()
        except Exception as error:
            raise BadInput(f"{self.name} fails: {describe_error(error)}") from error
        return {**self._states(optimizer, parameters), given["_quantity"]: self._flat(parameters)}

    def _optimizer(self, given: Mapping[str, Any], model: Tensor) -> torch.optim.Optimizer:
        """Return this client's, or the server's, optimizer."""
        state = given["state"]
        is_new_round = self.half == "local" and given["k"] == 1 and not given["_keeps_state"]
        if "optimizer" not in state or is_new_round:
            parameters = [torch.nn.Parameter(part.clone()) for part in self._parts(model)]
            rate = given["lr"] if self.half == "local" else given["server_lr"]
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
        """Return those states that are vectors like the model, by lamina's names."""
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        shapes = [parameter.shape for parameter in parameters]
        vectors = {
            ours: self._flat([state[theirs] for state in states])
            for theirs, ours in STATE_NAMES.items()
            if [getattr(state.get(theirs), "shape", None) for state in states] == shapes
        }
        if self.half == "server":  # the gradients there are negative displacements
            vectors |= {name: -vectors[name] for name in SIGNED if name in vectors}
        return vectors
