"""Gradients for both sides of a comparison: random ones, or those of a model on batches of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lamina.base.errors import BadInput
from lamina.objective.batch import Inputs, Targets, map_batch, take
from lamina.objective.layers import Layers
from lamina.objective.losses import Loss
from lamina.objective.objective import Objective, copy_module
from lamina.training.inputs import as_model, as_splits
from lamina.training.masks import with_mask
from lamina.training.preflight import check_model, check_training

SHAPES = {"conv.weight": (4, 2, 3, 3), "conv.bias": (4,), "fc.weight": (5, 8), "fc.bias": (5,)}
BATCH_SIZE = 8
FEATURES, CLASSES = 6, 4  # of the default data


class Source(Protocol):
    """A source of gradients for our side, and of the arguments of a whole client."""

    layers: Layers
    start: Tensor  # the model before round 1

    def gradient(self, round: int, c: int, k: int, y: Tensor, control: Tensor | None, second: bool = False) -> Tensor:
        """Return the gradient of client c's step k at y, less that at `control` if it is given."""

    def loss(self, round: int, c: int, k: int, y: Tensor) -> Tensor:
        """Return the mean loss of the batch of client c's step k at y, as one number [1]."""

    def full_gradient(self, round: int, c: int, x: Tensor) -> Tensor:
        """Return the gradient over all of client c's data."""

    def client_arguments(self, round: int, c: int, x: Tensor, steps: int) -> Mapping[str, Any]:
        """Return the arguments with which a whole client trains."""


class RandomGradients:
    """Random gradients that depend on the round, the client and the step, but not on the model.

    Their scales span three orders of magnitude and shrink over the rounds.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.layers = Layers(SHAPES)
        self.start = 0.5 * self._normal(0)
        self.scale = 10 ** (-1.5 + 0.75 * self._normal(1).clamp(-2, 2))  # of every coordinate
        self.mean = self._normal(2)

    def gradient(self, round: int, c: int, k: int, y: Tensor, control: Tensor | None, second: bool = False) -> Tensor:
        """Return the gradient of a step; it does not depend on the point."""
        return self.scale * (self.mean + self._normal(3, round, c, k, int(second))) / (1 + round / 10)

    def loss(self, round: int, c: int, k: int, y: Tensor) -> Tensor:
        """Return the loss of a step, a positive number."""
        return self._normal(5, round, c, k)[:1].exp()

    def full_gradient(self, round: int, c: int, x: Tensor) -> Tensor:
        """Return the full gradient of a round."""
        return self.scale * (self.mean + self._normal(4, round, c)) / (1 + round / 10)

    def client_arguments(self, round: int, c: int, x: Tensor, steps: int) -> Mapping[str, Any]:
        """Raise an error: a whole client trains a model."""
        raise NotImplementedError

    def _normal(self, *place: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng([self.seed, *place]).normal(size=self.layers.size))


class ModelGradients:
    """Gradients of a module on batches of the clients' data, which the seed determines."""

    def __init__(self, model: Any, data: Any, loss: str | Loss | None, *, clients: int, seed: int) -> None:
        if (model is None) != (data is None):
            one, other = ("data", "model") if model is None else ("model", "data")
            raise BadInput(f"{one} is given without {other}: give both, or neither")
        if model is None:
            model, data = _default_model(seed), _default_data(seed, clients)
        dataset, _ = as_splits(data)
        self.seed = seed
        module = as_model(model, dataset, seed)
        self.dataset = with_mask(dataset, module).to("cpu")
        self.objective = Objective(module.to("cpu").double(), loss or "cross_entropy")
        self.layers, self.start = self.objective.layers, self.objective.start
        check_model(self.objective)
        dry_run = check_training(self.objective, self.dataset, BATCH_SIZE)
        if self.objective.draws_masks or dry_run.is_random:
            raise BadInput(
                "the model has dropout or draws random numbers, and the two sides would draw others: switch that off"
            )
        order = np.random.default_rng([seed, 5]).permutation(len(self.dataset))
        self.samples = np.array_split(order, clients)
        if len(self.samples[-1]) == 0:
            raise BadInput(f"{len(self.dataset)} samples are too few for {clients} clients")

    def batch(self, round: int, c: int, k: int) -> tuple[Inputs, Targets]:
        """Return the inputs and targets of client c's step k."""
        samples = self.samples[c]
        size = min(BATCH_SIZE, len(samples))
        return self._rows(np.random.default_rng([self.seed, 6, round, c, k]).choice(samples, size, replace=False))

    def data(self, c: int) -> tuple[Inputs, Targets]:
        """Return all of a client's data."""
        return self._rows(self.samples[c])

    def _rows(self, samples: Any) -> tuple[Inputs, Targets]:
        """Return the inputs and targets of some samples, floating-point numbers in float64."""
        rows = torch.from_numpy(samples)
        return self.dataset.inputs(rows, torch.float64), map_batch(_as_double, take(self.dataset.y, rows))

    def gradient(self, round: int, c: int, k: int, y: Tensor, control: Tensor | None, second: bool = False) -> Tensor:
        """Return the gradient of a batch."""
        gradient = self._gradient_and_loss(round, c, k, y)[0]
        return gradient if control is None else gradient - self._gradient_and_loss(round, c, k, control)[0]

    def loss(self, round: int, c: int, k: int, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return self._gradient_and_loss(round, c, k, y)[1].reshape(1)

    def _gradient_and_loss(self, round: int, c: int, k: int, y: Tensor) -> tuple[Tensor, Tensor]:
        buffers = {name: buffer.clone() for name, buffer in self.objective.buffers.items()}
        return self.objective.gradient(y, buffers, *self.batch(round, c, k))

    def full_gradient(self, round: int, c: int, x: Tensor) -> Tensor:
        """Return the gradient over all of a client's data."""
        inputs, targets = self.data(c)
        return self.objective.gradient(x, self.objective.buffers, inputs, targets, train=False)[0]

    def client_arguments(self, round: int, c: int, x: Tensor, steps: int) -> Mapping[str, Any]:
        """Return a copy of the module with the server's model, the batches of the round, all data and the loss."""
        module = copy_module(self.objective.module_at(x, self.objective.buffers))
        self.objective.set_mode(module, train=True)
        batches = [self.batch(round, c, k) for k in range(1, steps + 1)]
        return {"model": module, "batches": batches, "data": self.data(c), "loss": self.mean_loss}

    def mean_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch."""
        return self.objective.losses(outputs, targets).mean()


def _default_model(seed: int) -> nn.Module:
    """Return a small network with weights that depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def _default_data(seed: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return random data, 24 samples for each client."""
    random = np.random.default_rng([seed, 7])
    inputs = random.normal(size=(24 * clients, FEATURES))
    return torch.from_numpy(inputs), torch.from_numpy(random.integers(0, CLASSES, 24 * clients))


def _as_double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values
