"""Find out whether clients can share a batch: whether a module's results depend on values of the whole batch.

If in doubt, clients are trained one by one.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from lamina.base import rng
from lamina.base.dispatch import WatchingMode
from lamina.base.errors import LaminaError
from lamina.engines.stacked.layers.attention_masks import unread_masks
from lamina.objective import functional_dropout
from lamina.objective import objective as objective_module
from lamina.objective.batch import Inputs, Targets, map_batch, tensors
from lamina.objective.objective import Objective

MOST_SCANNED = 1 << 21  # numbers of a data set that are searched for extreme samples
PROBE_CLIENTS, PROBE_BATCH = 4, 5
ODD_BATCHES = (31, 37, 41, 43, 47, 53, 59, 61)  # samples of the forward pass that is watched

_NOT_THE_USERS = (str(Path(torch.__file__).parent), __file__, objective_module.__file__, functional_dropout.__file__)


class ProbeCase(NamedTuple):
    """A number of clients that are tried together, the size of their batches, and how many samples of each are real."""

    clients: int
    batch: int
    real: int


# A module may depend on a sample's position in the batch, or on the size of the batch, modulo some m. It looks right
# if m divides both batches (positions), 4 * 5 - 5 and 3 * 6 - 5 (sizes, stacked) or 6 - 5 (sizes, vmap):
# only m = 1 does.
FULL = ProbeCase(PROBE_CLIENTS, PROBE_BATCH, real=PROBE_BATCH)
PADDED = ProbeCase(PROBE_CLIENTS - 1, PROBE_BATCH + 1, real=PROBE_BATCH)


def probe_samples(x: Inputs) -> Tensor:
    """Return the indices of `PROBE_CLIENTS` batches, one after the other, that differ as much as the data allow.

    A module that computes something over its batch (a mean, a maximum, a threshold on one of them) gives other results
    for all batches together than for each alone: one batch has the most extreme values, one the largest mean, one the
    smallest mean, and one only ordinary samples.
    """
    device = tensors(x)[0].device
    step = max(1, -(-sum(values.numel() for values in tensors(x)) // MOST_SCANNED))
    parts = [v[::step].flatten(1) if v.dim() > 1 else v[::step].unsqueeze(1) for v in tensors(x)]
    rows = parts[0] if len(parts) == 1 else torch.cat([part.double() for part in parts], 1)
    if not rows.shape[1]:
        return torch.zeros(PROBE_CLIENTS * PROBE_BATCH, dtype=torch.long, device=device)
    if rows.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):  # torch cannot compare all of them
        rows = rows.double()
    sums, high, low = rows.sum(1, dtype=torch.float64), rows.amax(1).double(), rows.amin(1).double()
    usable = torch.isfinite(sums).nonzero().flatten()  # a NaN in the data is for the run to report
    usable = usable if len(usable) else torch.arange(len(rows), device=device)
    sums, high, low = sums[usable], high[usable], low[usable]
    spread = torch.linspace(0, len(usable) - 1, PROBE_BATCH, device=device).long()[1:-1]
    batches = [
        torch.sort(sums, descending=True).indices,
        torch.cat([spread, torch.stack([low.argmin(), high.argmax()])]),
        torch.sort(high - low).indices,
        torch.sort(sums).indices,
    ]
    places = torch.arange(PROBE_BATCH, device=device)
    return usable[torch.cat([batch[places % len(batch)] for batch in batches])] * step


def value_read(objective: Objective, module: torch.nn.Module, inputs: Inputs, targets: Targets) -> str:
    """Return how the module or the loss lets a result depend on the values of the whole batch, or an empty string.

    Several clients at once are one batch, so a Python branch on a value (``if x.max() > 3``) would decide for all.
    The same holds for a value that is computed over the whole batch (``torch.where(x.max() > 3, a, b)``).
    Samples reveal this only if their values cross the limit, so this function watches for the read itself.
    """
    chosen = odd_samples(objective, inputs, targets)
    _Watched.batch = len(chosen) if len(chosen) in ODD_BATCHES else 0
    watched, compared = (
        map_batch(lambda values: values[chosen].as_subclass(_Watched), part) for part in (inputs, targets)
    )
    parameters = {n: p.as_subclass(_Watched) for n, p in objective.layers.unflatten(objective.start).items()}
    with rng.forked(objective.device):
        for train in (True, False):
            buffers = {n: b.clone() for n, b in objective.buffers.items()}
            try:
                with unread_masks():
                    outputs = objective.outputs_at(parameters, buffers, watched, train=train, module=module)
                objective.losses(outputs, compared)
            except _DependsOnBatch as found:
                return str(found)
            except LaminaError:
                raise
            except Exception as error:  # whatever a user's forward raises on a subclass of Tensor
                reason = " ".join(str(error).split())[:200]
                return f"what the model does with values cannot be followed: {type(error).__name__}: {reason}"
    return ""


def odd_samples(objective: Objective, inputs: Inputs, targets: Targets) -> Tensor:
    """Return the indices of samples whose number divides no other size in the model, if there is such a number."""
    shapes = [*objective.layers.shapes.values(), *(b.shape for b in objective.buffers.values())]
    shapes += [tuple(values.shape[1:]) for values in (*tensors(inputs), *tensors(targets))]
    sizes = {size for shape in (*shapes, *(p.shape for p in objective.frozen.values())) for size in shape}
    count = len(tensors(targets)[0])
    number = next((n for n in ODD_BATCHES if not any(size % n == 0 for size in sizes)), count)
    return torch.arange(number, device=objective.device) % count


def reads_values(work: Callable[[], object]) -> bool:
    """Return whether a function branches on tensors' values or reads them, whatever the values are."""
    try:
        with _NoReads():  # type: ignore[no-untyped-call]
            work()
    except _DependsOnBatch:
        return True
    return False


class _DependsOnBatch(Exception):
    """A result depends on values of the whole batch; the text says how and where."""


class _Watched(Tensor):
    """A tensor that refuses to be read into Python, as do all tensors computed from it."""

    batch = 0  # samples of the watched forward pass; 0: not told from other sizes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES_TO_PYTHON:
            _refuse(f"reads a tensor's values ({func.__name__})")
        for option in _REFUSED_OPTIONS.get(func, ()):
            value = inspect.signature(func).bind(*args, **kwargs).arguments.get(option)
            if value is not None and value is not False:
                _refuse(f"uses {func.__name__} with {option}")
        if getattr(func, "__module__", "") == F.__name__:  # torch's own functions look at values only to check them
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with _NoValues():  # type: ignore[no-untyped-call]
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class _NoReads(WatchingMode):  # type: ignore[no-untyped-call]
    """A context that refuses operations whose Python result depends on a tensor's values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            _refuse("branches on a tensor's value or reads it")
        return func(*args, **(kwargs or {}))


class _NoValues(_NoReads):  # type: ignore[no-untyped-call]
    """A context that also refuses a shape that depends on values, and a value that is computed over all samples."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and not _takes_whole_numbers(func, args):
            _refuse(f"makes a tensor whose shape depends on values ({func.overloadpacket.__name__})")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _Watched.batch and _has_samples((args, kwargs)) and not _has_samples(result):
            name = func.overloadpacket.__name__
            if not name.startswith("new_") and not _is_empty(result):  # new_zeros takes only the type
                _refuse(f"computes one value over all samples of a batch ({name})")
        return result


def _has_samples(values: Any) -> bool:
    """Return whether some tensor has an axis of samples, perhaps merged with other axes."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return any(size and size % _Watched.batch == 0 for tensor in tensors for size in tensor.shape)


def _is_empty(values: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))


def _takes_whole_numbers(func: Any, args: Any) -> bool:
    """Return whether an operation indexes by positions (the result has the shape of the index), not by a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _refuse(what: str) -> NoReturn:
    user_frames = (f for f in reversed(traceback.extract_stack()) if not f.filename.startswith(_NOT_THE_USERS))
    where = next((f" ({Path(f.filename).name}:{f.lineno})" for f in user_frames), "")
    raise _DependsOnBatch(f"the model or the loss {what}{where}, so clients cannot share a batch")


# options that vmap computes wrongly, or that count tokens over the batch
_REFUSED_OPTIONS = {
    F.embedding: ("scale_grad_by_freq", "padding_idx", "max_norm"),
    F.embedding_bag: ("scale_grad_by_freq", "max_norm"),
}
# not seen by a dispatch mode: they copy memory
_COPIES_TO_PYTHON = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)
