"""Find out whether an algorithm computes every layer, and every client, independently of the others.

Its functions are tried on a tiny model with states and gradients of many sizes. A user's algorithm is also tried on the
layers of the real model, because it may treat coordinates by their number. The state of an algorithm with independent
layers is kept in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Number, ServerInfo, loss_argument, step_kinds
from lamina.algorithms.declaration import options
from lamina.algorithms.rehearsal import TINY, is_user_defined
from lamina.engines.stacked.probe import reads_values
from lamina.engines.stacked.rows import map_record
from lamina.objective.layers import Layers

SIZES = tuple(10.0**exponent for exponent in range(-6, 7, 2))  # of the states and gradients that are tried


@dataclass(frozen=True)
class Trial:
    """Layers to try an algorithm on, and the kind of states and gradients to try it with."""

    layers: Layers
    sizes: tuple[float, ...]
    dtype: torch.dtype
    device: torch.device
    tolerance: float  # elements with this relative difference are equal
    slack: float = 0.0  # and so are those that differ by this much of the largest element

    def draw(self, count: int, generator: torch.Generator, rows: int = 2) -> Tensor:
        """Draw rows of positive numbers. The second is the larger by more than the sizes are apart.

        A step may couple layers or rows only when something is large or small, as clipping does. So whatever its limit
        is, once it lies between the two rows.
        """
        larger = torch.tensor([[1.0], [300.0]], dtype=self.dtype)[:rows]
        return (larger * torch.rand((rows, count), generator=generator, dtype=self.dtype)).to(self.device)

    def equal(self, one: Any, other: Any) -> bool:
        """Return whether two records have equal fields."""
        pairs = ((a, b) for a, b in zip(one, other, strict=True) if a is not None)
        return all(a.shape == b.shape and self._close(a, b) for a, b in pairs)

    def _close(self, one: Tensor, other: Tensor) -> bool:
        size = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max()) if self.slack and other.numel() else 0.0
        return torch.allclose(one, other, rtol=self.tolerance, atol=self.slack * size, equal_nan=True)


ON_TINY_MODEL = Trial(TINY, SIZES, torch.float64, torch.device("cpu"), tolerance=1e-9)


Check = Callable[[Algorithm, Trial], bool]


def _passes(check: Check, algorithm: Algorithm, layers: Layers, device: torch.device) -> bool:
    """Return whether an algorithm passes a check on a tiny model and, if it is a user's, on the real one."""
    if not is_user_defined(algorithm):
        return _passes_on_tiny_model(check, algorithm)
    return check(algorithm, ON_TINY_MODEL) and check(algorithm, _on_real_model(layers, device))


@functools.lru_cache(maxsize=256)  # similar runs ask the same questions
def _passes_on_tiny_model(check: Check, algorithm: Algorithm) -> bool:
    return check(algorithm, ON_TINY_MODEL)


def _on_real_model(layers: Layers, device: torch.device) -> Trial:
    """Return a trial with one size and float32, because the model may be large."""
    return Trial(layers, (1.0,), torch.float32, device, tolerance=1e-5, slack=1e-5)


def parts_of(algorithm: Algorithm, layers: Layers, device: torch.device) -> list[Layers]:
    """Return the parts that local state is kept in during training: one per parameter tensor, or a single one."""
    parts = layers.parts()
    # If every tensor has one element, vectors, numbers per layer and numbers per row have the same shape.
    return parts if any(part.size > 1 for part in parts) and works_by_layer(algorithm, layers, device) else [layers]


def split(record: Any, parts: Sequence[Layers]) -> list[Any]:
    """Return one record of views per part. Vectors and numbers per layer are split, numbers per row are repeated."""
    sizes = [part.size for part in parts]

    def pieces(value: Tensor | None) -> Sequence[Tensor | None]:
        if value is not None and value.shape[-1] == sum(sizes):
            return torch.split(value, sizes, dim=-1)
        if value is not None and value.shape[-1] == len(parts):  # one number per layer: every part is a layer
            return torch.split(value, 1, dim=-1)
        return [value] * len(parts)

    if not record:
        return [record] * len(parts)
    return [type(record)(*fields) for fields in zip(*map(pieces, record), strict=True)]


def join(records: list[Any], like: Any) -> Any:
    """Return the records of all parts as one, with fields of the same sizes as those of `like`."""
    if len(records) == 1:
        return records[0]

    def joined(values: Sequence[Any], whole: Tensor | None) -> Any:
        is_split = whole is not None and whole.shape[-1] > 1
        return torch.cat(list(values), dim=-1) if is_split else values[0]

    return type(like)(*map(joined, zip(*records, strict=True), like))


def works_by_layer(algorithm: Algorithm, layers: Layers, device: torch.device) -> bool:
    """Return whether a step part by part, one part per tensor, is the step on the whole vector.

    A norm of the whole gradient, in the step or for its second point, makes a difference, and so does a slice.
    """
    return algorithm.grouping == "tensor" and _passes(_steps_by_part, algorithm, layers, device)


def _steps_by_part(algorithm: Algorithm, trial: Trial) -> bool:
    parts = trial.layers.parts()
    try:
        for local, down, grads in _random_steps(algorithm, trial):
            whole = _step_results(algorithm, local, down, grads, trial.layers)
            rows = zip(split(local, parts), split(down, parts), split(grads, parts), parts, strict=True)
            by_part = zip(*(_step_results(algorithm, *row) for row in rows), strict=True)
            if not all(trial.equal(one, join(list(pieces), local)) for one, pieces in zip(whole, by_part, strict=True)):
                return False
    except Exception:  # such as that of the ten largest elements of a layer with three
        return False
    return True


def works_by_row(algorithm: Algorithm, layers: Layers, device: torch.device) -> bool:
    """Return whether an algorithm computes the same for two rows together as for each alone; a norm of both does not.

    A branch changes the results only if some values are on either side of it, so this also looks for the read itself.
    """
    return _passes(_rows_are_independent, algorithm, layers, device)


def _rows_are_independent(algorithm: Algorithm, trial: Trial) -> bool:
    try:
        # of one row, because two would raise other errors
        local, down, grads = (_only(record, 0) for record in next(_random_steps(algorithm, trial)))
        step = functools.partial(_step_results, algorithm, local, down, grads, trial.layers)
        if reads_values(step) or reads_values(functools.partial(_first_round, algorithm, trial)):
            return False
    except Exception:  # such as that of the 100 largest elements of a tiny model
        return False
    return _matches_single_rows(algorithm, (algorithm, algorithm), trial)


def ignores_order(algorithm: Algorithm, layers: Layers, device: torch.device) -> bool:
    """Return whether the elements of a layer may stand in another order, as convolution kernels do on a GPU."""
    layout = layers.channels_last(device)
    if layout is None or not is_user_defined(algorithm):
        return True
    trial = _on_real_model(layers, device)
    generator = torch.Generator().manual_seed(0)
    x, gradient = (trial.draw(layers.size, generator, rows=1)[0] for _ in range(2))
    down, client, info = _first_broadcast(algorithm, x, gradient, layers)

    def ordered(record: Any) -> Any:
        return map_record(lambda v: v.index_select(-1, layout.order) if v.shape[-1] == layers.size else v, record)

    full = None if info.full_gradient is None else info.full_gradient[layout.order]
    second = gradient.roll(1)
    # a loss that a step may well be proportional to: rounding would be most of a much shorter one
    grads = _Gradients(gradient, second, gradient.sum().reshape(1))
    usual = _round_results(algorithm, down, client, grads, info)
    other_info = info._replace(layers=layout, full_gradient=full)
    other = _round_results(algorithm, ordered(down), ordered(client), ordered(grads), other_info)
    return all(trial.equal(ordered(one), two) for one, two in zip(usual, other, strict=True))


@functools.lru_cache(maxsize=256)
def work_together(one: Algorithm, other: Algorithm) -> bool:
    """Return whether two algorithms can share rows, with columns of the numbers in which they differ.

    They cannot if a formula branches on such a number.
    """
    names = [name for name in options(type(one)) if getattr(one, name) != getattr(other, name)]
    return _takes_columns(names, one, other)


def number_without_column(algorithm: Algorithm) -> str:
    """Return the name of a `Number` that cannot be a column, as it is on a GPU, or an empty string."""
    names = number_options(algorithm)
    if _takes_columns(names, algorithm, algorithm):
        return ""
    return next((name for name in names if not _takes_columns([name], algorithm, algorithm)), "")


def number_options(algorithm: Algorithm) -> list[str]:
    """Return the options that are declared as a `Number`, without infinite ones ("no limit")."""
    kinds = {name: option.type for name, option in options(type(algorithm)).items()}
    values = {name: getattr(algorithm, name) for name, kind in kinds.items() if kind in ("Number", Number)}
    return [name for name, value in values.items() if isinstance(value, Tensor) or math.isfinite(value)]


def _takes_columns(names: Sequence[str], one: Algorithm, other: Algorithm) -> bool:
    columns = {n: torch.tensor([[getattr(one, n)], [getattr(other, n)]], dtype=torch.float64) for n in names}
    both = dataclasses.replace(one, **columns)  # type: ignore[type-var]
    return _matches_single_rows(both, (one, other), dataclasses.replace(ON_TINY_MODEL, sizes=(1.0,)))


class _Gradients(NamedTuple):
    first: Tensor
    second: Tensor
    loss: Tensor  # of the batch [..., 1]


def _matches_single_rows(both: Algorithm, singles: tuple[Algorithm, Algorithm], trial: Trial) -> bool:
    """Return whether `both` computes for two rows what the first and the second of `singles` compute for one each."""
    try:
        return _steps_match(both, singles, trial) and _rounds_match(both, singles, trial)
    except Exception:  # such as "Boolean value of Tensor with more than one value is ambiguous"
        return False


def _steps_match(both: Algorithm, singles: tuple[Algorithm, Algorithm], trial: Trial) -> bool:
    for local, down, grads in _random_steps(singles[0], trial):
        together = _step_results(both, local, down, grads, trial.layers)
        for r, single in enumerate(singles):
            alone = _step_results(single, _only(local, r), _only(down, r), _only(grads, r), trial.layers)
            if not all(trial.equal(_only(one, r), other) for one, other in zip(together, alone, strict=True)):
                return False
    return True


def _rounds_match(both: Algorithm, singles: tuple[Algorithm, Algorithm], trial: Trial) -> bool:
    """Compare whole rounds, because only real rounds give clients the states that `begin` and `finish` expect."""
    extremes = sorted({min(trial.sizes), 1.0, max(trial.sizes)})
    generator = torch.Generator().manual_seed(0)
    for of_model, of_gradient in _pairs(extremes):
        x = of_model * trial.draw(trial.layers.size, generator)
        gradient = of_gradient * trial.draw(trial.layers.size, generator)
        starts = [_first_broadcast(one, x[r], gradient[r], trial.layers) for r, one in enumerate(singles)]
        info, has_full = starts[0][2], starts[0][2].full_gradient is not None
        downs, clients = ([map_record(lambda v: v.unsqueeze(0), start[i]) for start in starts] for i in (0, 1))
        grads = _Gradients(gradient, gradient.flip(-1), gradient[:, :1])
        for _ in range(2):
            rows = [_only(grads, r) for r in (0, 1)]
            alone = [
                _round_results(single, down, client, row, info._replace(full_gradient=row.first if has_full else None))
                for single, down, client, row in zip(singles, downs, clients, rows, strict=True)
            ]
            joint_info = info._replace(full_gradient=gradient if has_full else None)
            together = _round_results(both, _stacked(downs), _stacked(clients), grads, joint_info)
            for r, results in enumerate(alone):
                if not all(trial.equal(_only(one, r), other) for one, other in zip(together, results, strict=True)):
                    return False
            clients = [results[-1] for results in alone]
    return True


def _round_results(algorithm: Algorithm, down: Any, client: Any, grads: _Gradients, info: ClientInfo) -> list[Any]:
    """Return what a client computes in a round of one step: its local states, the upload and its new state."""
    begun = algorithm.begin(down, client, info)
    local = _step_results(algorithm, begun, down, grads, info.layers)[-1]
    return [begun, local, *algorithm.finish(local, down, client, info)]


def _step_results(algorithm: Algorithm, local: Any, down: Any, grads: _Gradients, layers: Layers) -> list[Any]:
    """Return all that a local step computes: the new state and, if there is one, the state at the second point."""
    results = []
    for has_second in step_kinds(algorithm):
        more = ({"second_grad": grads.second} if has_second else {}) | loss_argument(algorithm, grads.loss)
        if has_second:
            results.append(local._replace(y=algorithm.second_point(local, down, grads.first, 0.1, layers)))
        results.append(algorithm.step(local, down, grads.first, 0.1, layers, **more))
    return results


def _random_steps(algorithm: Algorithm, trial: Trial) -> Iterator[tuple[Any, Any, _Gradients]]:
    """Yield local state, broadcast and gradients of two rows, in the trial's sizes."""
    generator = torch.Generator().manual_seed(0)
    start, broadcast, *_ = _first_round(algorithm, trial)
    for of_state, of_gradient in _pairs(trial.sizes):
        local, down = (
            type(record)(*(None if v is None else of_state * trial.draw(v.shape[-1], generator) for v in record))
            for record in (start, broadcast)
        )
        first = of_gradient * trial.draw(trial.layers.size, generator)
        yield local, down, _Gradients(first, second=first.flip(-1), loss=first[:, :1])


def _pairs(sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Return sizes of two things, of which one is always 1."""
    return list(dict.fromkeys([(1.0, size) for size in sizes] + [(size, 1.0) for size in sizes]))


def _first_broadcast(algorithm: Algorithm, x: Tensor, gradient: Tensor, layers: Layers) -> tuple[Any, Any, ClientInfo]:
    """Return the broadcast of round 1, the client's state and its `ClientInfo`."""
    needs = algorithm.needs(1)
    server_info = ServerInfo(1, 0.1, layers, mean_gradient=gradient if needs.control_variate else None)
    down, client = algorithm.broadcast(algorithm.init(x, layers), server_info), algorithm.client_init(x, layers)
    return down, client, ClientInfo(1, 0.1, layers, full_gradient=gradient if needs.full_gradient else None)


def _first_round(algorithm: Algorithm, trial: Trial) -> tuple[Any, ...]:
    """Return the local state and the broadcast at the start of round 1, and what `finish` makes of them."""
    x = trial.draw(trial.layers.size, torch.Generator().manual_seed(0), rows=1)[0]
    down, client, info = _first_broadcast(algorithm, x, x, trial.layers)
    local = algorithm.begin(down, client, info)
    return local, down, algorithm.finish(local, down, client, info)


def _stacked(records: Sequence[Any]) -> Any:
    return type(records[0])(*(None if v[0] is None else torch.cat(v) for v in zip(*records, strict=True)))


def _only(record: Any, r: int) -> Any:
    return type(record)(*(None if value is None else value[r : r + 1] for value in record))
