"""One local step of every row: gather the batches, differentiate, let the algorithm step.

During local training the state of a row is kept in parts, one per layer, each [rows, size of the layer]: gradients
come layer by layer anyway, and gluing them into one vector only to take it apart again would cost as much memory
traffic as the step itself. An algorithm cannot tell, as long as its `step` works layer by layer; one that does not
(a norm over the whole vector, layers that span several tensors) is noticed and given whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.algorithms.primitives import using_up
from lamina.algorithms.rehearsal import TINY
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment, prepare
from lamina.engines.stacked.forward import Forward
from lamina.layers import Layers
from lamina.objective import Buffers, Objective


class Steps:
    """The local steps of some rows, for one algorithm and one kind of round."""

    def __init__(
        self,
        objective: Objective,
        data: Dataset,
        forward: Forward,
        algorithm: Any,  # an `Algorithm`, or `SumOfGradients`
        parts: Sequence[Layers],
        *,
        control: bool,
        clip: float | Tensor | None,  # largest norm of a gradient, for all rows or one per row [rows, 1]
        augmentation: Augment | None,
        whole: bool = False,  # for the gradient over all data: the model as it is evaluated, losses summed
    ) -> None:
        self.objective, self.data, self.forward, self.algorithm = objective, data, forward, algorithm
        self.parts, self.control, self.clip, self.augmentation = list(parts), control, clip, augmentation
        self.whole = whole

    def step(
        self,
        local: list[Any],
        down: list[Any],
        buffers: Buffers,
        index: Tensor,
        filled: Tensor | None,
        keys: Tensor | None,
        streams: Tensor | None,
        lr: Any,
        rounded: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Any], Tensor]:
        """The state after one step, and every row's loss [rows].

        Args:
            local: the local state in parts.
            down: the broadcast in parts.
            buffers: the model's buffers [rows, ...], updated in place.
            index: the samples of the batch [rows, B].
            filled: how many of them are real [rows] (0: the row makes no step); None: all.
            keys: random words for the augmentation [rows, B].
            streams: random streams for the masks of dropout [rows].
            lr: a number, or one per row [rows, 1].
            rounded: the parameters of `local` by name, already in the precision of the forward pass.
        """
        kept = None if filled is None else {n: b.clone() for n, b in buffers.items()}
        batch = (index, filled, keys, streams)
        grads, losses = self.gradient([part.y for part in local], buffers, *batch, rounded=rounded)
        if self.control:  # the same batch and dropout masks at x
            scratch = {n: b.clone() for n, b in buffers.items()}
            at_x, _ = self.gradient([part.x for part in down], scratch, *batch)
            dtype = self.objective.dtype
            grads = [g.to(dtype) - a.to(dtype) for g, a in zip(grads, at_x, strict=True)]
        after = self.apply(local, down, grads, lr, filled)
        if filled is None or kept is None:
            return after, losses
        active = filled > 0
        for name, buffer in buffers.items():
            view = active.reshape(-1, *[1] * (buffer.dim() - 1))
            buffer.copy_(torch.where(view, buffer, kept[name]))
        return after, torch.where(active, losses, 0.0)

    def gradient(
        self, y: list[Tensor], buffers: Buffers, index: Tensor, filled: Tensor | None, keys: Tensor | None,
        streams: Tensor | None, *, rounded: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """Every row's own gradient of its mean loss, in parts (perhaps rounded), and those losses [rows]."""
        chosen = self.forward.rounded(self.named(y)) if rounded is None else rounded
        leaves = {n: p.detach().requires_grad_() for n, p in chosen.items()}
        means = self.mean_losses(leaves, buffers, index, filled, keys, streams, train=not self.whole)
        names = list(leaves)
        # a parameter that the loss does not reach has a gradient of zero, as in the loop
        gradients = torch.autograd.grad(means.sum(), [leaves[n] for n in names], materialize_grads=True)
        found = dict(zip(names, gradients, strict=True))
        if len(self.parts) == 1:  # a whole vector has one type
            found = {n: g.to(self.objective.dtype) for n, g in found.items()}
        return [part.flatten({n: found[n] for n in part.names}) for part in self.parts], means.detach()

    def named(self, y: list[Tensor]) -> dict[str, Tensor]:
        """The parameters by name: views of the parts."""
        return {n: p for part, own in zip(self.parts, y, strict=True) for n, p in part.unflatten(own).items()}

    def mean_losses(
        self, parameters: dict[str, Tensor], buffers: Buffers, index: Tensor, filled: Tensor | None,
        keys: Tensor | None, streams: Tensor | None = None, *, train: bool,
    ) -> Tensor:  # fmt: skip
        """Every row's mean loss over the real samples of its batch [rows]; their sum if `whole`."""
        x, y = self._batch(index, keys)
        mask = None if filled is None else torch.arange(y.shape[1], device=y.device) < filled.unsqueeze(1)
        losses = self.forward.losses(parameters, buffers, x, y, mask, train=train, streams=streams)
        if mask is None or filled is None:
            return losses.sum(1) if self.whole else losses.mean(1)
        sums = torch.where(mask, losses, 0.0).sum(1)
        return sums if self.whole else sums / filled.clamp(min=1)

    def _batch(self, index: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather, augment and normalise the batches of all rows: [rows, B, ...]."""
        x = _take(self.data.x, index)
        if self.augmentation is not None and keys is not None:
            x = self.augmentation(x, keys)
        return prepare(x, self.data.mean, self.data.std, self.objective.dtype), _take(self.data.y, index)

    def apply(
        self, local: list[Any], down: list[Any], grads: list[Tensor], lr: Any, filled: Tensor | None
    ) -> list[Any]:
        """The algorithm's step, part by part; a row without this step stays as it is."""
        grads = _with_own_memory([grad.to(self.objective.dtype) for grad in grads])
        if self.clip is not None:
            grads = _clipped(grads, self.clip)
        active = None if filled is None else (filled > 0).unsqueeze(1)
        made = []
        for part, old, fixed, grad in zip(self.parts, local, down, grads, strict=True):
            # with no state but y, nothing can hold on to the gradient
            free = grad.is_cpu and grad.is_contiguous() and sum(v is not None for v in old) == 1
            with using_up(grad) if free else nullcontext():
                new = self.algorithm.step(old, fixed, grad, lr, part)
            if active is not None:
                new = type(new)(
                    *(None if n is None else torch.where(active, n, o) for n, o in zip(new, old, strict=True))
                )
            made.append(new)
        return made


class Summing(NamedTuple):
    """Local state that stays at y and adds up gradients."""

    y: Tensor
    total: Tensor


class Nowhere(NamedTuple):
    """A broadcast that nobody reads."""

    x: Tensor | None = None


@dataclass(frozen=True)
class SumOfGradients:
    """The gradient over all data in the form of local steps, so that a GPU runs both in the same way."""

    def step(self, local: Summing, down: Nowhere, grad: Tensor, lr: Any, layers: Layers) -> Summing:
        """Stay, and add the gradient."""
        return Summing(local.y, local.total + grad)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values[index], by whole samples: on a CPU several times as fast."""
    return values.index_select(0, index.flatten()).reshape(*index.shape, *values.shape[1:])


def _with_own_memory(grads: list[Tensor]) -> list[Tensor]:
    """A gradient is used up by its step, and autograd gives parameters that are added the same one: copy those."""
    seen: set[int] = set()
    made = []
    for grad in grads:
        shared = grad.is_cpu and grad.data_ptr() in seen
        made.append(grad.clone() if shared else grad)
        if grad.is_cpu:
            seen.add(grad.data_ptr())
    return made


def _clipped(grads: list[Tensor], limit: float | Tensor) -> list[Tensor]:
    """Every row's gradient scaled down to norm `limit` if it is longer."""
    norms = torch.stack([torch.linalg.vector_norm(grad, dim=-1) for grad in grads])
    norm = torch.linalg.vector_norm(norms, dim=0).unsqueeze(1)
    return [torch.where(norm > limit, grad * (limit / norm), grad) for grad in grads]


def split(record: Any, parts: Sequence[Layers]) -> list[Any]:
    """Return one record of views per part. Vectors and numbers per layer are split, numbers per row are repeated."""
    sizes = [part.size for part in parts]

    def pieces(value: Tensor | None) -> Sequence[Tensor | None]:
        if value is not None and value.shape[-1] == sum(sizes):
            return torch.split(value, sizes, dim=-1)
        if value is not None and value.shape[-1] == len(parts):  # one number per layer: every part is a layer
            return torch.split(value, 1, dim=-1)
        return [value] * len(parts)

    return [type(record)(*fields) for fields in zip(*map(pieces, record), strict=True)]


def join(records: list[Any], like: Any) -> Any:
    """Return the records of all parts as one, with fields of the same sizes as those of `like`."""
    if len(records) == 1:
        return records[0]

    def joined(values: Sequence[Any], whole: Tensor | None) -> Any:
        is_split = whole is not None and whole.shape[-1] > 1
        return torch.cat(list(values), dim=-1) if is_split else values[0]

    return type(like)(*map(joined, zip(*records, strict=True), like))


def works_by_layer(algorithm: Algorithm) -> bool:
    """Return whether a step part by part, one part per tensor, is the step on the whole vector."""
    if algorithm.grouping != "tensor":
        return False
    for local, down, grad in made_up(algorithm):
        whole = algorithm.step(local, down, grad, 0.1, TINY)
        parts = TINY.parts()
        grads = torch.split(grad, [part.size for part in parts], dim=-1)
        rows = zip(parts, split(local, parts), split(down, parts), grads, strict=True)
        by_part = join([algorithm.step(own, fixed, g, 0.1, part) for part, own, fixed, g in rows], local)
        if not _equal(whole, by_part):
            return False
    return True


def works_by_row(algorithm: Algorithm) -> bool:
    """Whether a step on two rows is the step on each: it is not if the algorithm branches on a tensor's value, say."""
    for local, down, grad in made_up(algorithm):

        def alone(r: int, local: Any = local, down: Any = down, grad: Tensor = grad) -> Any:
            return algorithm.step(_only(local, r), _only(down, r), grad[r : r + 1], 0.1, TINY)

        apart = [alone(0), alone(1)]
        try:
            together = algorithm.step(local, down, grad, 0.1, TINY)
        except RuntimeError:  # "Boolean value of Tensor with more than one value is ambiguous"
            return False
        if not all(_equal(_only(together, r), one) for r, one in enumerate(apart)):
            return False
    return True


def made_up(algorithm: Algorithm) -> Iterator[tuple[Any, Any, Tensor]]:
    """Local state, broadcast and gradient of two rows of a small model, in many sizes.

    A step may couple layers or rows only when something is large or small, as clipping does. One row is larger than
    the other by more than the sizes are apart, so that whatever the limit is, once it lies between the two.
    """
    generator = torch.Generator().manual_seed(0)
    larger = torch.tensor([[1.0], [30.0]], dtype=torch.float64)

    def draw(size: int) -> Tensor:
        return larger * torch.rand((2, size), generator=generator, dtype=torch.float64)

    x = draw(TINY.size)[0]
    needs = algorithm.needs(1)
    sent = algorithm.broadcast(
        algorithm.init(x, TINY), ServerInfo(1, 0.1, TINY, mean_gradient=x if needs.control_variate else None)
    )
    info = ClientInfo(1, 0.1, TINY, full_gradient=x if needs.full_gradient else None)
    begun = algorithm.begin(sent, algorithm.client_init(x, TINY), info)
    sizes = [10.0**exponent for exponent in range(-6, 7)]
    for of_state, of_gradient in [(1.0, size) for size in sizes] + [(size, 1.0) for size in sizes]:
        local, down = (
            type(record)(*(None if v is None else of_state * draw(v.shape[-1]) for v in record))
            for record in (begun, sent)
        )
        yield local, down, of_gradient * draw(TINY.size)


def _only(record: Any, r: int) -> Any:
    return type(record)(*(None if value is None else value[r : r + 1] for value in record))


def _equal(one: Any, other: Any) -> bool:
    pairs = ((a, b) for a, b in zip(one, other, strict=True) if a is not None)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0.0) for a, b in pairs)
