"""The local steps of many rows: gather their batches, differentiate, let the algorithm step.

`train` is the plain form, for a CPU. It keeps the state of a row in parts, one per parameter tensor: gradients come
tensor by tensor anyway, and joining them into one vector would cost as much memory traffic as the step itself. An
algorithm cannot tell, as long as its `step` works layer by layer. One that does not (a norm over the whole vector,
layers that span several tensors) gets whole vectors; independence.py finds out. On a GPU, see graphs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment, OwnAugmentation, training_inputs
from lamina.data.mapped import Mapped
from lamina.engines.stacked.forward import CapturedForward, Forward, StackedForward, rounded
from lamina.engines.stacked.independence import join, split
from lamina.engines.stacked.layers.convolution import kernels_for
from lamina.engines.stacked.rows import send
from lamina.engines.stacked.side_stream import differentiate
from lamina.engines.state import copy_buffers
from lamina.objective.batch import Inputs, Targets, map_batch, tensors
from lamina.objective.layers import Grouping, Layers
from lamina.objective.objective import Buffers, Objective


class Batches(NamedTuple):
    """The batches of all local steps of some rows ``[rows, K, ...]``, or of one step ``[rows, ...]``."""

    samples: Tensor  # positions in the data [rows, K, B]
    counts: Tensor | None  # how many of them are real [rows, K], 0 if the row takes no such step; None: all are
    keys: Tensor | None  # random words for the augmentation [rows, K, B]
    streams: Tensor | None  # random streams for the masks of dropout [rows, K]

    def at(self, k: int) -> Batches:
        """Return the batches of one step. Batches that are equally short are cut, others stay padded."""
        samples, counts, keys, streams = (None if value is None else value[:, k] for value in self)
        assert samples is not None
        if counts is None:
            return Batches(samples, counts, keys, streams)
        longest = int(counts.max())
        counts = None if int(counts.min()) == longest else counts
        return Batches(samples, counts, keys, streams).first(longest)

    def first(self, size: int) -> Batches:
        """Return the first samples of the batches of one step."""
        return self._replace(samples=self.samples[:, :size], keys=None if self.keys is None else self.keys[:, :size])


@dataclass(frozen=True)
class LocalWork:
    """What the local training of some rows starts from."""

    algorithm: Any  # an `Algorithm` or `SumOfGradients`; numbers that differ between rows are [rows, 1]
    local: Any
    down: Any
    buffers: Buffers  # the model's buffers [rows, ...], updated in place
    batches: Batches
    lr: Number
    clip: Number | None = None  # the largest norm of a gradient
    control: bool = False  # subtract the gradient of the same batch at down.x
    second: bool = False  # also compute the gradient of the same batch at the algorithm's second point
    loss: bool = False  # also give the algorithm the loss of the batch

    @property
    def rows(self) -> int:
        """How many rows are trained."""
        return len(self.batches.samples)

    def row(self, r: int) -> LocalWork:
        """Return the work of one row, whose batches are not padded."""

        def own(value: Any) -> Any:
            return value[r : r + 1] if isinstance(value, Tensor) else value

        numbers = {field.name: own(getattr(self.algorithm, field.name)) for field in fields(self.algorithm)}
        return LocalWork(
            algorithm=replace(self.algorithm, **numbers),
            local=type(self.local)(*map(own, self.local)),
            down=type(self.down)(*map(own, self.down)),
            buffers={name: own(buffer) for name, buffer in self.buffers.items()},
            batches=Batches(*map(own, self.batches))._replace(counts=None),
            lr=own(self.lr),
            clip=own(self.clip),
            control=self.control,
            second=self.second,
            loss=self.loss,
        )


@dataclass(frozen=True)
class StackedObjective:
    """The function that the rows differentiate: the loss of the model on batches of the data."""

    objective: Objective
    data: Dataset  # on the objective's device
    forward: Forward
    augmentation: Augment | OwnAugmentation | None = None
    summed: bool = False  # for a gradient over all data: the model as it is evaluated, losses added up
    prepared: tuple[Inputs, Targets] | None = None  # the samples of the step, if they are taken before it begins

    @property
    def needs_host(self) -> bool:
        """Whether samples are read from disk or changed by a user's function, which a captured step cannot do."""
        is_own = self.augmentation is not None and not isinstance(self.augmentation, Augment)
        return is_own or any(isinstance(values, Mapped) for values in tensors(self.data.x))

    @property
    def layers(self) -> Layers:
        """The layout of the rows' vectors."""
        return self.forward.layout or self.objective.layers

    def step_gradients(
        self, work: LocalWork, y: Mapping[str, Tensor], x: Mapping[str, Tensor], buffers: Buffers, batch: Batches
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradients of a batch as the algorithm gets them, by name, and every row's loss [rows].

        Args:
            work: says whether gradients at x are subtracted.
            y: where to differentiate: at the local parameters, or at the second point.
            x: those of the broadcast.
            buffers: the model's, updated in place in the rows that take the step.
            batch: the samples of the step.
        """
        before = {} if batch.counts is None else copy_buffers(buffers)
        gradients, losses = self.gradients(y, buffers, batch)
        if work.control:
            at_x, _ = self.gradients(x, copy_buffers(buffers), batch)
            dtype = self.objective.dtype
            gradients = {name: gradient.to(dtype) - at_x[name].to(dtype) for name, gradient in gradients.items()}
        if batch.counts is None:
            return gradients, losses
        is_active = batch.counts > 0
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(is_active.reshape(-1, *[1] * (buffer.dim() - 1)), buffer, before[name]))
        return gradients, torch.where(is_active, losses, 0.0)

    def gradients(
        self, parameters: Mapping[str, Tensor], buffers: Buffers, batch: Batches
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return every row's gradient of its mean loss by name, perhaps rounded, and those losses [rows]."""
        parameters = rounded(self.forward, parameters)
        if isinstance(self.forward, CapturedForward):
            x, y = self.samples(batch)
            train = not self.summed
            return self.forward.gradients(parameters, buffers, x, y, train=train, streams=batch.streams)
        leaves = {n: p.detach().requires_grad_() for n, p in parameters.items()}
        # a parameter that the loss does not reach has a gradient of zero, as in the loop
        losses, by_name = differentiate(lambda: self.mean_losses(leaves, buffers, batch), leaves)
        if not self.summed:  # evaluation mode has other zeros
            by_name |= {name: by_name[name] * kept for name, kept in (self.objective.kept_gradients or {}).items()}
        return by_name, losses

    def mean_losses(self, parameters: Mapping[str, Tensor], buffers: Buffers, batch: Batches) -> Tensor:
        """Return every row's mean loss over the real samples of its batch [rows]; their sum if `summed`."""
        assert isinstance(self.forward, StackedForward)
        x, y = self.samples(batch)
        counts = batch.counts
        size = batch.samples.shape[1]
        mask = None if counts is None else torch.arange(size, device=counts.device) < counts.unsqueeze(1)
        train = not self.summed
        losses = self.forward.losses(parameters, buffers, x, y, mask, train=train, streams=batch.streams)
        if mask is None or counts is None:
            return losses.sum(1) if self.summed else losses.mean(1)
        sums = torch.where(mask, losses, 0.0).sum(1)
        return sums if self.summed else sums / counts.clamp(min=1)

    def samples(self, batch: Batches) -> tuple[Inputs, Targets]:
        """Return the inputs, augmented and normalised, and the targets of a batch."""
        if self.prepared is not None:
            rows, size = batch.samples.shape
            x, y = (map_batch(lambda values: values[:rows, :size], part) for part in self.prepared)
            return x, y
        data, keys, augmentation = self.data, batch.keys, self.augmentation
        y = map_batch(lambda values: _take(values, batch.samples), data.y)
        if keys is not None and isinstance(augmentation, Augment):
            keys = send(keys, self.objective.device)
        kernels = kernels_for(batch.samples.device, self.objective.dtype)
        if kernels is not None and _are_images(data.x) and (augmentation is None or isinstance(augmentation, Augment)):
            is_rounded = isinstance(self.forward, StackedForward) and self.forward.precision == "bf16"
            dtype = torch.bfloat16 if is_rounded else self.objective.dtype
            return kernels.prepare_images(data.x, batch.samples, keys, augmentation, data.mean, data.std, dtype), y
        x = map_batch(lambda values: _take(values, batch.samples), data.x)
        return training_inputs(x, keys, augmentation, data.mean, data.std, self.objective.dtype, batch.counts), y


def _are_images(x: Inputs) -> bool:
    """Return whether inputs are images of uint8 in memory on a GPU."""
    return isinstance(x, Tensor) and x.is_cuda and x.dtype == torch.uint8 and x.dim() == 4 and x.is_contiguous()


def _take(values: Tensor | Mapped, index: Tensor) -> Tensor:
    """Return values[index] by whole samples, which is several times as fast on a CPU."""
    chosen = index.flatten() if isinstance(values, Mapped) else send(index.flatten(), values.device)
    return values.index_select(0, chosen).reshape(*index.shape, *values.shape[1:])


def train(problem: StackedObjective, parts: Sequence[Layers], work: LocalWork) -> tuple[Any, Tensor]:
    """Take all local steps; return the final local state and the sum of every row's losses [rows]."""
    local, down = split(work.local, parts), split(work.down, parts)
    x = _named(parts, [part.x for part in down]) if work.control else {}
    total = torch.zeros(work.rows, dtype=work.local.y.dtype, device=work.local.y.device)
    for k in range(work.batches.samples.shape[1]):
        batch = work.batches.at(k)
        y = _named(parts, [part.y for part in local])
        gradients, losses = problem.step_gradients(work, y, x, work.buffers, batch)
        local = algorithm_step(problem, parts, work, local, down, gradients, losses, x, work.buffers, batch)
        total = total + losses
    return join(local, work.local), total


def _named(parts: Sequence[Layers], vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return views of the parts by parameter name."""
    pairs = zip(parts, vectors, strict=True)
    return {name: view for part, vector in pairs for name, view in part.unflatten(vector).items()}


def _vectors(parts: Sequence[Layers], work: LocalWork, gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the gradients as one clipped vector per part."""
    dtype = work.local.y.dtype
    vectors = [part.flatten({name: gradients[name].to(dtype) for name in part.names}) for part in parts]
    return vectors if work.clip is None else _clipped(vectors, work.clip)


def algorithm_step(
    problem: StackedObjective, parts: Sequence[Layers], work: LocalWork, local: list[Any], down: list[Any],
    gradients: Mapping[str, Tensor], losses: Tensor, x: Mapping[str, Tensor], buffers: Buffers, batch: Batches,
) -> list[Any]:  # fmt: skip
    """Return the local state after the algorithm's step, part by part; a row without this step keeps its state.

    `gradients` are those at the local parameters, by name, and `losses` those of the rows; the other arguments are as
    in `step_gradients`.
    """
    algorithm, grads = work.algorithm, _vectors(parts, work, gradients)
    more: list[dict[str, Tensor]] = [{"loss": losses.to(work.local.y.dtype).unsqueeze(1)} if work.loss else {}] * len(
        parts
    )
    if work.second:
        states = zip(local, down, grads, parts, strict=True)
        points = [algorithm.second_point(own, fixed, grad, work.lr, part) for own, fixed, grad, part in states]
        at_points, _ = problem.step_gradients(work, _named(parts, points), x, copy_buffers(buffers), batch)
        vectors = _vectors(parts, work, at_points)
        more = [{**given, "second_grad": vector} for given, vector in zip(more, vectors, strict=True)]
    inputs = zip(local, down, grads, parts, more, strict=True)
    after = [algorithm.step(own, fixed, grad, work.lr, part, **given) for own, fixed, grad, part, given in inputs]
    if batch.counts is None:
        return after
    return [_where_active(batch.counts, new, old) for new, old in zip(after, local, strict=True)]


def _where_active(counts: Tensor, new: Any, old: Any) -> Any:
    """Return a record with the new state of the rows that took the step, and the old state of the others."""
    is_active = (counts > 0).unsqueeze(1)
    pairs = zip(new, old, strict=True)
    return type(new)(*(None if n is None else torch.where(is_active, n, o) for n, o in pairs))


def _clipped(gradients: list[Tensor], limit: Number) -> list[Tensor]:
    """Scale every row's gradient down to norm `limit` if it is longer."""
    norms = torch.stack([torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients])
    norm = torch.linalg.vector_norm(norms, dim=0).unsqueeze(1)
    return [torch.where(norm > limit, gradient * (limit / norm), gradient) for gradient in gradients]


# --- gradients over all data --------------------------------------------------------------------------------------


class Summing(NamedTuple):
    """Local state that stays at y and adds up gradients."""

    y: Tensor
    total: Tensor


class NoBroadcast(NamedTuple):
    """A broadcast without content."""


@dataclass(frozen=True)
class SumOfGradients:
    """The gradient over all data as local steps that stay where they are, so that it runs as these do."""

    grouping: Grouping = "tensor"

    def step(self, local: Summing, down: NoBroadcast, grad: Tensor, lr: Number, layers: Layers) -> Summing:
        """Add the gradient to the sum."""
        return Summing(local.y, local.total + grad)
