"""A dry run: a few samples of a data set, and the model's passes over them, which all checks share."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.dispatch import WatchingMode
from lamina.data.dataset import Dataset
from lamina.objective.batch import take, tensors
from lamina.objective.losses import is_user_defined
from lamina.objective.objective import Objective
from lamina.objective.outputs import sample_axes, tensors_in
from lamina.training.evaluation import EVALUATION_BATCH, as_batch
from lamina.training.metrics import Batch

SAMPLES = 2
USER_LOSS_SAMPLES = 6  # a user's loss is tried on these together, and on each one alone


class Pass:
    """One forward pass over the samples of a dry run: what it returns, and what else it does."""

    def __init__(self, run: DryRun, train: bool) -> None:
        objective, device, activation = run.objective, run.objective.device, LargestActivation(run.samples)
        self.error, self.replaced_buffer = None, None
        self.outputs: Any = torch.empty(0)
        parameters = {n: p.clone() for n, p in objective.layers.unflatten(objective.start).items()}
        buffers = {n: b.clone() for n, b in objective.buffers.items()}

        def look(module: Any, args: Any, returned: Any) -> None:
            self.replaced_buffer = next((n for n, b in buffers.items() if module.get_buffer(n) is not b), None)

        # Nothing requires a gradient, but activation checkpointing needs gradients to be enabled to do its work.
        with rng.forked(device, seed=0), torch.enable_grad(), activation:
            before = rng.generator_states(device)
            try:
                with objective.seeded.register_forward_hook(look):  # called while the module still holds these tensors
                    self.outputs = objective.outputs_at(parameters, buffers, run.inputs, train=train)
            except Exception as error:  # whatever a user's forward raises
                self.error = error
            self.draws = rng.generator_states(device) != before
        self.bytes_per_sample = activation.bytes
        self.written_parameter = next((name for name, value in parameters.items() if value._version > 0), None)


class DryRun:
    """The model and the loss, where training starts, on a few samples.

    `name` is what messages call the data, "train" or "test". `rows` is the number of samples whose activations will be
    in memory at once.
    """

    def __init__(self, objective: Objective, data: Dataset, name: str, rows: int) -> None:
        self.objective, self.data, self.name, self.rows = objective, data, name, rows
        first = take(data.y, slice(EVALUATION_BATCH))
        differs = [(one != one[:1]).reshape(len(one), -1).any(1) for one in tensors(first)]
        others = torch.stack(differs).any(0).nonzero().flatten().tolist()
        length, count = len(differs[0]), USER_LOSS_SAMPLES if is_user_defined(objective.loss) else SAMPLES
        spread = range(0, length, max(1, length // count))
        chosen = list(dict.fromkeys([0, *others[:1], *spread]))[:count]  # equal targets would hide mistakes
        self.samples, self.targets = len(chosen), take(first, chosen)
        self.inputs = data.inputs(torch.tensor(chosen, device=objective.device), objective.dtype)

    @cached_property
    def evaluation(self) -> Pass:
        """A pass in evaluation mode."""
        return Pass(self, train=False)

    @cached_property
    def sample_axes(self) -> list[int | None]:
        """The axis of the samples in every tensor that the model returns."""
        if isinstance(self.evaluation.outputs, Tensor):
            return [0]  # as is checked

        def outputs(samples: int) -> Any:
            inputs = take(self.inputs, torch.arange(samples) % self.samples)
            return self.objective.outputs(self.objective.start, self.objective.buffers, inputs, train=False)

        with torch.no_grad(), rng.forked(self.objective.device, seed=0):
            return sample_axes(outputs)

    @cached_property
    def training(self) -> Pass:
        """A pass in training mode; its error, if it has one, is raised again in training."""
        return Pass(self, train=True)

    @cached_property
    def repetitions(self) -> list[tuple[Pass, Pass]]:
        """Every pass with a second one, from the same random numbers."""
        return [(self.training, Pass(self, train=True)), (self.evaluation, Pass(self, train=False))]

    @property
    def is_random(self) -> bool:
        """Whether the module draws random numbers itself: `torch.rand`, or dropout in evaluation mode."""
        pairs = (
            (one.nan_to_num(), two.nan_to_num())
            for first, second in self.repetitions
            for one, two in zip(tensors_in(first.outputs), tensors_in(second.outputs), strict=True)
        )
        return self.training.draws or self.evaluation.draws or not all(torch.equal(*pair) for pair in pairs)

    @cached_property
    def batch(self) -> Batch:
        """The samples as metrics see them, in evaluation mode."""
        with torch.no_grad():
            return as_batch(self.objective, self.evaluation.outputs, self.targets, self.data.classes)


class LargestActivation(WatchingMode):  # type: ignore[no-untyped-call]
    """A context that records the largest tensor with a row per sample, in bytes per sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.bytes = samples, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and len(result) == self.samples:
            self.bytes = max(self.bytes, result.numel() * result.element_size() // self.samples)
        return result


class Pairs(WatchingMode):  # type: ignore[no-untyped-call]
    """A context that notices tensors with two axes of the samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.found = samples, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= isinstance(result, Tensor) and list(result.shape).count(self.samples) > 1
        return result
