"""Find out whether an algorithm computes every layer, and every client, independently of the others.

Its functions are tried on a tiny model. The state of an algorithm with independent layers is kept in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, Number, ServerInfo, options, step_kinds
from lamina.algorithms.rehearsal import TINY
from lamina.engines.stacked.probe import reads_values
from lamina.engines.stacked.rows import map_record
from lamina.layers import Layers

SIZES = tuple(10.0**exponent for exponent in range(-6, 7, 2))  # of the states and gradients that are tried


def parts_of(algorithm: Algorithm, layers: Layers) -> list[Layers]:
    """Return the parts that local state is kept in during training: one per parameter tensor, or a single one."""
    parts = layers.parts()
    # If every tensor has one element, vectors, numbers per layer and numbers per row have the same shape.
    return parts if any(part.size > 1 for part in parts) and works_by_layer(algorithm) else [layers]


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


def works_by_layer(algorithm: Algorithm) -> bool:
    """Return whether a step part by part, one part per tensor, is the step on the whole vector.

    A norm of the whole gradient, in the step or for its second point, makes a difference.
    """
    if algorithm.grouping != "tensor":
        return False
    parts = TINY.parts()
    for local, down, grads in _random_steps(algorithm):
        whole = _step_results(algorithm, local, down, grads, TINY)
        rows = zip(split(local, parts), split(down, parts), split(grads, parts), parts, strict=True)
        by_part = zip(*(_step_results(algorithm, *row) for row in rows), strict=True)
        if not all(_equal(one, join(list(pieces), local)) for one, pieces in zip(whole, by_part, strict=True)):
            return False
    return True


def works_by_row(algorithm: Algorithm) -> bool:
    """Return whether an algorithm computes the same for two rows together as for each alone; a norm of both does not.

    A branch changes the results only if some values are on either side of it, so this also looks for the read itself.
    """
    local, down, grads = next(_random_steps(algorithm))
    one = functools.partial(_step_results, algorithm, _only(local, 0), _only(down, 0), _only(grads, 0), TINY)
    if reads_values(one) or reads_values(lambda: _tiny_round(algorithm)):  # of one row: two would raise other errors
        return False
    return _matches_single_rows(algorithm, (algorithm, algorithm), SIZES)


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
    return _matches_single_rows(both, (one, other), (1.0,))


class _Gradients(NamedTuple):
    first: Tensor
    second: Tensor


def _matches_single_rows(both: Algorithm, singles: tuple[Algorithm, Algorithm], sizes: Sequence[float]) -> bool:
    """Return whether `both` computes for two rows what the first and the second of `singles` compute for one each."""
    try:
        return _steps_match(both, singles, sizes) and _rounds_match(both, singles, sizes)
    except Exception:  # such as "Boolean value of Tensor with more than one value is ambiguous"
        return False


def _steps_match(both: Algorithm, singles: tuple[Algorithm, Algorithm], sizes: Sequence[float]) -> bool:
    for local, down, grads in _random_steps(singles[0], sizes):
        together = _step_results(both, local, down, grads, TINY)
        for r, single in enumerate(singles):
            alone = _step_results(single, _only(local, r), _only(down, r), _only(grads, r), TINY)
            if not all(_equal(_only(one, r), other) for one, other in zip(together, alone, strict=True)):
                return False
    return True


def _rounds_match(both: Algorithm, singles: tuple[Algorithm, Algorithm], sizes: Sequence[float]) -> bool:
    """Compare whole rounds, because only real rounds give clients the states that `begin` and `finish` expect."""
    extremes = sorted({min(sizes), 1.0, max(sizes)})
    for x, gradient in _random_vectors([(1.0, e) for e in extremes] + [(e, 1.0) for e in extremes]):
        starts = list(map(_tiny_start, singles, x, gradient))
        info, has_full = starts[0][2], starts[0][2].full_gradient is not None
        downs, clients = ([map_record(lambda v: v.unsqueeze(0), start[i]) for start in starts] for i in (0, 1))
        for _ in range(2):
            rows = [gradient[r : r + 1] for r in (0, 1)]
            alone = [
                _round_results(single, down, client, row, info._replace(full_gradient=row if has_full else None))
                for single, down, client, row in zip(singles, downs, clients, rows, strict=True)
            ]
            joint_info = info._replace(full_gradient=gradient if has_full else None)
            together = _round_results(both, _stacked(downs), _stacked(clients), gradient, joint_info)
            for r, results in enumerate(alone):
                if not all(_equal(_only(one, r), other) for one, other in zip(together, results, strict=True)):
                    return False
            clients = [results[-1] for results in alone]
    return True


def _round_results(algorithm: Algorithm, down: Any, client: Any, gradient: Tensor, info: ClientInfo) -> list[Any]:
    """Return what a client computes in a round of one step: its local states, the upload and its new state."""
    begun = algorithm.begin(down, client, info)
    local = _step_results(algorithm, begun, down, _Gradients(gradient, gradient.flip(-1)), TINY)[-1]
    return [begun, local, *algorithm.finish(local, down, client, info)]


def _step_results(algorithm: Algorithm, local: Any, down: Any, grads: _Gradients, layers: Layers) -> list[Any]:
    """Return all that a local step computes: the new state and, if there is one, the state at the second point."""
    results = []
    for has_second in step_kinds(algorithm):
        second = {"second_grad": grads.second} if has_second else {}
        if has_second:
            results.append(local._replace(y=algorithm.second_point(local, down, grads.first, 0.1, layers)))
        results.append(algorithm.step(local, down, grads.first, 0.1, layers, **second))
    return results


def _random_steps(algorithm: Algorithm, sizes: Sequence[float] = SIZES) -> Iterator[tuple[Any, Any, _Gradients]]:
    """Yield local state, broadcast and gradients of two rows of a tiny model, in many sizes.

    A step may couple layers or rows only when something is large or small, as clipping does. One row is larger than
    the other by more than the sizes are apart, so that whatever the limit is, once it lies between the two.
    """
    generator = torch.Generator().manual_seed(0)
    start, broadcast, *_ = _tiny_round(algorithm)
    for of_state, of_gradient in [(1.0, size) for size in sizes] + [(size, 1.0) for size in sizes]:
        local, down = (
            type(record)(*(None if v is None else of_state * _draw(v.shape[-1], generator) for v in record))
            for record in (start, broadcast)
        )
        first = of_gradient * _draw(TINY.size, generator)
        yield local, down, _Gradients(first, second=first.flip(-1))


def _random_vectors(sizes: Sequence[tuple[float, float]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two rows of models and gradients in these sizes."""
    generator = torch.Generator().manual_seed(0)
    for of_model, of_gradient in sizes:
        yield of_model * _draw(TINY.size, generator), of_gradient * _draw(TINY.size, generator)


def _draw(size: int, generator: torch.Generator) -> Tensor:
    larger = torch.tensor([[1.0], [300.0]], dtype=torch.float64)
    return larger * torch.rand((2, size), generator=generator, dtype=torch.float64)


def _tiny_start(algorithm: Algorithm, x: Tensor, gradient: Tensor) -> tuple[Any, Any, ClientInfo]:
    """Return the broadcast, the client's state and its `ClientInfo`, at the start of a tiny model."""
    needs = algorithm.needs(1)
    server_info = ServerInfo(1, 0.1, TINY, mean_gradient=gradient if needs.control_variate else None)
    down, client = algorithm.broadcast(algorithm.init(x, TINY), server_info), algorithm.client_init(x, TINY)
    return down, client, ClientInfo(1, 0.1, TINY, full_gradient=gradient if needs.full_gradient else None)


def _tiny_round(algorithm: Algorithm) -> tuple[Any, ...]:
    """Return the local state and the broadcast at the start of a tiny model, and what `finish` makes of them."""
    x = torch.rand(TINY.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    down, client, info = _tiny_start(algorithm, x, x)
    local = algorithm.begin(down, client, info)
    return local, down, algorithm.finish(local, down, client, info)


def _stacked(records: Sequence[Any]) -> Any:
    return type(records[0])(*(None if v[0] is None else torch.cat(v) for v in zip(*records, strict=True)))


def _only(record: Any, r: int) -> Any:
    return type(record)(*(None if value is None else value[r : r + 1] for value in record))


def _equal(one: Any, other: Any) -> bool:
    pairs = ((a, b) for a, b in zip(one, other, strict=True) if a is not None)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True) for a, b in pairs)
